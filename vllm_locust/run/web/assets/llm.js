"use strict";
const byId = (id) => document.getElementById(id);
const { number, clock } = LlmCharts;
const POINTS_KEPT = 1800;
let points = [], runId = null, stats = null, form = null, dark = false, formTold = [], newsAt = null;

const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const fill = (parent, children) => parent.replaceChildren(...children);
const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : (seconds * 1e3).toLocaleString("en-US", { maximumFractionDigits: 2 }));
const percent = (share) => (share === null || share === undefined ? "–" : `${(share * 100).toLocaleString("en-US", { maximumFractionDigits: 2 })} %`);
const gib = (bytes) => (bytes === null || bytes === undefined ? "–" : (bytes / 2 ** 30).toFixed(1));

function table(target, heads, rows, none) {
  if (!rows.length) return fill(target, [element("caption", none)]);
  const head = element("tr");
  fill(head, heads.map((text) => {
    const one = element("th", text);
    one.scope = "col";
    return one;
  }));
  fill(target, [head, ...rows.map((cells) => {
    const row = element("tr");
    fill(row, cells.map((cell) => element("td", String(cell))));
    return row;
  })]);
}

function told(pairs) {
  return pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => {
    const one = element("span");
    one.append(element("b", name), document.createTextNode(String(value)));
    return one;
  });
}

// Where the page stands

async function fetchJson(url) {
  const answer = await fetch(url, { cache: "no-store", credentials: "same-origin" });
  if (answer.redirected || !answer.ok || !(answer.headers.get("content-type") ?? "").startsWith("application/json"))
    throw new Error(answer.redirected ? "You are not logged in any more: load this page again." : `The server answered ${answer.status}.`);
  return answer.json();
}

async function refresh() {
  try {
    const after = points.length ? points[points.length - 1].n : 0;
    const query = runId === null ? "" : `?run=${encodeURIComponent(runId)}&after=${after}`;
    stats = await fetchJson(`llm/stats.json${query}`);
    takePoints(stats);
    newsAt = new Date();
    document.body.classList.remove("stale");
    draw();
    banner(formTold.length ? formTold : stats.problems.length ? ["The run could not begin:", ...stats.problems] : []);
  } catch (error) {
    banner([`No news from the server: ${error.message}`]);
    document.body.classList.add("stale");
    badge("state", newsAt === null ? "no news" : `no news since ${newsAt.toLocaleTimeString()}`, "invalid");
  }
  setTimeout(refresh, 1000);
}

function takePoints(told) {
  const id = told.run === null ? null : told.run.run_id;
  if (id !== runId) points = [];
  runId = id;
  points.push(...told.history.points);
  while (points.length > POINTS_KEPT) points = points.filter((_, i) => i % 2 === 0);
}

function banner(lines) {
  byId("banner").hidden = !lines.length;
  byId("banner").textContent = lines.join("\n");
}

function badge(id, text, state) {
  // Said aloud by a screen reader when it changes, and only then.
  if (byId(id).textContent !== text) byId(id).textContent = text;
  byId(id).className = `badge ${state}`;
}

function draw() {
  const going = stats.state !== "ready", preparing = stats.state === "preparing";
  badge("state", stats.state, stats.state);
  // What is told while a run is prepared is of the one before.
  const shown = stats.run !== null && !preparing;
  const verdict = shown ? stats.verdict : null;
  const status = verdict && verdict.status, missed = !going && Boolean(stats.result?.slo?.missed);
  badge("verdict", status ? `${going ? "so far " : ""}${status}${missed ? ", SLO missed" : ""}` : "", missed ? "invalid" : status ?? "");
  byId("stop").hidden = stats.state !== "running" && !preparing;
  byId("start").hidden = going;
  byId("live").hidden = !shown;
  drawResult(going);
  if (!shown) return;
  drawFacts(going, verdict);
  drawTables();
  LlmCharts.draw(points, dark, !going);
}

