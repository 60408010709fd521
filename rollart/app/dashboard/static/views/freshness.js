// How old the trained data is, what was thrown away, and what the optimizer saw.

import { bars, lineChart } from "../chart.js";
import { card, colour, el, empty, stat } from "../dom.js";
import { count, percent, trim } from "../format.js";

// A metric of the trainer that is listed here has a definition; others are drawn under their own name.
const KNOWN = {
  loss: ["Loss", "The objective of the step; its sign and size depend on the loss that the run file chose. The parts of the tasks add up to it."],
  policy_loss: ["Policy loss", "The policy-gradient part of the loss."],
  kl: ["KL to the reference", "Mean divergence from the model that RL started from, in nats per token."],
  kl_engine: ["KL to the engine", "Mean divergence between the trainer's and the engine's distribution, in nats per token."],
  entropy: ["Entropy", "Mean entropy of the policy, in nats per token. It falls as the policy commits; near 0 nothing is explored."],
  grad_norm: ["Gradient norm", "Norm of the gradient of all weights, before clipping."],
  logprob_grad: ["Gradient at the logprobs", "Norm of the gradient of the loss with respect to the logprobs of the trained tokens: how hard the batch, and each task in it, pulls at the policy. The squares of the tasks add up to that of the batch."],
  clip_fraction: ["Clipped", "Share of tokens whose ratio left the trust region, so that they pushed nothing."],
  lr: ["Learning rate", "Step size of the optimizer."],
  logprob_gap: ["Logprob gap", "Mean absolute difference between the logprobs of engine and trainer, in nats per token."],
  importance: ["Importance weight", "Mean weight that the correction of stale tokens gave a token; 1 is on-policy."],
  stale_kl: ["KL of stale tokens", "Mean divergence of the policy that sampled from the one that trains, in nats per token."],
  over_cap: ["Over the cap", "Share of tokens whose ratio exceeded the cap of the correction."],
  dropped: ["Dropped tokens", "Share of tokens that the correction left out."],
  effective_samples: ["Effective samples", "Effective sample size of the importance ratios, as a share of the tokens; 1 is on-policy."],
  action_tokens: ["Action tokens", "Sampled tokens in the batch."],
  updates: ["Updates", "Optimizer updates of the step."],
  skipped: ["Skipped updates", "Updates that the numerics guard refused in the step."],
  spread: ["Groups with spread", "Share of groups whose rewards differ: the others teach nothing."],
  solved: ["Solved groups", "Share of groups in which every member has the full reward."],
  staleness: ["Staleness by task", "Mean age of the oldest token of each trajectory, in versions."],
  truncated: ["Truncated", "Share of trajectories that were cut at a limit."],
  samples: ["Trajectories", "Trajectories in the batch."],
  reward: ["Reward", "Mean reward of the trajectories in the batch."],
};
const SECTIONS = { "Learning signal": ["loss", "policy_loss", "reward", "spread", "solved", "kl", "entropy", "clip_fraction"], Gradients: ["grad_norm", "logprob_grad", "lr", "updates", "skipped"], "Old tokens": ["logprob_gap", "kl_engine", "importance", "stale_kl", "over_cap", "dropped", "effective_samples", "staleness"] };
const REST = "Batch and others", UNMEASURED = { kl: "training.algorithm.kl is 0: not measured" };
const SHARES = /frac|share|clip|^(over_cap|dropped|effective_samples|spread|solved|truncated)$/;

