"use strict";
// What pages with charts share: numbers as text, elements, charts. `runs` is the data embedded in the page.
const runs = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");

// Colours and symbols of runs, chosen to be distinct for colour-blind readers.
const RUN_COLOURS = ["#2f7fc1", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#7a5195"];
const RUN_SYMBOLS = ["circle", "rect", "triangle", "diamond", "pin", "arrow"];

// ---- numbers as text

// [name, size] of units, largest first.
const BYTES = [[" TiB", 2 ** 40], [" GiB", 2 ** 30], [" MiB", 2 ** 20], [" KiB", 1024], [" B", 1]];
const AMOUNTS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3], ["", 1]];
const SECONDS = [[" h", 3600], [" min", 60], [" s", 1], [" ms", 1e-3]];
const PLAIN = [["", 1]];

function unitOf(n, units) { return units.find(([, size]) => n >= size) || units.at(-1); }
function bytes(n) {
  if (n == null) return "-";
  const [unit, size] = unitOf(n, BYTES);
  return (size > 1 ? Number((n / size).toPrecision(4)) : n.toFixed(0)) + unit;
}
function amount(n) {
  if (n == null) return "-";
  const [unit, size] = unitOf(n, AMOUNTS);
  return (size > 1 ? (n / size).toPrecision(3) : Number(n.toPrecision(3))) + unit;
}
function seconds(s) {
  if (s == null) return "-";
  if (s >= 3600) return (s / 3600).toFixed(2) + " h";
  if (s >= 60) return (s / 60).toFixed(1) + " min";
  return s >= 1 ? s.toFixed(2) + " s" : (s * 1000).toFixed(s >= 0.01 ? 0 : 2) + " ms";
}
function tokens(n) { return n % 1024 ? String(n) : n % 2 ** 20 ? n / 1024 + "K" : n / 2 ** 20 + "M"; }
// Math.max(...values) fails for more values than the stack holds, about 100,000.
function largest(values) { return values.reduce((a, b) => Math.max(a, b), -Infinity); }
function smallest(values) { return values.reduce((a, b) => Math.min(a, b), Infinity); }
function lastOf(values) { return values.filter(v => v != null).at(-1); }
function median(values) {
  const sorted = values.filter(v => v != null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}

// ---- elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
function section(title, note) {
  const element = make("section", {}, make("h2", {}, title));
  if (note) element.append(make("p", { class: "note" }, note));
  page.append(element);
  return element;
}
function table(into, head, rows) {
  const cell = (tag, value, column) => {
    const kind = typeof head[column] === "object" ? head[column].kind : "";
    const element = make(tag, kind ? { class: kind } : {});
    element.append(...(Array.isArray(value) ? value : [value ?? "-"]));
    return element;
  };
  const names = head.map(h => typeof h === "object" ? h.name : h);
  const body = rows.map(row => make("tr", {}, ...row.map((v, i) => cell("td", v, i))));
  into.append(make("div", { class: "scroll" }, make("table", head.some(h => h.kind?.includes("below")) ? { class: "folds" } : {},
    make("thead", {}, make("tr", {}, ...names.map((n, i) => cell("th", n, i)))), make("tbody", {}, ...body))));
}
function swatch(colour, name) { return [make("span", { class: "swatch", style: `background:${colour}` }), name]; }

// ---- charts, redrawn when the theme changes

const charts = [];
function chart(into, option, tall) {
  const box = make("div", { class: "chart" + (tall ? " tall" : "") });
  into.append(box);
  charts.push({ box, option, live: null });
}
function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "panel", "ink", "faint", "line"];
  return Object.fromEntries(names.map(name => [name, style.getPropertyValue("--" + name).trim()]));
}
function drawAll() {
  const c = colours();
  for (const one of charts) {
    if (one.live) one.live.dispose();
    one.live = null;
    try {
      const option = one.option(c, one.box.clientWidth < 560);
      one.live = echarts.init(one.box, null, { renderer: "canvas" });
      one.live.setOption(option);
    } catch (error) {
      one.box.replaceChildren(explainDamage(error));
    }
  }
}
// A file that someone edited or cut off may hold a list for a number.
function explainDamage(error) {
  console.error(error);
  return make("p", { class: "note" }, `Part of this page cannot be drawn (${error.message}): a file that it shows is damaged.`);
}
function base(c, narrow) {
  const text = { color: c.ink };
  return {
    backgroundColor: "transparent", textStyle: text, animation: false, aria: { enabled: true },
    legend: { type: "scroll", top: 0, textStyle: text, pageTextStyle: text, pageIconColor: c.ink, pageIconInactiveColor: c.line },
    grid: { left: narrow ? 58 : 72, right: narrow ? 12 : 24, top: 36, bottom: 78 },
    tooltip: { trigger: "axis", confine: true, backgroundColor: c.panel, borderColor: c.line, textStyle: { color: c.ink, fontSize: 12 } },
    dataZoom: [
      { type: "inside", filterMode: "none" },
      { type: "slider", height: 22, bottom: 8, filterMode: "none", borderColor: c.line, textStyle: { color: c.faint } },
    ],
  };
}
function axis(c, extra) {
  return {
    axisLine: { lineStyle: { color: c.line } }, splitLine: { lineStyle: { color: c.line, opacity: 0.5 } },
    nameTextStyle: { color: c.faint }, nameLocation: "middle", nameGap: 24, ...extra,
    axisLabel: { color: c.faint, hideOverlap: true, ...extra.axisLabel },
  };
}
// Drops floating-point noise: 0.30000000000000004 -> 0.3.
function dropNoise(n) { return Number(n.toPrecision(12)); }
// Tick labels in the unit of the axis maximum `most`. Ticks are round numbers; all digits are shown, so labels differ.
function inUnitOf(most, units) {
  const [unit, size] = unitOf(most, units);
  return n => n ? dropNoise(n / size) + unit : "0";
}
// An axis that starts at 0, with about `count` ticks at round numbers.
function fromZero(c, most, units, count) {
  const [, size] = unitOf(most, units);
  const rough = Math.max(most / size / count, 1e-9), scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(n => n * scale >= rough) * scale * size;
  return axis(c, {
    type: "value", min: 0, interval: step, max: dropNoise(Math.ceil(most / step * 1.02) * step),
    axisLabel: { formatter: inUnitOf(most, units) },
  });
}
// Widens lines that a later one would hide, because it is equal as far as one can see.
function showHidden(series) {
  const points = series.map(one => one.data.map(point => point.value ?? point));
  const values = points.flatMap(own => own.map(([, y]) => y)), visible = 0.01 * (largest(values) - smallest(values));
  const hides = (over, under) => {
    const count = Math.min(over.length, under.length);
    return count && under.slice(0, count).every(([x, y], i) => x === over[i][0] && Math.abs(y - over[i][1]) <= visible);
  };
  series.forEach((one, i) => {
    const edge = 3 * Math.min(2, points.slice(i + 1).filter(over => hides(over, points[i])).length);
    one.lineStyle.width += edge;
    one.symbolSize += edge;
  });
  return series;
}
function seriesPrefix(name) { return runs.length > 1 ? name + " " : ""; }
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawAll, 150); });