function drawFacts(going, verdict) {
  const { run, now, totals } = stats;
  fill(byId("facts"), told([
    ["Run", run.run_name ? `${run.run_name} (${run.run_id})` : run.run_id], ["Model", run.model], ["Workload", run.workload],
    ["Target", run.targets.join(", ")], ["Load", run.open_loop ? "open loop" : "closed loop"], ["SLO", run.slos.join(", ")],
    ["Phase", going ? now.phase : "over"], ["Stage", now.stage], ["Elapsed", clock(now.t_s ?? 0)],
    ["Left", now.left_s === null || now.left_s === undefined ? null : clock(now.left_s)],
    ["Workers", stats.workers_connected], ["Telemetry", stats.telemetry_fault],
  ]));
  byId("reasons").hidden = byId("tiles").hidden = !going;
  fill(byId("reasons"), (verdict ? verdict.reasons : []).map((reason) => element("li", reason.sentence, reason.severity)));
  const tiles = [
    ["offered/s", number(now.offered_rps)], ["achieved/s", number(now.achieved_rps)], ["in flight", number(totals.in_flight)],
    ["TTFT p50 ms", ms(now.ttft_p50_s)], ["TTFT p99 ms", ms(now.ttft_p99_s)], ["TPOT p50 ms", ms(now.tpot_p50_s)],
    ["output tokens/s", number(now.output_tokens_per_s)], ["goodput/s", number(now.goodput_rps)],
    ["good so far", percent(totals.good_fraction)], ["finished", number(totals.finished)], ["failed", number(totals.failed)],
    ["dropped", number(totals.dropped_arrivals)],
  ];
  fill(byId("tiles"), tiles.map(([name, value]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("b", value), element("span", name));
    return tile;
  }));
}

function drawTables() {
  const labels = ["mean", "p50", "p90", "p95", "p99", "p99_9", "max"];
  table(byId("latency"), ["Metric", "Samples", ...labels.map((label) => label.replace("_", "."))],
    stats.latency.map((row) => [row.title, number(row.n), ...labels.map((label) => ms(row[`${label}_s`]))]), "Nothing has finished yet.");
  const done = stats.totals.finished;
  table(byId("outcomes"), ["Outcome", "Requests", "Share"],
    Object.entries(stats.outcomes).map(([name, count]) => [name, count.toLocaleString("en-US"), percent(count / done)]), "Nothing has finished yet.");
  table(byId("gpus"), ["GPU", "Name", "Util.", "Memory GiB", "Power W", "°C"], stats.gpus.map((gpu) => [gpu.gpu, gpu.name ?? "–",
    percent(gpu.utilization), `${gib(gpu.memory_used_bytes)} / ${gib(gpu.memory_total_bytes)}`, number(gpu.power_w), number(gpu.temperature_c)]),
    "No GPU collector is heard (vllm-locust collect on the GPU host).");
  table(byId("workers"), ["Worker", "State", "Sent", "In flight", "Failed", "TTFT p99 ms", "Sched. lag p99 ms", "Recv. lag p99 ms", "CPU",
    "Loop lag ms", "GC ms", "RSS MiB", "Spooled"], stats.workers.map((one) => [one.worker_id, one.state, number(one.sent),
    number(one.in_flight), number(one.failed), ms(one.ttft_p99_s), ms(one.schedule_lag_p99_s), ms(one.receive_lag_p99_s),
    percent(one.cpu_fraction), ms(one.loop_lag_s), ms(one.gc_pause_s), one.rss_bytes === null ? "–" : (one.rss_bytes / 2 ** 20).toFixed(0),
    number(one.spooled_batches)]), "No worker has said anything yet.");
}

function sloLine(one) {
  const figure = (value) => {
    if (value === null) return "unknown";
    if (one.slo.includes("_fraction")) return percent(value);
    return `${value.toLocaleString("en-US", { maximumSignificantDigits: 4 })}${/[a-zµ]$/.test(one.slo) ? " s" : ""}`;
  };
  const met = one.met === null ? "not decided" : one.met ? "met" : "MISSED";
  return element("li", `SLO ${one.slo} in stage ${one.stage_name}: ${met} (${figure(one.value)})`, one.met === false ? "invalid" : one.met ? "valid" : "degraded");
}

