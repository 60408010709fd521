// Runs over each other: by step, by time, by tokens or by cost; and how their run files differ.

import { get } from "../api.js";
import { lineChart } from "../chart.js";
import { card, colour, el, empty, swatch, table } from "../dom.js";
import { clock, count, percent, seconds, trim } from "../format.js";

const AXES = { step: ["version", trim, (p) => p.version], time: ["time", seconds, (p) => p.t], tokens: ["tokens", count, (p) => p.tokens], cost: ["cost", trim, (p, run) => p.t / 3600 * run.price_per_hour] };
const METRICS = {
  "Held-out success": ["held out", (v) => percent(v), "Share of held-out episodes that succeed, by run and task."],
  Reward: ["rewards", trim, "Mean reward of the trajectories that ended between two steps, by run and task."],
  "Time of a step": ["seconds", seconds, "Time that the trainer worked on the step."],
  "Wait for a batch": ["waited_s", seconds, "Time that the trainer waited for the batch of the step."],
  Staleness: ["staleness", trim, "Mean age of the trained trajectories, in versions."],
  "Gradient norm": ["grad_norm", trim, "Norm of the gradient before clipping."],
  Entropy: ["entropy", trim, "Mean entropy of the policy, in nats per token."],
  Loss: ["loss", trim, "The objective of the step; comparable only between runs with the same loss."],
};
const DASHES = ["", "6 4", "2 3", "9 3 2 3"]; // colours tell runs apart, dashes tasks

