// Line charts with bands, as SVG. A plotting library of several megabytes would be most of the page's weight and needs
// inline styles, which the page's content policy forbids; these few shapes do not.

import { el, svg, swatch } from "./dom.js";
import { trim } from "./format.js";

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 26;

export function niceTicks(low, high, wanted = 5) {
  const raw = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((size) => size >= raw) || raw;
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) ticks.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return ticks;
}

// Powers of ten, and between them 2 and 5 where there is room.
export function logTicks(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))], parts = to - from > 3 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = from; power <= to; power++) for (const part of parts) { const value = part * 10 ** power; if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value); }
  return ticks;
}

// The moving average with weight `factor` on the past, without the pull of its first value.
export function smoothed(points, factor) {
  let sum = 0, weight = 0;
  return points.filter(([, y]) => finite(y)).map(([x, y]) => { sum = sum * factor + y * (1 - factor); weight = weight * factor + 1 - factor; return [x, sum / weight]; });
}

const others = new Map(); // charts on the page by what their x axis is: a pointer over one is a line in all

const finite = (value) => typeof value === "number" && Number.isFinite(value);

// options: {height, label, x, format, xFormat, low, high, legend}
// set({series: [{name, colour, points: [[x, y, low?, high?]], dots (true, or a radius), dash, width}], refs: [{y, text}], smooth, log})
export function lineChart(options = {}) {
  const height = options.height || 190;
  const format = options.format || trim, xFormat = options.xFormat || trim;
  const drawing = svg("svg", { height, role: "img", tabindex: 0 });
  const hover = el("div", { class: "hover", hidden: true });
  const legend = el("div", { class: "legend" });
  const node = el("div", { class: "chart" }, drawing, hover, options.legend === false ? null : legend);
  const off = new Set();
  let data = { series: [], refs: [] }, scale = null, at = null;

  const usable = (y) => finite(y) && (!data.log || y > 0);
  const shown = () => data.series.filter((series) => !off.has(series.name) && series.points.some(([, y]) => usable(y)));

  function extent() {
    const xs = [], ys = (data.refs || []).map((ref) => ref.y);
    for (const series of shown()) for (const [x, y, low, high] of series.points) {
      if (!usable(y)) continue;
      xs.push(x); ys.push(y);
      if (usable(low)) ys.push(low, high);
    }
    if (!xs.length) return null;
    let [a, b] = [Math.min(...xs), Math.max(...xs)], [c, d] = [Math.min(...ys), Math.max(...ys)];
    if (options.low !== undefined) c = Math.min(options.low, c);
    if (options.high !== undefined) d = Math.max(options.high, d);
    if (a === b) { a -= 0.5; b += 0.5; }
    if (data.log) return [a, b, Math.min(...ys.filter(usable)) / 1.1, d * 1.1];
    if (c === 0 && d === 0) d = 1;
    if (c === d) { c -= Math.abs(c) * 0.1; d += Math.abs(d) * 0.1; }
    const pad = (d - c) * 0.06, bottom = options.low === c ? c : c - pad;
    return [a, b, c >= 0 ? Math.max(0, bottom) : bottom, options.high === d ? d : d + pad]; // what is never negative has no room below 0
  }

  function draw() {
    const width = Math.max(160, node.clientWidth);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren();
    scale = null;
    const range = extent();
    drawing.setAttribute("aria-label", describe());
    if (!range) { drawing.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, options.empty || "no points yet")); return; }
    const [a, b, c, d] = range;
    const px = (x) => LEFT + (x - a) / (b - a) * (width - LEFT - RIGHT);
    const up = data.log ? (y) => Math.log(y / c) / Math.log(d / c) : (y) => (y - c) / (d - c);
    const py = (y) => height - BOTTOM - up(y) * (height - TOP - BOTTOM);
    scale = { px, py, a, b, width };
    for (const tick of data.log ? logTicks(c, d) : niceTicks(c, d, Math.max(2, height / 48))) {
      drawing.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: py(tick), y2: py(tick) }));
      drawing.append(svg("text", { x: LEFT - 6, y: py(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    const whole = options.integers !== false && options.xFormat === undefined;
    for (const tick of niceTicks(a, b, Math.max(3, width / 90))) {
      if (whole && !Number.isInteger(tick)) continue;
      const edge = options.x && px(tick) < LEFT + 12; // beside the name of the axis
      drawing.append(svg("text", { x: edge ? px(tick) - 2 : px(tick), y: height - 9, "text-anchor": edge ? "start" : "middle" }, xFormat(tick)));
    }
    drawing.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
    if (options.x) drawing.append(svg("text", { x: LEFT - 6, y: height - 9, "text-anchor": "end" }, options.x));
    for (const ref of (data.refs || []).filter((each) => usable(each.y))) {
      drawing.append(svg("line", { class: "ref", x1: LEFT, x2: width - RIGHT, y1: py(ref.y), y2: py(ref.y) }));
      drawing.append(svg("text", { x: LEFT + 4, y: py(ref.y) - 4 }, ref.text));
    }
    for (const series of shown()) {
      if (!data.smooth) { drawSeries(series, px, py); continue; }
      drawSeries({ ...series, faint: true }, px, py);
      drawSeries({ ...series, points: smoothed(series.points, data.smooth) }, px, py);
    }
    if (at !== null) cross(at);
  }

  function drawSeries(series, px, py) {
    const points = series.points.filter(([, y]) => usable(y));
    const path = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    const banded = points.filter(([, , low]) => usable(low));
    if (banded.length > 1) {
      const back = banded.map(([x, , low]) => [x, low]).reverse();
      drawing.append(svg("path", { class: "band", d: `${path(banded.map(([x, , , high]) => [x, high]))}L${path(back).slice(1)}Z`, style: { fill: series.colour } }));
    }
    if (points.length > 1 && !series.noLine) drawing.append(svg("path", { class: "line", d: path(points), style: { stroke: series.colour, strokeDasharray: series.dash === true ? "5 4" : series.dash || "", strokeWidth: series.width || "", opacity: series.faint ? 0.25 : "" } }));
    if (series.dots || points.length === 1) for (const [x, y, low, high] of points) {
      if (finite(low)) drawing.append(svg("line", { x1: px(x), x2: px(x), y1: py(low), y2: py(high), style: { stroke: series.colour } }));
      drawing.append(svg("circle", { cx: px(x), cy: py(y), r: series.dots > 1 ? series.dots : 3, style: { fill: series.colour } }));
    }
  }

  function describe() {
    const parts = shown().map((series) => { const last = series.points.filter(([, y]) => finite(y)).at(-1); return last ? `${series.name} ${format(last[1])} at ${xFormat(last[0])}` : ""; });
    return `${options.label || "chart"}: ${parts.filter(Boolean).join(", ") || "no points yet"}`;
  }

  function mark(x) {
    drawing.querySelectorAll(".cross").forEach((old) => old.remove());
    if (scale && x !== null && x >= scale.a && x <= scale.b) drawing.append(svg("line", { class: "cross", x1: scale.px(x), x2: scale.px(x), y1: TOP, y2: height - BOTTOM }));
  }
  function markOthers(x) { for (const each of others.get(options.x) || []) if (each.node !== node) each.node.isConnected ? each.mark(x) : others.get(options.x).delete(each); }

  function cross(x) {
    if (!scale) return;
    const near = (series) => series.points.filter(([, y]) => finite(y)).reduce((best, point) => (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), null);
    const found = shown().map((series) => [series, near(series)]).filter(([, point]) => point);
    if (!found.length) return;
    const anchor = found.map(([, point]) => point[0]).reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best));
    at = anchor;
    mark(anchor); markOthers(anchor);
    const lines = found.filter(([, point]) => point[0] === anchor).slice(0, 12).map(([series, [, y, low, high]]) => el("div", {}, swatch(series.colour), series.name, el("b", {}, format(y) + (finite(low) ? ` (${format(low)} – ${format(high)})` : ""))));
    hover.replaceChildren(el("div", { class: "note" }, `${options.x || "x"} ${xFormat(anchor)}`), ...lines);
    hover.hidden = false;
    const left = scale.px(anchor) + 12;
    hover.style.left = `${left + hover.offsetWidth > scale.width ? Math.max(0, left - hover.offsetWidth - 24) : left}px`;
    hover.style.top = "6px";
  }

  function leave() { at = null; hover.hidden = true; mark(null); markOthers(null); }
  drawing.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const box = drawing.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    cross(scale.a + share * (scale.b - scale.a));
  });
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("keydown", (event) => {
    if (!scale || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
    const xs = [...new Set(shown().flatMap((series) => series.points.map(([x]) => x)))].sort((p, q) => p - q);
    const here = at === null ? xs.length - 1 : xs.indexOf(at) + (event.key === "ArrowRight" ? 1 : -1);
    cross(xs[Math.min(xs.length - 1, Math.max(0, here))]);
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(node);
  if (options.x) others.set(options.x, (others.get(options.x) || new Set()).add({ node, mark }));

  function set(next) {
    data = next;
    if (options.legend !== false) legend.replaceChildren(...(next.series.length > 1 ? next.series.map((series) => el("button", { type: "button", "aria-pressed": String(!off.has(series.name)), onclick: () => { off.has(series.name) ? off.delete(series.name) : off.add(series.name); set(data); } }, swatch(series.colour, series.dash), series.name)) : []));
    draw();
  }
  return { node, set };
}

// Horizontal bars: [{name, value, text, colour, tip}].
export function bars(rows, most) {
  const top = most || Math.max(...rows.map((row) => row.value), 1e-9);
  return el("div", { class: "hbars" }, rows.map((row) => [el("span", row.tip ? { tip: row.tip } : {}, row.name), el("span", { class: "bar" }, el("i", { style: { width: `${Math.min(100, 100 * row.value / top)}%`, background: row.colour || "var(--c0)" } })), el("span", { class: "n" }, row.text)]));
}

// One bar of shares: [{name, share, colour, tip}].
export function stack(parts) {
  return el("div", { class: "stack" }, parts.filter((part) => part.share > 0.002).map((part) => el("i", { tip: `${part.name}: ${(part.share * 100).toFixed(1)}%${part.tip ? `\n${part.tip}` : ""}`, style: { flex: `${part.share} 0 0`, background: part.colour } }, part.share > 0.09 ? `${part.name} ${(part.share * 100).toFixed(0)}%` : "")));
}

// Columns over a range: counts of equal bins between low and high.
export function histogram(found, format = trim, height = 64) {
  const most = Math.max(...found.counts, 1), width = 300, step = width / Math.max(1, found.counts.length);
  const boxes = found.counts.map((n, i) => svg("rect", { x: i * step + 0.5, width: Math.max(1, step - 1), y: 60 - 56 * n / most, height: 56 * n / most, rx: 1.5, style: { fill: "var(--c0)" } }, svg("title", {}, `${n} trajectories, ${format(found.low + (found.high - found.low) * i / found.counts.length)} to ${format(found.low + (found.high - found.low) * (i + 1) / found.counts.length)}`)));
  return el("div", { class: "chart" }, svg("svg", { viewBox: `0 0 ${width} 60`, height, role: "img", "aria-label": "histogram", preserveAspectRatio: "none" }, ...boxes), el("div", { class: "ends" }, el("span", {}, format(found.low)), el("span", {}, format(found.high))));
}
