// How old the trained data is, what was thrown away, and what the optimizer saw.

import { bars, lineChart } from "../chart.js";
import { card, colour, el, empty, stat } from "../dom.js";
import { count, percent, trim } from "../format.js";

// A metric of the trainer that is listed here has a definition; others are drawn under their own name.
const KNOWN = {
  loss: ["Loss", "The objective of the step; its sign and size depend on the loss that the run file chose."],
  policy_loss: ["Policy loss", "The policy-gradient part of the loss."],
  kl: ["KL to the reference", "Mean divergence from the model that RL started from, in nats per token."],
  kl_engine: ["KL to the engine", "Mean divergence between the trainer's and the engine's distribution, in nats per token."],
  entropy: ["Entropy", "Mean entropy of the policy, in nats per token. It falls as the policy commits; near 0 nothing is explored."],
  grad_norm: ["Gradient norm", "Norm of the gradient before clipping."],
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
const SHARES = /frac|share|clip|^(over_cap|dropped|effective_samples|spread|solved|truncated)$/;

export function create(pane, { run }) {
  const stats = el("div", { class: "stats" }), ages = el("div"), wasted = el("div"), grid = el("div", { class: "grid" }), more = el("div", { class: "grid", style: { marginTop: "14px" } });
  const stale = lineChart({ label: "staleness", x: "version", low: 0, height: 190 }), gap = lineChart({ label: "gap between engine and trainer", x: "version", low: 0, height: 190 });
  const charts = new Map();
  pane.append(el("div", { class: "head" }, el("h1", {}, "Freshness and loss")), grid, more);
  grid.append(stats, card("Staleness by step", { width: "w6", tip: "Versions between the policy that sampled a trajectory's oldest token and the one that trained on it: mean and maximum of the batch. It never exceeds alpha." }, stale.node), card("Ages of what was trained", { width: "w6", tip: "Trajectories by the age of their oldest token." }, ages),
    card("Thrown away, by cause", { width: "w6", tip: "Tokens of trajectories that will not be trained. A cancelled one was a surplus member, or its group was dropped." }, wasted), card("Gap between engine and trainer", { width: "w6", tip: "Mean absolute difference between the logprobs that the engine sampled with and those of the trainer, by task. Tokens of age 0 show numerics alone." }, gap.node));

  function update(data) {
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
    drawValues(data);
  }

  function drawValues(data) {
    const names = [...new Set([...data.values.flatMap((row) => Object.keys(row)), ...data.tasks.flatMap((row) => Object.values(row.tasks).flatMap(Object.keys))])].filter((name) => name !== "version");
    const known = Object.keys(KNOWN), rank = (name) => (known.indexOf(name) + 1) || known.length + 1;
    names.sort((p, q) => rank(p) - rank(q) || p.localeCompare(q));
    const tasks = [...new Set(data.tasks.flatMap((row) => Object.keys(row.tasks)))];
    for (const name of names) {
      if (!charts.has(name)) {
        const chart = lineChart({ label: name, x: "version", height: 150, format: SHARES.test(name) ? (v) => percent(v, 1) : trim });
        charts.set(name, chart);
        const [title, tip] = KNOWN[name] || [name.replaceAll("_", " "), "As the trainer reports it, for the whole batch and by task where it does."];
        more.append(card(title, { width: "w4", tip }, chart.node));
      }
      const byTask = tasks.map((task, i) => ({ name: task, colour: colour(i), points: data.tasks.filter((row) => row.tasks[task]?.[name] !== undefined).map((row) => [row.version, row.tasks[task][name]]) })).filter((series) => series.points.length);
      const batch = data.values.filter((row) => row[name] !== undefined).map((row) => [row.version, row[name]]);
      charts.get(name).set({ series: [...(batch.length ? [{ name: "batch", colour: byTask.length ? "var(--ink)" : "var(--c0)", dash: byTask.length > 0, points: batch }] : []), ...byTask] });
    }
  }
  return { update };
}

function gaps(rows) {
  const found = new Map();
  for (const row of rows) { const name = `${row.task}, ${row.age} old`; (found.get(name) || found.set(name, []).get(name)).push([row.version, row.mean]); }
  const tasks = [...new Set(rows.map((row) => row.task))];
  return [...found].sort().map(([name, points]) => ({ name, colour: colour(tasks.indexOf(name.split(", ")[0])), dash: !name.endsWith(" 0 old"), points }));
}
