"use strict";
// Draws the charts of report.html from the JSON in #data. All text goes onto a canvas, never into the page as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const time = data.time;
  const starts = Array.from({ length: time.count }, (_, i) => time.start_s + i * time.step_s);
  const end = time.start_s + time.count * time.step_s;
  const TITLES = { ttft: "TTFT", ttft_from_schedule: "TTFT from schedule", tpot: "TPOT", itl: "ITL", chunk_gap: "chunk gap", e2e: "E2E" };
  const charts = [];
  let style;

  const readStyle = () => {
    const computed = getComputedStyle(document.documentElement);
    const value = (name) => computed.getPropertyValue(name).trim();
    style = {
      ink: value("--ink"), faint: value("--faint"), line: value("--line"), card: value("--paper"), shade: value("--shade"),
      missed: value("--invalid"), colours: [1, 2, 3, 4, 5, 6, 7, 8].map((n) => value(`--c${n}`)),
      heat: [0, 1, 2].map((n) => value(`--heat${n}`)), narrow: document.body.clientWidth < 560,
    };
  };

  // How numbers are written
  const digits = (value) => value === 0 ? "0" : Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  const known = (write) => (value) => value === null || value === undefined || Number.isNaN(value) ? "–" : write(Number(value));
  const plain = known(digits);
  const seconds = known((value) => {
    const size = Math.abs(value);
    if (size >= 0.9995) return `${digits(value)} s`;
    return size >= 0.9995e-3 || size === 0 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
  });
  const share = known((value) => `${digits(value * 100)} %`);
  const watts = known((value) => `${digits(value)} W`);
  const bytes = known((value) => `${digits(value / 1e9)} GB`);
  const clock = known((value) => {
    const sign = value < 0 ? "−" : "", whole = Math.abs(value);
    if (end < 600) return `${sign}${digits(whole)} s`;
    const pad = (n) => String(Math.floor(n)).padStart(2, "0");
    return `${sign}${Math.floor(whole / 3600)}:${pad((whole % 3600) / 60)}:${pad(whole % 60)}`;
  });
  const topShare = (beyond) => beyond >= 1 ? "min" : `p${Number((100 * (1 - beyond)).toFixed(6))}`;

  // Parts that all charts share
  const base = () => ({
    animation: false, hoverLayerThreshold: Infinity, progressive: 0, backgroundColor: "transparent", color: style.colours,
    textStyle: { color: style.ink, fontFamily: "system-ui, sans-serif" },
    legend: { type: "scroll", top: 0, left: 0, right: 0, textStyle: { color: style.ink }, pageTextStyle: { color: style.ink },
      pageIconColor: style.ink, pageIconInactiveColor: style.line, itemWidth: 16, itemHeight: 9 },
    grid: { left: 62, right: 18, top: 34, bottom: 34 },
    tooltip: { trigger: "axis", renderMode: "richText", confine: true, backgroundColor: style.card, borderColor: style.line,
      textStyle: { color: style.ink, fontSize: 12 } },
  });
  const axis = (type, write, extra = {}) => ({
    type, axisLabel: { color: style.faint, formatter: write, hideOverlap: true, fontSize: 11 }, axisLine: { onZero: false, lineStyle: { color: style.line } },
    axisTick: { lineStyle: { color: style.line } }, splitLine: { lineStyle: { color: style.line, opacity: 0.6 } }, minorSplitLine: { show: false },
    nameTextStyle: { color: style.faint, fontSize: 11 }, ...extra,
  });
  // A logarithmic axis where the values span more than a factor of 12; else one from 0.
  const spread = (values, write) => {
    const shown = values.filter((value) => value !== null && value > 0);
    const low = Math.min(...shown), high = Math.max(...shown);
    if (!shown.length || high / low < 12) return axis("value", write, { min: 0 });
    const decade = (value) => 10 ** Math.floor(Math.log10(value) + 1e-9);
    return axis("log", write, { min: decade(low) * ([5, 2, 1].find((step) => decade(low) * step <= low * 1.0001) ?? 1),
      max: decade(high) * ([1, 2, 5, 10].find((step) => decade(high) * step >= high * 0.9999) ?? 10) });
  };
  const timeAxis = (extra = {}) => axis("value", clock, { min: time.start_s, max: end, splitLine: { show: false }, ...extra,
    axisPointer: { label: { formatter: (point) => clock(point.value) } } });
  const zoom = (indexes, bottom) => [
    { type: "slider", xAxisIndex: indexes, bottom, height: 18, brushSelect: false, filterMode: "none", showDetail: false, borderColor: style.line,
      fillerColor: `rgba(${style.shade}, .12)`, dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
      selectedDataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } }, handleStyle: { color: style.card, borderColor: style.faint },
      moveHandleStyle: { color: style.line } },
    { type: "inside", xAxisIndex: indexes, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
  ];
  const spans = (named) => ({
    silent: true,
    label: { color: style.faint, fontSize: 10, position: "insideTop", overflow: "truncate" },
    data: data.spans.map((span, i) => {
      const outside = span.kind === "warmup" || span.kind === "drain";
      const label = named && (data.spans.length <= 12) ? span.name : "";
      const shown = label.length > 14 ? `${label.slice(0, 13)}…` : label;
      const width = (span.to_s - span.from_s) / (end - time.start_s);
      return [{ xAxis: span.from_s, name: width > (style.narrow ? 0.2 : 0.07) ? shown : "",
        itemStyle: { color: `rgba(${style.shade}, ${outside ? 0.12 : i % 2 ? 0.025 : 0.055})` } }, { xAxis: span.to_s }];
    }),
  });
  const line = (name, values, extra = {}) => ({
    name, type: "line", showSymbol: lonely(values), symbolSize: 4, lineStyle: { width: 1.6 }, emphasis: { disabled: true },
    data: values.map((value, i) => [starts[i] + time.step_s / 2, value]), ...extra,
  });
  const lonely = (values) => values.filter((value) => value !== null).length < 3;
  const tip = (write) => ({ valueFormatter: write });

  // The charts
  const loadCurve = () => {
    const { points, knee } = data.load_curve;
    const marks = points.map((p) => ({ held: p.held, overloaded: p.overloaded }));
    const series = [["TTFT p50", "ttft_p50"], ["TTFT p99", "ttft_p99"], ["E2E p50", "e2e_p50"], ["E2E p99", "e2e_p99"]].map(([name, key]) => ({
      name, type: "line", symbolSize: 8, emphasis: { disabled: true },
      data: points.filter((p) => p[key] !== null).map((p) => ({ value: [p.requests_per_s, p[key]], point: p,
        symbol: p.overloaded || p.held === false ? "emptyTriangle" : "circle" })),
    }));
    if (knee) {
      series[0].markLine = { silent: true, symbol: "none", lineStyle: { color: style.faint, type: "dashed" },
        label: { formatter: "knee", color: style.faint }, data: [{ xAxis: knee.throughput_rps }] };
    }
    const describe = (item) => {
      const p = item.data.point;
      const offered = p.users !== null ? `${p.users} users` : p.offered_rps !== null ? `${plain(p.offered_rps)}/s offered` : "";
      return [`${item.seriesName} ${seconds(item.data.value[1])}`, `stage ${p.name}${offered ? `, ${offered}` : ""}`,
        `${plain(p.requests_per_s)} requests/s, ${plain(p.output_tokens_per_s)} output tokens/s`,
        p.overloaded ? "overloaded" : p.held === false ? "SLO missed" : ""].filter(Boolean).join("\n");
    };
    const failed = marks.some((mark) => mark.overloaded || mark.held === false);
    const name = `requests/s${failed ? "   (△ overloaded, or an SLO missed)" : ""}`;
    return { ...base(), tooltip: { ...base().tooltip, trigger: "item", formatter: describe }, series,
      grid: { ...base().grid, bottom: 48 },
      xAxis: axis("value", plain, { name, nameLocation: "middle", nameGap: 28, min: 0, splitLine: { show: false } }),
      yAxis: spread(series.flatMap((one) => one.data.map((item) => item.value[1])), seconds) };
  };

  const percentiles = () => {
    const { beyond, stages } = data.percentiles;
    const select = document.getElementById("percentiles-of");
    const [kind, which] = (select ? select.value : "stage:0").split(":");
    const curves = kind === "metric" ? stages.map((stage) => [stage.name, stage.curves[which]])
      : Object.entries(stages[Number(which)].curves).map(([name, curve]) => [TITLES[name], curve]);
    const same = (name, curve) => name === TITLES.chunk_gap && String(curve) === String(Object.fromEntries(curves)[TITLES.itl]);
    const drawn = curves.filter(([name, curve]) => curve.length && !same(name, curve));
    const right = Math.max(10, ...drawn.map(([, curve]) => 1 / beyond[curve.length - 1]));
    const ticks = [1, 2, 4, 10, 20, 100, 1e3, 1e4, 1e5, 1e6, 1e7].filter((tick) => tick <= right);
    return { ...base(), grid: { ...base().grid, right: 26 },
      tooltip: { ...base().tooltip, ...tip(seconds) },
      xAxis: axis("log", (value) => topShare(1 / value), { min: 1, max: right, axisPointer: { label: { formatter: (p) => topShare(1 / p.value) } },
        axisTick: { customValues: ticks, lineStyle: { color: style.line } },
        axisLabel: { customValues: ticks, color: style.faint, fontSize: 11, hideOverlap: true, formatter: (value) => topShare(1 / value) } }),
      yAxis: spread(drawn.flatMap(([, curve]) => curve), seconds),
      series: drawn.map(([name, curve]) => ({ name, type: "line", step: false, showSymbol: false, lineStyle: { width: 1.8 }, emphasis: { disabled: true },
        data: curve.map((value, i) => [1 / beyond[i], value]).filter((pair) => pair[1] > 0) })) };
  };

  const panels = () => {
    const { load, server, gpus, generator } = data;
    const list = [["requests/s", plain, [["offered", load.offered_rps], ["sent", load.achieved_rps], ["finished", load.requests_per_s]]],
      ["requests", plain, [["in flight", load.in_flight], ["running", server && server.requests_running], ["waiting", server && server.requests_waiting]]],
      ["output tokens/s", plain, [["output tokens/s", load.output_tokens_per_s], ["by the server", server && server.generation_tokens_per_s]]],
      ["input tokens/s", plain, [["input tokens/s", load.input_tokens_per_s], ["by the server ", server && server.prompt_tokens_per_s]]],
      ["KV cache", share, [["KV cache", server && server.kv_cache_usage]], 1]];
    const select = document.getElementById("course-gpu");
    const gpu = gpus && gpus.series[select ? Number(select.value) : 0];
    if (gpu) {
      list.push(["GPU", share, [["some kernel ran", gpu.utilization], ["SMs busy", gpu.sm_activity], ["tensor cores", gpu.tensor_activity],
        ["memory bandwidth", gpu.dram_activity]], 1]);
      list.push(["GPU power", watts, [["power", gpu.power_w]]], ["GPU memory", bytes, [["memory", gpu.memory_used_bytes]]]);
    }
    if (generator) {
      list.push(["generator CPU", share, [["CPU of the busiest worker", generator.cpu_fraction]]]);
      list.push(["generator lag", seconds, [["loop lag", generator.loop_lag_s], ["receive lag p99", generator.receive_lag_p99_s]]]);
    }
    return list.map(([name, write, lines, max]) => ({ name, write, max, lines: lines.filter(([, values]) => values && values.some((v) => v !== null)) }))
      .filter((panel) => panel.lines.length);
  };

  const course = () => {
    const shown = panels(), height = 92, gap = 42, top = 4;
    document.getElementById("course").style.height = `${top + shown.length * (height + gap) + 52}px`;
    const option = { ...base(), legend: [], grid: [], xAxis: [], yAxis: [], series: [] };
    shown.forEach((panel, i) => {
      const y = top + i * (height + gap);
      option.grid.push({ left: 62, right: 18, top: y + 30, height });
      option.legend.push({ ...base().legend, top: y, data: panel.lines.map(([name]) => name),
        formatter: (name) => panel.lines.length === 1 && name !== panel.name ? `${panel.name}: ${name}` : name });
      option.xAxis.push(timeAxis({ gridIndex: i, axisLabel: { show: i === shown.length - 1, color: style.faint, formatter: clock, fontSize: 11, hideOverlap: true } }));
      option.yAxis.push(axis("value", panel.write, { gridIndex: i, min: 0, splitNumber: 2, ...(panel.max ? { max: panel.max, interval: panel.max / 2 } : {}) }));
      panel.lines.forEach(([name, values], k) => option.series.push(line(name, values, { xAxisIndex: i, yAxisIndex: i, tooltip: tip(panel.write),
        itemStyle: { color: style.colours[k % style.colours.length] }, markArea: k ? undefined : spans(i === 0) })));
    });
    const indexes = shown.map((_, i) => i);
    option.axisPointer = { link: [{ xAxisIndex: "all" }], lineStyle: { color: style.faint } };
    option.dataZoom = zoom(indexes, 6);
    return option;
  };

  const course_of = (metric) => () => {
    const latency = data.latency[metric], series = [];
    if (!latency) return null;
    series.push({ name: "requests", type: "scatter", symbolSize: 4, itemStyle: { color: style.faint, opacity: 0.35 }, emphasis: { disabled: true },
      data: latency.points.map(([x, y]) => [time.start_s + x, y]), tooltip: { show: false }, silent: true });
    ["p50", "p90", "p99", "max"].forEach((name, i) => series.push(line(name, latency.shown[name], {
      lineStyle: { width: name === "max" ? 1 : 1.8, type: name === "max" ? "dotted" : "solid" }, itemStyle: { color: style.colours[[0, 2, 1, 3][i]] } })));
    const scheduled = metric === "ttft" && data.latency.ttft_from_schedule;
    if (scheduled) series.push(line("p99 from schedule", scheduled.shown.p99, { lineStyle: { width: 1.5, type: "dashed" }, itemStyle: { color: style.colours[4] } }));
    series[1].markArea = spans(true);
    return { ...base(), grid: { ...base().grid, bottom: 62 }, tooltip: { ...base().tooltip, ...tip(seconds) }, xAxis: timeAxis(),
      yAxis: spread([...Object.values(latency.shown).flat(), ...latency.points.map((point) => point[1])], seconds), dataZoom: zoom([0], 6), series };
  };

  const gapMap = () => {
    const { edges_s: edges, cells } = data.gap_map;
    const most = Math.log10(Math.max(...cells.map((cell) => cell[2])));
    const rect = (params, api) => {
      const i = api.value(0), low = api.coord([starts[i], edges[api.value(1)]]), high = api.coord([starts[i] + time.step_s, edges[api.value(1) + 1]]);
      const box = echarts.graphic.clipRectByRect({ x: low[0], y: high[1], width: Math.max(1, high[0] - low[0] + 0.3), height: Math.max(1, low[1] - high[1] + 0.3) },
        params.coordSys);
      return box && { type: "rect", shape: box, style: { fill: api.visual("color") } };
    };
    const describe = (item) => {
      const [i, row, , count] = item.value;
      const from = row === 0 ? "up to" : `${seconds(edges[row])} to`;
      return `${clock(starts[i])}: ${plain(count)} × ${from} ${seconds(edges[row + 1])}`;
    };
    return { ...base(), legend: { show: false }, grid: { ...base().grid, top: 14, bottom: 62 }, xAxis: timeAxis(),
      yAxis: axis("log", seconds, { min: edges[0], max: edges[edges.length - 1], splitLine: { show: false } }), dataZoom: zoom([0], 6),
      tooltip: { ...base().tooltip, trigger: "item", formatter: describe },
      visualMap: { show: false, type: "continuous", dimension: 2, min: 0, max: Math.max(most, 0.1), inRange: { color: style.heat } },
      series: [{ type: "custom", clip: true, renderItem: rect, encode: { x: 0, y: 1 }, progressive: 0,
        data: cells.map(([i, row, count]) => [i, row, Math.log10(count), count]) }] };
  };

  const byLength = (length) => () => {
    const part = data.lengths[length], xs = part.points.map((point) => point[0]);
    const series = [{ name: "requests", type: "scatter", symbolSize: 4, itemStyle: { color: style.faint, opacity: 0.35 }, emphasis: { disabled: true }, silent: true,
      tooltip: { show: false }, data: part.points }];
    ["p50", "p90", "p99"].forEach((name, i) => series.push({ name, type: "line", showSymbol: part.lengths.length < 3, lineStyle: { width: 1.8 }, emphasis: { disabled: true },
      itemStyle: { color: style.colours[[0, 2, 1][i]] }, data: part.shown[name].map((value, k) => [part.lengths[k], value]) }));
    return { ...base(), grid: { ...base().grid, bottom: 48 }, tooltip: { ...base().tooltip, ...tip(seconds) }, series,
      xAxis: axis("log", plain, { name: length.replace("_", " "), nameLocation: "middle", nameGap: 28, splitLine: { show: false },
        min: Math.min(...xs), max: Math.max(...xs, Math.min(...xs) + 1), axisPointer: { label: { formatter: (p) => plain(p.value) } } }),
      yAxis: spread([...part.points.map((point) => point[1]), ...part.shown.p99], seconds) };
  };

  const failures = () => ({
    ...base(), grid: { ...base().grid, bottom: 62 }, xAxis: timeAxis(), yAxis: axis("value", plain, { minInterval: 1 }), dataZoom: zoom([0], 6),
    series: Object.entries(data.failures).map(([name, counts], i) => ({ name, type: "bar", stack: "all", barCategoryGap: "10%", emphasis: { disabled: true },
      data: counts.map((count, k) => [starts[k] + time.step_s / 2, count]), markArea: i ? undefined : spans(true) })),
  });

  const drawings = { "load-curve": loadCurve, course, "ttft-course": course_of("ttft"), "e2e-course": course_of("e2e"), "gap-map": gapMap, percentiles,
    "by-prompt": byLength("prompt_tokens"), "by-output": byLength("output_tokens"), "failures-course": failures };
  const overTime = ["course", "ttft-course", "e2e-course", "gap-map", "failures-course"];

  const draw = () => {
    readStyle();
    for (const [id, make] of Object.entries(drawings)) {
      const place = document.getElementById(id);
      if (!place) continue;
      const option = make();
      if (!option) {
        place.closest("figure").hidden = true;
        continue;
      }
      let chart = echarts.getInstanceByDom(place);
      if (!chart) {
        chart = echarts.init(place, null, { renderer: "canvas", devicePixelRatio: Math.max(2, devicePixelRatio) });
        if (overTime.includes(id)) chart.group = "time";
        charts.push(chart);
      }
      const zoomed = chart.getOption() && chart.getOption().dataZoom;
      if (zoomed && option.dataZoom) option.dataZoom.forEach((one) => Object.assign(one, { start: zoomed[0].start, end: zoomed[0].end }));
      // On paper the picture is scaled as it is.
      if (!matchMedia("print").matches) chart.resize();
      chart.setOption(option, { notMerge: true });
      chart.getZr().flush();
    }
  };

  draw();
  echarts.connect("time");
  for (const id of ["percentiles-of", "course-gpu"]) document.getElementById(id)?.addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", draw);
  let waiting = 0, width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
  const opened = [];
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((part) => { part.open = true; opened.push(part); });
  });
  addEventListener("afterprint", () => { opened.splice(0).forEach((part) => { part.open = false; }); });
  document.documentElement.dataset.drawn = charts.length;
})();