let resultShown = null;
function drawResult(going) {
  const result = stats.result;
  byId("result").hidden = going || !result;
  if (!result || resultShown === JSON.stringify(result)) return;
  resultShown = JSON.stringify(result);
  const status = result.verdict ? result.verdict.status : "no results";
  const missed = Boolean(result.slo?.missed);
  const words = [status, ...(missed ? ["SLO missed"] : []), `exit code ${result.exit_code}`];
  const head = element("h2", `Result of the last run: ${words.join(", ")}`, missed || (status === "valid" && result.exit_code) ? "invalid" : status);
  // As in the report: where there is a schedule, the time to the first token counts from it.
  const ttft = (stage) => (stage.ttft_from_schedule_s?.n ? stage.ttft_from_schedule_s : stage.ttft_s);
  const scheduled = (result.stages ?? []).some((stage) => stage.ttft_from_schedule_s?.n);
  const rows = (result.stages ?? []).map((stage) => [stage.name, number(stage.offered_rps), number(stage.achieved_rps), number(stage.requests.ok),
    number(stage.requests.failed), number(stage.output_tokens_per_s), number(stage.goodput_rps), ms(ttft(stage)?.p50), ms(ttft(stage)?.p99),
    ms(stage.tpot_s?.p50), ms(stage.tpot_s?.p99), ms(stage.e2e_s?.p50), ms(stage.e2e_s?.p99)]);
  const stages = element("table"), scroll = element("div", undefined, "scroll"), reasons = element("ul"), downloads = element("div", undefined, "downloads");
  stages.id = "stages";
  table(stages, ["Stage", "Offered/s", "Achieved/s", "Ok", "Failed", "Output tokens/s", "Goodput/s", `TTFT${scheduled ? " from schedule" : ""} p50 ms`, "p99", "TPOT p50 ms", "p99",
    "E2E p50 ms", "p99"], rows, result.fault ?? "No stage was measured.");
  scroll.append(stages);
  fill(reasons, [...(result.slo?.stages ?? []).map(sloLine),
    ...(result.verdict ? result.verdict.reasons : []).map((reason) => element("li", reason.sentence, reason.severity))]);
  const link = (name, href) => {
    const one = element("a", name);
    one.href = href;
    return one;
  };
  fill(downloads, [link("All files (zip)", "llm/results.zip"), ...Object.keys(result.files).map((name) => link(name, `llm/results/${encodeURIComponent(name)}`))]);
  fill(byId("result"), [head, reasons, scroll, downloads, element("p", `Directory on the master: ${result.directory}`, "note")]);
}

// The start form

const LOADS = [
  ["users", "Users (closed loop)", []], ["rate", "Rate (open loop)", ["rate"]], ["rate_stages", "Stages of rate (open loop)", ["rate_stages"]],
  ["user_stages", "Stages of users (closed loop)", ["user_stages"]], ["shape", "Shape from a file", ["shape"]],
  ["trace", "Trace's own times (open loop)", []],
];
const OPEN_LOADS = ["rate", "rate_stages", "trace"];
const TIMED_LOADS = ["rate_stages", "user_stages", "shape"];
const LABELS = { slo: "SLO", rate: "Rate (requests/s)", rate_stages: "Stages of rate", user_stages: "Stages of users", api: "API" };
const HELP = {
  rate: "requests per second, whatever becomes of them", workload: "", shape: "",
  slo: "ttft<=2s per request (goodput), p99(e2e)<=10s per stage; several with commas between",
};
const label = (name) => LABELS[name] ?? name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

function field(name, text, help, value, choices) {
  const wrap = element("label", text), input = element(choices ? "select" : "input");
  input.name = name;
  for (const choice of choices ?? []) {
    const one = element("option", choice === "" ? "(not set)" : choice);
    one.value = choice;
    input.append(one);
  }
  input.value = value ?? "";
  wrap.append(input);
  if (help) wrap.append(element("small", help));
  return wrap;
}

