// Draws the report. Sizes are bytes, times are seconds.
const CATEGORY_COLOURS = {
  "parameters": "#4e79a7", "gradients": "#f28e2b", "optimizer": "#76b7b2", "unsharded weights": "#edc948",
  "residual stream": "#59a14f", "stage buffers": "#e15759", "kept on device": "#b07aa1", "MLP tile": "#ff9da7",
  "loss tile": "#9c755f", "other": "#8f979e",
};
const KIND_COLOURS = { compute: "#4e79a7", exchange: "#e15759", copies: "#edc948", idle: "#8f979e" };
const SHOWN_LAYERS = 6;  // with a curve each
const LINES = ["solid", "dashed", "dotted", [10, 3, 2, 3]];  // one per series of a run

function perRun(into, draw) {
  const grid = make("div", { class: "runs" });
  into.append(grid);
  for (const run of runs) {
    const box = make("div");
    if (runs.length > 1) box.append(make("h3", {}, run.name));
    grid.append(box);
    draw(run, box);
  }
}

// ---- summary and curves

const isDPO = run => run.config.loss?.type === "dpo";
function modelNote({ config: { model, adapter }, plan }) {
  const name = String(model?.path ?? model?.embedded ?? "").replace(/[/]config[.]json$/, "").split("/").pop();
  if (!adapter) return name + ", all parameters trained";
  // adapter.base=bf16 is a base that is not packed: in the compute dtype, whatever that is.
  const dtype = plan?.layout?.dtype ?? (model?.dtype === "auto" ? null : model?.dtype);
  const base = adapter.base && adapter.base !== "bf16" ? adapter.base : dtype;
  return `${name}, adapters of rank ${adapter.rank}` + (base ? ` on a base in ${base}` : "");
}
function summary() {
  const into = section("Summary");
  perRun(into, (run, box) => {
    const m = run.metrics, peak = run.profile && run.profile.memory.peak;
    const numSteps = run.config.train?.steps, mfu = median(m.mfu), step = lastOf(m.step);
    const best = smallest(m.val_loss.filter(v => v != null));
    const valStep = largest([...m.step.filter((_, i) => m.val_loss[i] != null), ...run.failed_validations]);
    const val = run.failed_validations.includes(valStep) ? NaN : lastOf(m.val_loss);
    const digits = v => Number.isFinite(v) ? v.toFixed(4) : "not finite";
    const ifSet = (value, format) => value == null ? null : format(value);
    const speed = run.plan?.tokens_per_s, planned = plannedPeak(run.plan);
    const next = (value, format) => value ? `, planned ${format(value)}` : "";
    const cards = [
      ["steps" + (numSteps ? ` of ${numSteps}` : ""), step],
      ["tokens", ifSet(lastOf(m.tokens ?? []), amount)],
      ["loss", step ? digits(m.loss.at(-1)) : null],
      ["validation loss" + (valStep < step ? ` at step ${valStep}` : ""), ifSet(val, digits)],
      ["lowest validation loss", best < (Number.isFinite(val) ? val : Infinity) ? best.toFixed(4) : null],
      ["validation perplexity", isDPO(run) ? null : ifSet(Number.isFinite(val) ? val : null, v => Math.exp(v).toPrecision(4))],
      ["tokens/s (median)" + next(speed, amount), ifSet(median(m.tokens_per_s), amount)],
      ["step (median)", ifSet(median(m.step_s), seconds)],
      ["MFU (median)", ifSet(mfu, v => (100 * v).toFixed(1) + "%")],
      ["context (tokens)", run.config.curriculum?.length ? run.config.curriculum.map(e => e.context).join(", ") : run.config.data?.context],
      ["host peak per rank", run.device_peak_bytes ? null : ifSet(run.host_peak_bytes, bytes)],
      ["device peak" + next(planned, bytes), ifSet(run.device_peak_bytes, bytes)],
      ["reserved by the allocator, unused", ifSet(run.device_unused_bytes, bytes)],
      ["allocator retries", run.allocator_retries],
    ].filter(([, value]) => value != null);
    if (peak && peak.largest.length) cards.push(["largest category", Object.entries(peak.holders).sort((a, b) => b[1] - a[1])[0][0]]);
    box.append(make("p", { class: "note" }, modelNote(run)));
    box.append(make("div", { class: "cards" }, ...cards.map(([name, value]) =>
      make("div", { class: "card" }, make("b", {}, String(value)), make("span", {}, name)))));
  });
}
// The curves' x axis and smoothing, stored in the URL so that a reload keeps them.
const AXES = { step: ["step", PLAIN], tokens: ["tokens", AMOUNTS], hours: ["hours of steps", PLAIN] };
const SMOOTH = { none: 0, little: 0.6, more: 0.9, most: 0.98 };
const readControls = () => ({ x: "step", smooth: "none", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });
const xValues = run => {
  const m = run.metrics, x = readControls().x;
  let seconds = 0;
  return x !== "hours" ? m[x] ?? m.step : m.step_s.map(s => (seconds += s ?? 0) / 3600);
};
function points(run, key) {
  const own = run.metrics[key] ?? [], x = xValues(run);
  return x.map((at, i) => [at, own[i]]).filter(p => p[0] != null && Number.isFinite(p[1]));
}
// Exponential moving average with bias correction.
function smoothed(values) {
  const keep = SMOOTH[readControls().smooth] ?? 0;
  let mean = 0, weight = 0;
  return values.map(([x, y]) => { mean = keep * mean + (1 - keep) * y; weight = keep * weight + 1 - keep; return [x, mean / weight]; });
}
function controls(into) {
  const bar = make("p", { class: "note controls" });
  for (const [name, title, values] of [["x", "x axis", AXES], ["smooth", "smoothing", SMOOTH]]) {
    const select = make("select", { id: name, "aria-label": title }, ...Object.keys(values).map(v => make("option", { value: v }, v)));
    select.value = readControls()[name];
    select.addEventListener("change", () => {
      history.replaceState(null, "", "#" + new URLSearchParams({ ...readControls(), [name]: select.value }));
      drawAll();
    });
    bar.append(make("label", {}, title + " ", select), " ");
  }
  into.append(bar);
}
// keys: [metric, name, whether it is sparse (never smoothed)].
function curves(into, title, note, keys, format, units) {
  const values = () => runs.flatMap(run => keys.flatMap(([key]) => points(run, key).map(p => p[1])));
  if (!values().length) return;
  const box = make("div", {}, make("h3", {}, title), make("p", { class: "note" }, note));
  into.append(box);
  chart(box, (c, narrow) => {
    const [name, xUnits] = AXES[readControls().x] ?? AXES.step, most = largest(values());
    const isStep = name === "step";
    return {
      ...base(c, narrow),
      tooltip: { ...base(c, narrow).tooltip, valueFormatter: format },
      xAxis: axis(c, {
        type: "value", minInterval: isStep ? 1 : 0, name, min: "dataMin", max: "dataMax",
        axisLabel: { formatter: isStep ? n => Number.isInteger(n) ? String(n) : "" : inUnitOf(largest(runs.flatMap(xValues)), xUnits), showMinLabel: isStep, showMaxLabel: isStep },
      }),
      yAxis: units === BYTES ? fromZero(c, most, BYTES, 5) : axis(c, { type: "value", scale: true, axisLabel: { formatter: inUnitOf(most, units) } }),
      series: showHidden(runs.flatMap((run, r) => keys.filter(([key]) => points(run, key).length).map(([key, title, isSparse], k) => ({
        name: seriesPrefix(run.name) + title, type: "line", data: isSparse ? points(run, key) : smoothed(points(run, key)), sampling: "lttb",
        showSymbol: points(run, key).length < 40, symbol: RUN_SYMBOLS[r % RUN_SYMBOLS.length], symbolSize: isSparse ? 8 : 5, connectNulls: true,
        color: RUN_COLOURS[(keys.length > 1 && runs.length === 1 ? k : r) % RUN_COLOURS.length],
        lineStyle: { width: 2, type: LINES[k % LINES.length] },
      })))),
    };
  });
}
function allCurves() {
  const into = section("Curves"), grid = make("div", { class: "runs" });
  controls(into);
  into.append(grid);
  const digits = v => v == null ? "-" : Number(v).toFixed(4), short = v => v == null ? "-" : Number(v).toPrecision(4);
  for (const run of runs.filter(run => !isDPO(run))) for (const key of ["loss", "val_loss"]) run.metrics["exp_" + key] = run.metrics[key].map(v => v == null ? null : Math.exp(v));
  curves(grid, "Loss", `Mean over the step's ${runs.every(isDPO) ? "pairs" : "trained tokens"}; validation runs after the update.`, [["loss", "loss", false], ["val_loss", "validation", true]], digits, PLAIN);
  curves(grid, "Perplexity", "exp(loss).", [["exp_loss", "perplexity", false], ["exp_val_loss", "validation", true]], short, PLAIN);
  curves(grid, "Rewards", "beta times the log-probability of an answer relative to the reference, mean over pairs.", [["rewards/chosen", "chosen", false], ["rewards/rejected", "rejected", false], ["rewards/margins", "margin", false], ["val_rewards/margins", "validation margin", true]], digits, PLAIN);
  curves(grid, "Preference accuracy", "Share of pairs whose chosen answer has the higher reward.", [["rewards/accuracies", "accuracy", false], ["val_rewards/accuracies", "validation", true]], short, PLAIN);
  curves(grid, "Learning rate", "At each step.", [["lr", "learning rate", false]], short, PLAIN);
  curves(grid, "Gradient norm", "Global norm, before clipping.", [["grad_norm", "gradient norm", false]], short, PLAIN);
  curves(grid, "Speed", "Input tokens per second, excluding validation and checkpoints.", [["tokens_per_s", "tokens/s", false]], amount, AMOUNTS);
  const onDevice = runs.some(run => run.device_peak_bytes);
  curves(grid, "Memory", `Peak ${onDevice ? "device" : "process"} memory so far, maximum over ranks.`, [[onDevice ? "device_peak_bytes" : "host_peak_bytes", "peak", false]], bytes, BYTES);
  const keysOf = run => Object.keys(run.metrics), contextOf = key => key.match(/^evaluate\/retrieval\/.*\/(\d+)$/)?.[1];
  const contexts = [...new Set(runs.flatMap(keysOf).map(contextOf).filter(Boolean))].sort((a, b) => a - b);
  for (const run of runs) for (const context of contexts) {  // mean over tasks
    const tasks = keysOf(run).filter(key => contextOf(key) === context).map(key => run.metrics[key]);
    if (tasks.length) run.metrics["found/" + context] = tasks[0].map((v, i) => v == null ? null : tasks.reduce((sum, one) => sum + one[i], 0) / tasks.length);
  }
  curves(grid, "Evaluation", "Loss on held-out documents with the longest context and with a short one.", [["evaluate/loss", "loss", true], ["evaluate/short_context_loss", "short context", true]], digits, PLAIN);
  curves(grid, "Long-context gain", "Loss with the full context minus loss with the last few thousand tokens. Negative: the long context helps.", [["evaluate/long_context_gain", "gain", true]], digits, PLAIN);
  curves(grid, "Retrieval", "Share of correct answers by context, over all tasks and depths.", contexts.map(c => ["found/" + c, tokens(c), true]), short, PLAIN);
  curves(grid, "Auxiliary loss", "The routers' balance loss, before its coefficient.", [["aux_loss", "auxiliary loss", false]], digits, PLAIN);
  const routed = expertLayers(), few = routed.filter((_, i) => i % Math.ceil(routed.length / SHOWN_LAYERS) === 0);
  const loads = "Of some layers; all are in the table below.";
  curves(grid, "Busiest expert", "Share of the choices that go to the busiest expert. " + loads, few.map(i => ["experts/busiest/" + i, "layer " + i, false]), short, PLAIN);
  curves(grid, "Balance of experts", "Entropy of the load; 1 if all experts get the same. " + loads, few.map(i => ["experts/entropy/" + i, "layer " + i, false]), short, PLAIN);
  if (!grid.children.length) into.remove();
}
function expertLayers() {
  const found = runs.flatMap(run => Object.keys(run.metrics)).map(key => key.match(/^experts\/busiest\/(\d+)$/)?.[1]);
  return [...new Set(found.filter(Boolean))].sort((a, b) => a - b);
}
function experts() {
  const layers = expertLayers();
  if (!layers.length) return;
  const last = (run, key) => { const v = lastOf(run.metrics[key] || []); return v == null ? "-" : v.toPrecision(3); };
  perRun(section("Load of experts, latest step", "Share of the choices that go to a layer's busiest expert, and the entropy of its load."),
    (run, box) => table(box, ["layer", "busiest", "entropy"], layers.map(i => [i, last(run, "experts/busiest/" + i), last(run, "experts/entropy/" + i)])));
}

