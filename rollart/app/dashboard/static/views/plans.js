// Sweeps of `rollart simulate` and fronts of `rollart plan`, from the JSON that they print.

import { get } from "../api.js";
import { lineChart } from "../chart.js";
import { card, colour, el, empty, table } from "../dom.js";
import { percent, seconds, trim } from "../format.js";

export function create(pane) {
  const grid = el("div", { class: "grid" });
  let drawn = "";
  pane.append(el("div", { class: "head" }, el("h1", {}, "Simulate and plan")), grid);
  function update({ plans }) {
    const same = JSON.stringify(plans.map((plan) => [plan.file, plan.content]));
    if (same === drawn) return; // files rarely change: charts keep what is hovered
    drawn = same;
    grid.replaceChildren(...(plans.length ? plans.flatMap((plan) => (plan.kind === "sweep" ? sweep(plan) : front(plan))) : [el("section", { class: "card" }, empty("No sweep and no plan in the folder of the runs", "Save the JSON of one there:", "rollart plan scenario.yaml --json > runs/plan.json"), empty("", "", "rollart simulate scenario.yaml --sweep rollout.alpha=0,1,2 --json > runs/sweep.json"))]));
  }
  return { load: () => get("/api/plans"), update };
}

function front({ file, content }) {
  const chart = lineChart({ label: "price and time", x: "price/h", format: seconds, integers: false, xFormat: trim, height: 280 });
  const point = (each) => [each.price_per_hour, each.step_s];
  const sorted = [...content.front].sort((p, q) => p.price_per_hour - q.price_per_hour);
  queueMicrotask(() => chart.set({ series: [{ name: "Pareto front", colour: "var(--c0)", dots: 6, points: sorted.map(point) }, { name: "fastest", colour: "var(--c2)", dots: true, noLine: true, points: [point(content.fastest)] }, ...(content.given ? [{ name: "as given", colour: "var(--c1)", dots: true, noLine: true, points: [point(content.given)] }] : [])] }));
  const rows = [...sorted.map((each) => ({ ...each, kind: "front" })), ...(content.given ? [{ ...content.given, kind: "as given" }] : [])];
  return [
    card(`Plan: ${file}`, { note: `${content.considered} splits considered, ${content.simulated} simulated`, tip: "Each point is a plan that no other beats in both price and time of a step." }, chart.node),
    card("Plans", {}, table([
      { name: "price", num: true, tip: "Per hour; one H20 is 1.", value: (r) => trim(r.price_per_hour) }, { name: "step", num: true, tip: "Mean time of a step.", value: (r) => seconds(r.step_s) }, { name: "cost", num: true, tip: "Per step; one H20 for an hour is 1.", value: (r) => trim(r.cost_per_step) }, { name: "plan", wrap: true, value: (r) => r.plan.split }, { name: "why", wrap: true, value: (r) => r.reason },
    ], rows, { label: "plans" })),
  ];
}

// Numbers of a simulation, with their unit and what they are; others go by their own name.
const KNOWN = {
  step_s: ["step", seconds, "Mean time between two optimizer steps."], wait_s: ["batch wait", seconds, "Mean time that the trainer waits for the batch of a step."], train_s: ["training", seconds, "Mean time that the trainer works on a step."],
  tokens_per_s: ["tokens/s", trim, "Tokens in the batches of all steps, per second."], answers_per_s: ["generated/s", trim, "Tokens that engines sample, per second."], trajectories_per_s: ["trajectories/s", trim, "Trajectories that are trained, per second."],
  cost_per_step: ["cost per step", trim, "One H20 for an hour is 1."], price_per_hour: ["price per hour", trim, "Of all devices; one H20 is 1."], seconds: ["time in all", seconds, "Simulated time to the last step."], mfu: ["MFU", (value) => percent(value, 1), "Model FLOPs of training, as a share of the peak of the trainer's devices."],
};
const named = (key) => KNOWN[key] || [key.replace("values.", "").replaceAll("_", " "), trim, "As the simulation reports it."];

function sweep({ file, content }) {
  const rows = content.sweep, flat = rows.map((row) => flatten(row));
  const keys = [...new Set(flat.flatMap((row) => Object.keys(row)))], numeric = keys.filter((key) => flat.every((row) => row[key] === undefined || typeof row[key] === "number"));
  const varied = keys.filter((key) => new Set(flat.map((row) => String(row[key]))).size > 1);
  const shown = ["step_s", "tokens_per_s", "trajectories_per_s", "cost_per_step", ...numeric].filter((key, i, all) => all.indexOf(key) === i && varied.includes(key) && numeric.includes(key)).slice(0, 4);
  const swept = keys.filter((key) => key.startsWith("values.") && varied.includes(key)), x = flat.map((row) => Number(row[swept[0]]));
  const byValue = swept.length === 1 && x.every(Number.isFinite); // else points are numbered
  const charts = shown.map((key, i) => { const chart = lineChart({ label: key, x: byValue ? swept[0].split(".").at(-1) : "point", height: 190, format: named(key)[1] }); queueMicrotask(() => chart.set({ series: [{ name: key, colour: colour(i), dots: true, points: flat.map((row, n) => [byValue ? x[n] : n + 1, row[key]]) }] })); return card(named(key)[0], { width: "w6", tip: `${named(key)[2]} ${byValue ? "Over the values of the key that the sweep changes." : "One point for each row of the sweep, in the order of the table."}` }, chart.node); });
  const columns = [{ name: "point", num: true, value: (r) => String(flat.indexOf(r) + 1) }, ...varied.filter((key) => !swept.some((each) => each !== key && each.endsWith(`.${key}`))).slice(0, 10).map((key) => ({ name: named(key)[0], tip: named(key)[2], num: numeric.includes(key), value: (r) => (typeof r[key] === "number" ? named(key)[1](r[key]) : String(r[key] ?? "–")) }))];
  return [card(`Sweep: ${file}`, { note: `${rows.length} points` }, table(columns, flat, { label: "sweep" })), ...charts];
}

function flatten(value, prefix = "") {
  return Object.entries(value).reduce((all, [key, inner]) => (inner && typeof inner === "object" && !Array.isArray(inner) ? { ...all, ...flatten(inner, `${prefix}${key}.`) } : { ...all, [prefix + key]: inner }), {});
}