function buildForm(known) {
  form = known;
  const loadFields = new Set(LOADS.flatMap(([, , names]) => names));
  const given = Object.fromEntries(known.fields.map((one) => [one.name, one]));
  const kind = field("load_kind", "Load", "", "users", LOADS.map(([name]) => name));
  for (const option of kind.querySelectorAll("option")) option.textContent = LOADS.find(([name]) => name === option.value)[1];
  const mine = (name) => field(name, label(name), HELP[name] ?? given[name].help, given[name].value, given[name].choices);
  fill(byId("load"), [
    kind, ...[...loadFields].map(mine),
    field("user_count", "Users or slots", "the most requests in flight", known.users),
    field("spawn_rate", "Ramp up (users/s)", "", known.spawn_rate),
    field("run_time", "Run time", "length of the window: 60, 90s, 10m; empty: until stopped", known.run_time_s),
    field("host", "Server", "base address", known.host),
    ...(known.user_classes.length ? [field("user_classes", "User class", "", known.user_classes[0], known.user_classes)] : []),
    mine("slo"), mine("workload"),
  ]);
  fill(byId("options"), known.fields.filter(({ name }) => !loadFields.has(name) && !["slo", "workload"].includes(name))
    .map(({ name }) => mine(name)));
  const select = kind.querySelector("select");
  const set = [...loadFields].find((name) => given[name].value);
  select.value = set ?? (given.arrival.value === "trace" ? "trace" : "users");
  const show = () => {
    const names = LOADS.find(([name]) => name === select.value)[2];
    for (const name of loadFields) byId("form").elements[name].closest("label").hidden = !names.includes(name);
    byId("form").elements.run_time.closest("label").hidden = TIMED_LOADS.includes(select.value);
    byId("form").elements.spawn_rate.closest("label").hidden = OPEN_LOADS.includes(select.value);
    const open = OPEN_LOADS.includes(select.value), classes = byId("form").elements.user_classes;
    const fitting = known.user_classes.find((name) => known.open_loop_classes.includes(name) === open);
    // A shape's file may be of a rate or of users.
    if (classes && fitting && select.value !== "shape" && known.open_loop_classes.includes(classes.value) !== open) classes.value = fitting;
    const users = byId("form").elements.user_count;
    if (!users.dataset.edited) users.value = OPEN_LOADS.includes(select.value) ? Math.max(known.users, known.slots) : known.users;
  };
  byId("form").elements.user_count.addEventListener("input", (event) => (event.target.dataset.edited = "yes"));
  select.addEventListener("change", show);
  show();
}

function order() {
  const data = new URLSearchParams(), kind = byId("form").elements.load_kind.value;
  const names = LOADS.find(([name]) => name === kind)[2], loadFields = LOADS.flatMap(([, , found]) => found);
  for (const input of byId("form").elements) {
    if (!input.name || input.name === "load_kind") continue;
    const idle = (loadFields.includes(input.name) && !names.includes(input.name)) || (input.name === "run_time" && TIMED_LOADS.includes(kind));
    data.set(input.name, idle ? "" : input.value.trim() || (input.name === "run_time" ? "none" : ""));
  }
  if (kind === "trace") data.set("arrival", "trace");
  else if (data.get("arrival") === "trace") data.set("arrival", "");
  return data;
}

async function post(url, data) {
  const answer = await fetch(url, { method: "POST", body: data, credentials: "same-origin" });
  const told = await answer.json().catch(() => ({ success: false, message: `The server answered ${answer.status}.` }));
  if (!told.success) throw new Error(told.message);
}

async function start(event) {
  event.preventDefault();
  formTold = [];
  banner([]);
  byId("go").disabled = true;
  try {
    await post("./swarm", order());
  } catch (error) {
    formTold = error.message.split("\n");
    banner(formTold);
  }
  byId("go").disabled = false;
}

async function stop() {
  byId("stop").disabled = true;
  try {
    await post("./stop", new URLSearchParams());
  } catch (error) {
    banner([error.message]);
  }
  byId("stop").disabled = false;
}

// Light and dark

function setTheme(isDark) {
  dark = isDark;
  document.documentElement.classList.toggle("dark", isDark);
  if (stats && stats.run) LlmCharts.draw(points, dark, stats.state === "ready");
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)"), kept = localStorage.getItem("llm-theme");
  setTheme(kept ? kept === "dark" : system.matches);
  system.addEventListener("change", () => localStorage.getItem("llm-theme") || setTheme(system.matches));
  byId("theme").addEventListener("click", () => {
    setTheme(!dark);
    localStorage.setItem("llm-theme", dark ? "dark" : "light");
  });
}

startTheme();
LlmCharts.build(byId("charts"));
byId("form").addEventListener("submit", start);
byId("stop").addEventListener("click", stop);
fetchJson("llm/form.json").then(buildForm).catch((error) => banner([error.message]));
refresh();