function retrieval() {
  if (!runs.some(run => run.evaluation?.retrieval.length)) return;
  const into = section("Retrieval, latest evaluation", "Share of correct answers by context (rows) and depth (columns).");
  perRun(into, (run, box) => {
    const cells = run.evaluation?.retrieval ?? [], each = (name, of = cells) => [...new Set(of.map(cell => cell[name]))];
    const row = (head, cells) => make("tr", {}, make("th", {}, head), ...cells);
    const heads = () => each("depth").map(depth => make("th", {}, `${Math.round(100 * depth)}%`));
    const map = own => make("table", { class: "heat" }, row("", heads()), ...each("context", own).map(context => row(tokens(context),
      own.filter(cell => cell.context === context).map(({ score }) => make("td", { style: `--score: ${score}` }, String(Number(score.toPrecision(2))))))));
    if (cells.length) box.append(make("p", { class: "note" }, run.evaluation.model), make("div", { class: "maps" }, ...each("task").map(task =>
      make("section", {}, make("h3", {}, task), map(cells.filter(cell => cell.task === task))))));
  });
}

// ---- differences between runs; data

function flat(config) {
  return Object.fromEntries(Object.entries(config).flatMap(([name, values]) =>
    values && typeof values === "object" ? Object.entries(values).map(([k, v]) => [`${name}.${k}`, JSON.stringify(v)]) : [[name, JSON.stringify(values)]]));
}
function differences() {
  if (runs.length < 2) return;
  const all = runs.map(run => ({ ...flat(run.config), ...flat({ machine: run.machine || {} }) }));
  const names = [...new Set(all.flatMap(Object.keys))].filter(n => n !== "train.run_dir" && new Set(all.map(one => one[n])).size > 1);
  const into = section("Differences", names.length ? "Settings and machine." : "Same settings and machine.");
  if (names.length) table(into, ["", ...runs.map(run => ({ name: run.name, kind: "code" }))], names.map(n => [n, ...all.map(one => one[n] ?? "-")]));
}
function dataSummary() {
  if (!runs.some(run => run.data)) return;
  perRun(section("Data"), (run, box) => { if (run.data) table(box, ["", ""], Object.entries(run.data)); });
}