export function create(pane, { run }) {
  const stats = el("div", { class: "stats" }), ages = el("div"), wasted = el("div"), grid = el("div", { class: "grid" }), more = el("div");
  let held = null, smooth = 0, log = false, wanted = "";
  const redraw = () => held && drawValues(held);
  const tools = el("div", { class: "filters", style: { margin: "18px 0 4px" } },
    el("label", {}, "Metrics that contain", el("input", { type: "search", class: "wide", "aria-label": "Metrics that contain", oninput: (event) => { wanted = event.target.value.trim().toLowerCase(); redraw(); } })),
    el("label", { tip: "Weight of the past in the moving average that is drawn over the values; 0 draws the values alone." }, "Smoothing", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "Smoothing", oninput: (event) => { smooth = Number(event.target.value); redraw(); } })),
    el("button", { type: "button", "aria-pressed": "false", tip: "Logarithmic axes; values that are not positive are left out.", onclick: (event) => { log = !log; event.currentTarget.setAttribute("aria-pressed", String(log)); redraw(); } }, "Log scale"));
  const stale = lineChart({ label: "staleness", x: "version", low: 0, height: 190 }), gap = lineChart({ label: "gap between engine and trainer", x: "version", low: 0, height: 190 });
  const none = empty("Nothing here is trained on trajectories", "Samples and evaluations are not trained, and imitation learns from demonstrations: its loss and results are in the overview.");
  none.hidden = true;
  const charts = new Map(), sections = new Map();
  pane.append(el("div", { class: "head" }, el("h1", {}, "Freshness and loss")), none, grid, tools, more);
  grid.append(stats, card("Staleness by step", { width: "w6", tip: "Versions between the policy that sampled a trajectory's oldest token and the one that trained on it: mean and maximum of the batch. It never exceeds alpha." }, stale.node), card("Gap between engine and trainer", { width: "w6", tip: "Mean absolute difference between the logprobs that the engine sampled with and those of the trainer, by task. Tokens of age 0 show numerics alone." }, gap.node),
    card("Ages of what was trained", { width: "w6", tip: "Trajectories by the age of their oldest token." }, ages), card("Thrown away, by cause", { width: "w6", tip: "Tokens of trajectories that will not be trained. A cancelled one was a surplus member, or its group was dropped." }, wasted));

  function update(data) {
    const untrained = ["eval", "sample", "imitation"].includes(data.about.work); // nothing in it is of RL
    none.hidden = !untrained; grid.hidden = tools.hidden = more.hidden = untrained;
    if (untrained) return;
    const lost = data.wasted.reduce((sum, row) => sum + row.tokens, 0), all = lost + data.trained_tokens;
    const last = data.by_step.at(-1);
    stats.replaceChildren(
      stat("Bound", String(data.alpha), "versions", "alpha: no trained token is older than this."),
      stat("Staleness", last ? trim(last[1], 2) : "–", "versions", "Mean over the last batch."),
      stat("Thrown away", all ? percent(lost / all, 1) : "–", "of tokens", "Tokens of trajectories that ended untrainable or whose group was dropped, of all tokens of ended ones.", `${count(lost)} tokens`),
      stat("Trained", count(data.trained_tokens), "tokens", "Tokens in the batches of all steps."));
    stale.set({ series: [{ name: "mean", colour: "var(--c0)", points: data.by_step.map(([v, m]) => [v, m]) }, { name: "maximum", colour: "var(--c1)", points: data.by_step.map(([v, , m]) => [v, m]) }], refs: [{ y: data.alpha, text: `alpha ${data.alpha}` }] });
    const whole = Object.values(data.staleness).reduce((sum, n) => sum + n, 0);
    ages.replaceChildren(whole ? bars(Object.entries(data.staleness).map(([age, n]) => ({ name: `${age} ${age === "1" ? "version" : "versions"}`, value: n, text: `${count(n)} · ${percent(n / whole)}` }))) : empty("Nothing was trained yet"));
    wasted.replaceChildren(data.wasted.length ? bars(data.wasted.slice(0, 10).map((row) => ({ name: row.cause, value: row.tokens, text: `${count(row.tokens)} tokens · ${count(row.trajectories)} trajectories`, colour: "var(--bad)" }))) : empty("Nothing was thrown away"));
    gap.set({ series: gaps(data.gaps) });
    held = data;
    drawValues(data);
  }

  function section(name) {
    const title = Object.keys(SECTIONS).find((each) => SECTIONS[each].includes(name)) || REST;
    if (!sections.has(title)) {
      sections.set(title, el("div", { class: "grid" }));
      const all = [...Object.keys(SECTIONS), REST].filter((each) => sections.has(each));
      more.replaceChildren(...all.map((each) => el("section", {}, el("h2", { class: "section" }, each), sections.get(each))));
    }
    return sections.get(title);
  }

  function drawValues(data) {
    const names = [...new Set([...data.values.flatMap((row) => Object.keys(row)), ...data.tasks.flatMap((row) => Object.values(row.tasks).flatMap(Object.keys))])].filter((name) => name !== "version");
    const known = Object.keys(KNOWN), rank = (name) => (known.indexOf(name) + 1) || known.length + 1;
    names.sort((p, q) => rank(p) - rank(q) || p.localeCompare(q));
    const tasks = [...new Set(data.tasks.flatMap((row) => Object.keys(row.tasks)))];
    for (const name of names) {
      if (!charts.has(name)) {
        const chart = lineChart({ label: name, empty: UNMEASURED[name], x: "version", height: 150, format: SHARES.test(name) ? (v) => percent(v, 1) : trim });
        const [title, tip] = KNOWN[name] || [name.replaceAll("_", " "), "As the trainer reports it, for the whole batch and by task where it does."];
        const box = card(title, { width: "w4", tip }, chart.node);
        charts.set(name, { chart, box, text: `${name} ${title}`.toLowerCase() });
        section(name).append(box);
      }
      const byTask = tasks.map((task, i) => ({ name: task, colour: colour(i), points: data.tasks.filter((row) => row.tasks[task]?.[name] !== undefined).map((row) => [row.version, row.tasks[task][name]]) })).filter((series) => series.points.length);
      let batch = data.values.filter((row) => row[name] !== undefined).map((row) => [row.version, row[name]]);
      if (UNMEASURED[name] && !byTask.length && batch.every(([, y]) => y === 0)) batch = [];
      const { chart, box, text } = charts.get(name);
      box.hidden = !text.includes(wanted);
      chart.set({ smooth, log, series: [...(batch.length ? [{ name: "batch", colour: byTask.length ? "var(--ink)" : "var(--c0)", dash: byTask.length > 0, points: batch }] : []), ...byTask] });
    }
    for (const grid of sections.values()) grid.parentElement.hidden = [...grid.children].every((box) => box.hidden);
  }
  return { update };
}

function gaps(rows) {
  const found = new Map();
  for (const row of rows) { const name = `${row.task}, ${row.age} old`; (found.get(name) || found.set(name, []).get(name)).push([row.version, row.mean]); }
  const tasks = [...new Set(rows.map((row) => row.task))];
  return [...found].sort().map(([name, points]) => ({ name, colour: colour(tasks.indexOf(name.split(", ")[0])), dash: !name.endsWith(" 0 old"), points }));
}
