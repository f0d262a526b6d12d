"use strict";
// What each chart shows, by the names in stats.json. Times are given in seconds and shown in milliseconds.
const LlmCharts = (() => {
  const ms = (name, series) => ({ name, key: series, scale: 1e3 });
  const percentiles = (metric, title, labels) => labels.map((p) => ms(`${title} ${p}`, `${metric}_${p}_s`));
  const SPECS = [
    { id: "rate", title: "Rate (requests/s)", series: [{ name: "offered", key: "offered_rps" },
      { name: "achieved", key: "achieved_rps" }, { name: "ok", key: "requests_per_s" }, { name: "goodput", key: "goodput_rps" }] },
    { id: "flight", title: "In flight", series: [{ name: "in flight", key: "in_flight" },
      { name: "users", key: "users" }, { name: "no free slot", key: "waiting_arrivals" }] },
    { id: "ttft", title: "TTFT (ms)", series: [...percentiles("ttft", "", ["p50", "p90", "p99"]),
      ms("from schedule p99", "ttft_from_schedule_p99_s")] },
    { id: "tpot", title: "TPOT and ITL (ms)", series: [...percentiles("tpot", "TPOT", ["p50", "p99"]),
      ...percentiles("itl", "ITL", ["p50", "p99"])] },
    { id: "e2e", title: "E2E (ms)", series: percentiles("e2e", "", ["p50", "p90", "p99"]) },
    { id: "tokens", title: "Tokens/s", series: [{ name: "input", key: "input_tokens_per_s" },
      { name: "output", key: "output_tokens_per_s" }] },
    { id: "failures", title: "Failures/s by outcome", map: "failures_per_s", stack: true, empty: "no failures" },
    { id: "server", title: "Server: requests, KV cache", empty: "the server's metrics are not read", series: [
      { name: "running", key: "server_requests_running" }, { name: "waiting", key: "server_requests_waiting" },
      { name: "KV cache %", key: "server_kv_cache_usage", scale: 100, right: true }] },
    { id: "gpu_utilization", title: "GPU utilization (%)", map: "gpus", at: 0, scale: 100, hideEmpty: true },
    { id: "gpu_memory", title: "GPU memory (GiB)", map: "gpus", at: 1, scale: 1 / 2 ** 30, hideEmpty: true },
    { id: "gpu_power", title: "GPU power (W)", map: "gpus", at: 2, hideEmpty: true },
    { id: "generator", title: "Generator health (ms, CPU %)", series: [ms("schedule lag p99", "schedule_lag_p99_s"),
      ms("receive lag p99", "receive_lag_p99_s"), ms("loop lag max", "loop_lag_max_s"),
      { name: "CPU max %", key: "cpu_fraction_max", scale: 100, right: true }] },
  ];
  const LIGHT = ["#0b5cad", "#d9730d", "#14753c", "#a03fb0", "#b3261e", "#5b6770", "#0f8b8d", "#8a5a00"];
  const DARK = ["#6cb2ff", "#ffa657", "#5fd08b", "#d2a8ff", "#ff8a80", "#aab6c1", "#56d4dd", "#f0d264"];
  let charts = [];

  const scaled = (value, scale) => (value === null || value === undefined ? null : value * (scale ?? 1));
  const clock = (seconds) => {
    const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  };
  const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US", { maximumSignificantDigits: 4 }));

  // Names of what is in a map (GPUs, outcomes) come from outside: escaped by our own tooltip.
  const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const tooltip = (items) => {
    if (!items.length) return "";
    const rows = items.map((item) => `${item.marker} ${escaped(item.seriesName)}: <b>${number(item.value[1])}</b>`);
    return [clock(items[0].value[0]), ...rows].join("<br>");
  };

  const lines = (spec, points) => {
    if (!spec.map) {
      return spec.series.map((one) => ({ ...one, data: points.map((p) => [p.t_s, scaled(p[one.key], one.scale)]) }))
        .filter((one) => one.data.some((pair) => pair[1] !== null));
    }
    const names = [...new Set(points.flatMap((p) => Object.keys(p[spec.map] ?? {})))].sort();
    const pick = (point, name) => {
      const value = point[spec.map]?.[name];
      if (value === undefined) return spec.stack ? 0 : null;
      return scaled(spec.at === undefined ? value : value[spec.at], spec.scale);
    };
    return names.map((name) => ({ name, data: points.map((p) => [p.t_s, pick(p, name)]) }))
      .filter((one) => one.data.some((pair) => pair[1] !== null));
  };

  // Whole seconds at which labels stand: fractions of one would all read the same.
  const stepOf = (points) => {
    const length = points.length ? points[points.length - 1].t_s - points[0].t_s : 0;
    return [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600].find((step) => length / step <= 6);
  };

  const option = (spec, points, dark, over) => {
    const soft = dark ? "#9aa8b5" : "#5a6876", line = dark ? "#2c3945" : "#e3e8ed";
    const found = lines(spec, points), text = { color: soft, fontSize: 11 };
    const axis = { type: "value", axisLabel: text, splitLine: { lineStyle: { color: line } }, min: 0, show: found.length > 0 };
    return {
      animation: false, backgroundColor: "transparent", color: dark ? DARK : LIGHT, aria: { enabled: true },
      grid: { left: 8, right: 12, top: 34, bottom: 6, containLabel: true },
      legend: { type: "scroll", top: 0, left: 0, right: 0, textStyle: { color: soft, fontSize: 11 }, itemWidth: 14, itemHeight: 8,
        pageIconColor: soft, pageTextStyle: text },
      tooltip: { trigger: "axis", formatter: tooltip, confine: true, backgroundColor: dark ? "#18212a" : "#fff",
        borderColor: line, textStyle: { color: dark ? "#e6edf3" : "#17212b", fontSize: 12 } },
      xAxis: { type: "value", show: found.length > 0, min: "dataMin", max: "dataMax", minInterval: 1, interval: stepOf(points), axisLabel: { ...text, showMinLabel: false, showMaxLabel: false, formatter: clock, hideOverlap: true },
        splitLine: { show: false }, axisLine: { lineStyle: { color: soft } } },
      yAxis: [axis, ...(found.some((one) => one.right) ? [{ ...axis, splitLine: { show: false }, max: 100 }] : [])],
      title: found.length ? undefined : { text: spec.empty ?? (over ? "nothing was measured" : "nothing yet"), left: "center", top: "middle",
        textStyle: { color: soft, fontSize: 13, fontWeight: "normal" } },
      series: found.map((one) => ({ type: "line", name: one.name.trim(), data: one.data, showSymbol: one.data.length < 2,
        symbolSize: 5, yAxisIndex: one.right ? 1 : 0, stack: spec.stack ? "all" : undefined,
        areaStyle: spec.stack ? {} : undefined, lineStyle: { width: 1.6, type: one.right ? "dashed" : "solid" },
        sampling: spec.stack ? undefined : "lttb" })),
    };
  };

  return {
    build(container) {
      charts = SPECS.map((spec) => {
        const card = document.createElement("div"), head = document.createElement("h2"), plot = document.createElement("div");
        card.className = "chart";
        head.textContent = spec.title;
        plot.className = "plot";
        plot.id = `chart-${spec.id}`;
        card.append(head, plot);
        container.append(card);
        const chart = echarts.init(plot, null, { renderer: "canvas" });
        chart.group = "llm";
        return { spec, chart, card };
      });
      echarts.connect("llm");
      new ResizeObserver(() => charts.forEach(({ chart }) => chart.resize())).observe(container);
    },
    draw(points, dark, over) {
      for (const { spec, chart, card } of charts) {
        const made = option(spec, points, dark, over), hidden = Boolean(spec.hideEmpty) && !made.series.length;
        const appears = card.hidden && !hidden;
        card.hidden = hidden;
        if (appears) chart.resize();
        chart.setOption(made, { notMerge: true });
      }
    },
    number,
    clock,
    // What a chart shows now, for tests: series name to its points.
    shown(id) {
      const { chart } = charts.find(({ spec }) => spec.id === id);
      return Object.fromEntries(chart.getOption().series.map((one) => [one.name, one.data]));
    },
  };
})();