// ---- memory

function noteNotProfiled(box) {
  box.append(make("p", { class: "note" }, "Not profiled; use ithaka profile or profile.every=N."));
}
function memory() {
  if (!runs.some(run => run.profile)) return;
  const into = section("Memory map",
    "Live bytes on rank 0 during the profiled step, by category. Tap a name to hide it; drag or pinch to zoom.");
  perRun(into, (run, box) => {
    if (!run.profile) { noteNotProfiled(box); return; }
    const map = run.profile.memory, peak = map.peak;
    chart(box, (c, narrow) => memoryOption(map, c, narrow), true);
    box.append(make("h3", {}, "Peak"));
    const share = 100 * peak.time_s / Math.max(peak.step_s, 1e-9);
    box.append(make("p", {}, `${bytes(peak.num_bytes)} in phase ${peak.phase || "none"}, ${seconds(peak.time_s)} into a step of ${seconds(peak.step_s)} (${share.toFixed(0)}%).`
      + (peak.measured_bytes == null ? "" : ` The allocator measured ${bytes(peak.measured_bytes)}.`)));
    table(box, ["category", { name: "size", kind: "number" }, { name: "shape", kind: "code below" }, { name: "allocated by", kind: "code below" }],
      peak.largest.map(one => [
        swatch(CATEGORY_COLOURS[one.holder] || "#888", one.holder), bytes(one.num_bytes), one.what, one.made_by,
      ]));
    const planned = peak.planned;
    const names = [...new Set([...Object.keys(peak.holders), ...Object.keys(planned || {})])];
    box.append(make("h3", {}, planned ? "Peak by category, measured and planned" : "Peak by category"));
    const total = o => Object.values(o).reduce((a, b) => a + b, 0);
    const number = name => ({ name, kind: "number" });
    table(box, ["category", number("measured"), ...(planned ? [number("planned")] : [])],
      [...names.map(n => [swatch(CATEGORY_COLOURS[n] || "#888", n), bytes(peak.holders[n] || 0), ...(planned ? [planned[n] == null ? "-" : bytes(planned[n])] : [])]),
        ["total", bytes(peak.num_bytes), ...(planned ? [bytes(total(planned))] : [])]]);
  });
}
function memoryOption(map, c, narrow) {
  const stacked = Object.entries(map.holders).map(([name, values]) => ({
    name, type: "line", stack: "live", symbol: "none", color: CATEGORY_COLOURS[name] || "#888", step: "end",
    lineStyle: { width: 0 }, areaStyle: { opacity: 0.9 }, emphasis: { disabled: true },
    data: values.map((v, i) => [map.time_s[i], v]),
  }));
  const bands = map.phases.map((p, i) => [
    { xAxis: p.start_s, name: p.name, itemStyle: { color: i % 2 ? c.ink : "transparent", opacity: i % 2 ? 0.06 : 0 }, label: { show: false } },
    { xAxis: p.stop_s },
  ]);
  if (stacked.length) {
    stacked[0].markArea = { silent: true, data: bands };
    stacked[0].markLine = {
      symbol: "none", silent: true, lineStyle: { color: c.ink, type: "dotted" }, label: { color: c.ink, formatter: "peak" },
      data: [{ xAxis: map.peak.time_s }],
    };
  }
  const b = base(c, narrow);
  return {
    ...b,
    legend: { ...b.legend, type: narrow ? "scroll" : "plain" },
    grid: { ...b.grid, top: narrow ? 36 : 64 },
    tooltip: { ...b.tooltip, formatter: items => memoryTip(map, items) },
    xAxis: axis(c, { type: "value", name: "seconds into the step", min: 0, max: map.time_s.at(-1), axisLabel: { showMaxLabel: false, formatter: inUnitOf(1, PLAIN) } }),
    yAxis: fromZero(c, map.peak.num_bytes, BYTES, 5),
    series: stacked,
  };
}
function memoryTip(map, items) {
  if (!items.length) return "";
  const i = items[0].dataIndex;
  const sum = items.reduce((a, one) => a + one.value[1], 0);
  const rows = [...items].reverse().filter(one => one.value[1] > 0)
    .map(one => `${one.marker}${echarts.format.encodeHTML(one.seriesName)} <b>${bytes(one.value[1])}</b>`);
  const phase = map.moments[i] || "between phases";
  return `${seconds(map.time_s[i])}: ${echarts.format.encodeHTML(phase)}<br>total shown <b>${bytes(sum)}</b><br>${rows.join("<br>")}`;
}