export function create(pane, context) {
  const { run, runs, query } = context;
  let chosen = (query.runs ? query.runs.split(",") : [run, ...runs.filter((name) => name !== run).slice(0, 1)]).filter((name) => runs.includes(name)), axis = query.axis || "step";
  const boxes = el("div", { class: "row" }), axes = el("span", { class: "row" }), summary = el("div"), difference = el("div");
  const charts = Object.entries(METRICS).map(([title, [key, format, tip]]) => { const chart = lineChart({ label: title, get x() { return AXES[axis][0]; }, height: 200, format, integers: false, xFormat: (v) => AXES[axis][1](v), low: key === "held out" ? 0 : undefined }); return { key, chart, node: card(title, { width: "w6", tip }, chart.node) }; });
  pane.append(el("div", { class: "head" }, el("h1", {}, "Compare")), el("div", { class: "grid" }, card("Runs", { right: axes, tip: "Choose runs, and what the horizontal axis counts." }, boxes), card("Side by side", { tip: "The chosen runs, with the colours that they have below." }, summary), charts.map((each) => each.node), card("Differences of the run files", { tip: "Keys whose values differ between the chosen runs." }, difference)));
  draw();

  function draw() {
    boxes.replaceChildren(...runs.slice(0, 60).map((name) => el("button", { type: "button", "aria-pressed": String(chosen.includes(name)), onclick: () => { chosen = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]; again(); } }, name)));
    axes.replaceChildren(el("span", { class: "note" }, "by"), ...Object.keys(AXES).map((name) => el("button", { type: "button", "aria-pressed": String(name === axis), onclick: () => { axis = name; again(); } }, name)));
  }
  function again() {
    history.replaceState(null, "", `#/compare/${encodeURIComponent(run)}?${new URLSearchParams({ runs: chosen.join(","), axis })}`);
    draw();
    context.refresh();
  }

  async function load() {
    const names = [...chosen];
    const found = await Promise.all(names.map((name) => get("/api/view/compare", { run: name })));
    const files = await Promise.all(names.map((name) => get("/api/runfile", { run: name })));
    return { names, found, files, state: found[0]?.state };
  }

  function update({ names, found, files }) {
    summary.replaceChildren(found.length ? table(columns(names), found.map((data, i) => ({ ...data, name: names[i], colour: colour(i) })), { label: "runs" }) : empty("Choose a run above"));
    for (const { key, chart, node } of charts) {
      const series = found.flatMap((data, i) => lines(key, data, names[i], i));
      chart.set({ series: series.filter((each) => each.points.length) });
      node.hidden = !series.some((each) => each.points.length);
    }
    const known = files.filter((file) => file.text), rows = differences(known.map((file) => file.text)); // a simulated run has no run file
    difference.replaceChildren(known.length < 2 ? empty("Choose two runs or more", "Simulated runs have no run file in their folder.") : rows.length ? el("div", { class: "scroll diff" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"), known.map((file) => el("th", {}, file.run)))), el("tbody", {}, rows.map((row) => el("tr", { class: "changed" }, row.map((cell) => el("td", {}, cell)))))) ) : empty("The run files do not differ"));
  }

  function lines(key, data, name, i) {
    const [, , x] = AXES[axis];
    if (key === "held out") {
      const tokens = new Map(data.points.map((p) => [p.version, p.tokens]));
      return Object.entries(data.held_out).map(([task, points], k) => ({ name: `${name} ${task}`, colour: colour(i), dash: DASHES[k % 4], dots: true, points: points.map((p) => [x({ ...p, tokens: tokens.get(p.version) ?? 0 }, data), p.success]) }));
    }
    if (key === "rewards") return Object.keys(data.points[0]?.rewards || {}).map((task, k) => ({ name: `${name} ${task}`, colour: colour(i), dash: DASHES[k % 4], points: data.points.map((p) => [x(p, data), p.rewards[task]]) }));
    return [{ name, colour: colour(i), points: data.points.filter((p) => p[key] !== undefined).map((p) => [x(p, data), p[key]]) }];
  }
  return { load, update };
}

const columns = () => [
  { name: "run", value: (r) => el("span", { class: "named" }, swatch(r.colour), r.name) }, { name: "phase", value: (r) => r.phase }, { name: "steps", num: true, value: (r) => `${r.step} of ${r.steps}`, tip: "Optimizer steps." },
  { name: "time", num: true, value: (r) => clock(r.t), tip: "Since the run began." }, { name: "time per step", num: true, tip: "Mean time between two steps.", value: (r) => (r.points.length > 1 ? seconds((r.points.at(-1).t - r.points[0].t) / (r.points.at(-1).version - r.points[0].version)) : "–") },
  { name: "tokens", num: true, value: (r) => count(r.points.at(-1)?.tokens), tip: "Tokens trained." }, { name: "preset", value: (r) => `${r.preset}, alpha ${r.alpha}` },
  { name: "held-out success", wrap: true, tip: "Of the newest evaluation, by task.", value: (r) => Object.entries(r.held_out).map(([task, points]) => (points.length ? `${task} ${percent(points.at(-1).success)}` : "")).filter(Boolean).join(", ") || "–" },
];

// YAML that rollart wrote itself: indentation gives the path. Enough to compare, not a parser.
function flat(text) {
  const found = new Map(), path = [];
  for (const line of text.split("\n")) {
    const match = /^(\s*)(- )?([\w.-]+):\s*(.*)$/.exec(line);
    if (!match) { if (line.trim() && path.length) { const key = path.map((p) => p[1]).join("."); found.set(key, `${found.get(key) || ""} ${line.trim()}`.trim()); } continue; }
    const depth = match[1].length + (match[2] ? 2 : 0);
    if (match[2]) { while (path.length && path.at(-1)[0] >= depth - 2 && path.at(-1)[2] !== "list") path.pop(); while (path.length && path.at(-1)[0] >= depth) path.pop(); path.push([depth - 1, `#${(match[4] || "").trim()}`, ""]); }
    while (path.length && path.at(-1)[0] >= depth) path.pop();
    path.push([depth, match[3], ""]);
    if (match[4]) found.set(path.map((p) => p[1]).join("."), match[4]);
  }
  return found;
}

export function differences(texts) {
  const files = texts.map(flat), keys = [...new Set(files.flatMap((file) => [...file.keys()]))];
  return keys.filter((key) => new Set(files.map((file) => file.get(key))).size > 1).slice(0, 200).map((key) => [key, ...files.map((file) => file.get(key) ?? "–")]);
}