// ---- time

function addUp(phases, keyOf) {
  const rows = new Map();
  for (const phase of phases) {
    const key = keyOf(phase.path);
    const row = rows.get(key) || { name: key, compute: 0, exchange: 0, copies: 0, idle: 0 };
    for (const kind of Object.keys(KIND_COLOURS)) row[kind] += phase[kind];
    rows.set(key, row);
  }
  return [...rows.values()];
}
function partName(path) {
  if (!path.length) return "between phases";
  return path[0].startsWith("layer ") ? path.slice(1).join(" ") || "layer" : path.join(" ");
}
function times() {
  if (!runs.some(run => run.profile)) return;
  const into = section("Where the time goes",
    "Each instant of the profiled step counts once: as compute, else exchange, else copies, else idle.");
  perRun(into, (run, box) => {
    if (!run.profile) { noteNotProfiled(box); return; }
    const t = run.profile.times, plain = run.profile.plain_s;
    const hidden = `Hidden behind compute: exchange ${seconds(t.hidden.exchange)}, copies ${seconds(t.hidden.copies)}.`;
    const others = plain ? `; without profiling, steps take ${seconds(plain)} (median; depends on document lengths)` : "";
    box.append(make("p", { class: "note" }, `This step took ${seconds(t.wall_s)}${others}. ${hidden}`));
    const parts = addUp(t.phases, partName).filter(r => total(r) > 0.001 * t.wall_s).sort((a, b) => total(b) - total(a));
    box.append(make("h3", {}, "By part, summed over layers"));
    chart(box, (c, narrow) => barOption(parts, c, narrow), parts.length > 8);
    const layers = addUp(t.phases.filter(p => p.path.length && p.path[0].startsWith("layer ")), p => p.slice(0, 2).join(" "));
    if (layers.length) {
      box.append(make("h3", {}, "By layer"));
      chart(box, (c, narrow) => barOption(layers.sort(byLayer), c, narrow), layers.length > 8);
    }
  });
}
function total(row) { return row.compute + row.exchange + row.copies + row.idle; }
function byLayer(a, b) {
  const key = row => { const [, n, direction] = row.name.split(" "); return [Number(n), direction === "backward" ? 1 : 0]; };
  const [x, y] = [key(a), key(b)];
  return x[0] - y[0] || x[1] - y[1];
}
function barOption(rows, c, narrow) {
  const b = base(c, narrow), many = rows.length > 16;
  return {
    ...b,
    grid: { left: narrow ? 120 : 160, right: many ? 40 : narrow ? 12 : 24, top: 36, bottom: 34 },
    dataZoom: many ? [
      { type: "slider", yAxisIndex: 0, startValue: 0, endValue: 15, width: 18, right: 6, borderColor: c.line, showDetail: false },
      { type: "inside", yAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: true },
    ] : [],
    tooltip: { ...b.tooltip, axisPointer: { type: "shadow" }, valueFormatter: seconds },
    xAxis: fromZero(c, Math.max(0, ...rows.map(total)), SECONDS, narrow ? 3 : 5),
    yAxis: axis(c, { type: "category", inverse: true, data: rows.map(r => r.name), axisLabel: { color: c.ink, width: narrow ? 110 : 150, overflow: "truncate" } }),
    series: Object.entries(KIND_COLOURS).map(([kind, colour]) => ({ name: kind, type: "bar", stack: "time", barMaxWidth: 34, color: colour, data: rows.map(r => r[kind]) })),
  };
}

// ---- plan, machine, configuration

function facts() {
  const into = section("Plan, machine, configuration");
  perRun(into, (run, box) => {
    const fold = (title, element, open) => {
      const details = make("details", open ? { open: "" } : {}, make("summary", {}, title));
      details.append(element); box.append(details);
    };
    if (run.plan) { const div = make("div"); planTable(run.plan, div); fold("Plan", div, true); }
    if (run.machine) {
      const div = make("div");
      table(div, ["", ""], Object.entries(run.machine).map(([k, v]) => [k, String(v)]));
      fold("Machine", div, true);
    }
    const lines = Object.entries(run.config).flatMap(([name, values]) =>
      [`${name}:`, ...Object.entries(values || {}).map(([k, v]) => `  ${k}: ${asYaml(v)}${origin(run, `${name}.${k}`)}`)]);
    fold("Configuration", make("pre", {}, lines.join("\n")), false);
  });
}
const origin = (run, name) => run.origins?.[name] ? `  # from ${run.origins[name]}` : "";
const asYaml = v => v === null ? "null" : Array.isArray(v) ? "[" + v.map(asText).join(", ") + "]" : asText(v);
function asText(v) { return typeof v === "object" ? JSON.stringify(v) : v; }
const plannedPeak = plan => Object.values(plan?.peak_bytes ?? {}).reduce((a, b) => a + b, 0);
const WHERE = { device: "on the device", host: "in host memory", disk: "on disk" };
const IF_NULL = { blocks: "chosen by cache size", dtype: "same as parameters" };
function planTable(planned, into) {
  const rows = Object.entries(planned.layout || {}).filter(([k]) => !/^keep_|^kept$|_tier$/.test(k))  // shown by layer
    .map(([k, v]) => [k.replaceAll("_", " "), v === null ? IF_NULL[k] || "all" : String(v)]);
  const kept = planned.layout?.kept || [];
  kept.forEach((layer, i) => {
    const same = other => JSON.stringify(other) === JSON.stringify(layer);
    if (i && same(kept[i - 1])) return;
    const next = kept.findIndex((other, j) => j > i && !same(other)), last = (next < 0 ? kept.length : next) - 1;
    rows.push([last > i ? `activations of layers ${i} to ${last}` : `activations of layer ${i}`, describeKept(layer)]);
  });
  if (planned.stages) rows.push(["stages", String(planned.stages)]);
  const peak = plannedPeak(planned);
  if (peak) rows.push(["planned peak per rank", bytes(peak)]);
  for (const [k, v] of Object.entries(planned.seconds || {})) rows.push([`planned ${k} per micro-step`, seconds(v)]);
  table(into, ["", ""], rows);
}
function describeKept(layer) {
  const attention = layer.attention ? "kept " + WHERE[layer.attention] : "recomputed";
  const rest = layer.mlp ? "; all others kept on the device" : layer.projections ? "; all others except the MLP's kept on the device" : "";
  return `input kept ${WHERE[layer.input]}; attention output ${attention}${rest}`;
}


page.replaceChildren();
for (const draw of [summary, allCurves, experts, retrieval, differences, memory, times, dataSummary, facts]) {
  try {
    draw();
  } catch (error) {  // the other sections can be read
    page.append(explainDamage(error));
  }
}
// The page is rewritten while the run is in progress.
if (document.documentElement.dataset.live) setTimeout(() => location.reload(), 30000);
