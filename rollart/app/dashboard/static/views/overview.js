// Results and speed at a glance: is it learning, how fast, and what holds it up.

import { bars, lineChart, stack } from "../chart.js";
import { card, colour, el, empty, stat, table } from "../dom.js";
import { clock, count, percent, seconds, trim, wilson } from "../format.js";

const PARTS = { training: "var(--training)", "waiting for a batch": "var(--waiting)", "publishing and other": "var(--ready)" };
const STAGES = { queue: "var(--bad)", generate: "var(--generating)", claim: "var(--waiting)", reset: "var(--resetting)", step: "var(--stepping)", score: "var(--scoring)", other: "var(--faint)" };

// What a run does, in the words of its kind. There is RL in the first alone.
const RL = { success: ["Held-out success", "Share of held-out episodes that succeed, with its 95% Wilson interval. The same episodes at every version, never trained."], results: "Before and after" };
const WORKS = {
  train: { ...RL, training: "RL" }, sft: { ...RL, training: "SFT" }, dpo: { ...RL, training: "DPO" },
  eval: { ...RL, results: "Success by task", training: "" },
  sample: { success: ["Success", ""], results: "Success by task", training: "" },
  imitation: { success: ["Success of evaluation episodes", "Share of the episodes of each evaluation that succeed, with its 95% Wilson interval. They begin otherwise than the demonstrations."], results: "First and last evaluation", training: "imitation" },
};
const workOf = (data) => (data.about.work in WORKS ? data.about.work : "train");

export function create(pane, { run }) {
  const head = el("div", { class: "head" }), stats = el("div", { class: "stats" });
  const success = lineChart({ label: "success", x: "version", format: (v) => percent(v), low: 0, high: 1, height: 220, empty: "no evaluation yet" });
  const reward = lineChart({ label: "training reward", x: "version", height: 220 });
  const spread = lineChart({ label: "spread within groups", x: "version", height: 170, low: 0 });
  const loss = lineChart({ label: "supervised loss", x: "step", height: 220, low: 0 });
  const time = lineChart({ label: "time of a step", x: "version", format: seconds, low: 0, height: 170 });
  const results = el("div"), films = el("div", { class: "films" }), pace = el("div"), feed = el("ul", { class: "feed" });
  const note = el("span", { class: "note" });
  let side = null;
  const cards = {
    success: card("Success", { width: "w6", tip: " " }, success.node),
    reward: card("Training reward", { width: "w6", tip: "Mean reward of the trajectories that ended between two steps, with the 95% interval of the mean." }, reward.node),
    loss: card("Supervised loss", { width: "w6", tip: "Mean loss of the tokens or actions that are imitated, by supervised step: of the warmup before RL, of SFT, or of imitation." }, loss.node),
    results: card("Results", { width: "w7" }, results),
    pace: card("What sets the pace", { width: "w5", tip: "Where the trainer's time went in the last 20 steps, and where trajectories spent theirs." }, pace),
    films: card("Episodes", { width: "w5", tip: "A held-out episode of each task, played by the trained policy: the first success, or the first episode." }, films),
    spread: card("Spread within groups", { width: "w4", tip: "Mean standard deviation of rewards within a group. A group without spread has no advantage and teaches nothing." }, spread.node),
    time: card("Time of a step", { width: "w4", tip: "Seconds that the trainer worked on each step, and waited for its batch before it." }, time.node),
  };
  pane.append(head, el("div", { class: "grid" }, stats, Object.values(cards),
    side = el("section", { class: "card w4" }, el("header", {}, el("h2", { tip: "Warnings, quarantines, restarts and results, newest first." }, "Feed"), note), feed)));

  function update(data) {
    const work = workOf(data), live = !data.state.ended && Boolean(data.about.name);
    const phase = data.phase === "finished" ? "good" : data.phase === "failed" ? "bad" : "live";
    head.replaceChildren(el("h1", {}, run), el("span", { class: `pill ${phase}` }, data.phase), el("span", { class: "sub" }, about(data)), ...data.emulated.map((text) => el("span", { class: "pill warn", tip: "The devices of this run are emulated or simulated: times are those of a model, not of hardware." }, text)));
    name(work, data);
    stats.replaceChildren(...[
      data.steps && el("div", { class: "stat", tip: "Optimizer steps done, of those that the run file asks for." }, el("span", { class: "label" }, "Step"), el("span", { class: "value" }, String(data.step), el("span", { class: "unit" }, `of ${data.steps}`)), el("div", { class: "progress" }, el("i", { style: { width: `${100 * data.step / Math.max(1, data.steps)}%` } }))),
      stat("Elapsed", clock(data.t), "", "Time since the run began, across resumes.", data.resumes ? `${data.resumes} resumes` : ""),
      data.steps && stat("Left", live && data.eta_s !== null ? clock(data.eta_s) : "–", "", "Steps that are left times the mean time between the last 20 steps."),
      work !== "imitation" && rate(data, "tokens_per_s", "Generation", "tokens/s", "Sampled tokens per second of all engines: over the last half minute while the run is live, else over all of RL."),
      work !== "imitation" && rate(data, "trajectories_per_s", "Trajectories", "1/s", "Trajectories that ended per second, held-out ones not counted."),
      work === "train" && stat("Trained", count(data.trained), "trajectories", "Trajectories in the batches of all steps.", `${count(data.tokens)} tokens`),
      work !== "imitation" && stat("Engines busy", data.state.complete ? percent(data.use.engine) : "–", "", "Share of the time that engines are inside a forward pass."),
      work === "train" && stat("Trainer busy", data.state.complete ? percent(data.use.trainer) : "–", "", "Share of the time that the trainer works on a step."),
      data.losses.length && work !== "train" && stat("Loss", trim(data.losses.at(-1)[1]), "", "Of the last supervised step that was reported, without unit.")].filter(Boolean));
    loss.set({ series: [{ name: "loss", colour: "var(--c0)", points: data.losses }] });
    success.set({ series: data.tasks.map((task, i) => ({ name: task.name, colour: colour(i), dots: true, points: task.held_out.map((p) => [p.version, p.success, ...wilson(p.success, p.episodes)]) })) });
    reward.set({ series: data.tasks.map((task, i) => ({ name: task.name, colour: colour(i), points: task.points.map((p) => [p.version, p.reward, p.reward - p.error, p.reward + p.error]) })) });
    spread.set({ series: data.tasks.map((task, i) => ({ name: task.name, colour: colour(i), points: task.points.filter((p) => p.spread !== null).map((p) => [p.version, p.spread]) })) });
    time.set({ series: [{ name: "training", colour: "var(--training)", points: data.steps_s.map(([v, s]) => [v, s]) }, { name: "waiting", colour: "var(--c7)", points: data.steps_s.map(([v, , w]) => [v, w]) }] });
    results.replaceChildren(data.tasks.length ? table(columnsOf(work), data.tasks, { label: "results by task" }) : empty("No tasks yet"));
    drawPace(data.pace);
    drawFilms(data.videos);
    note.textContent = data.lost_environments ? `${data.lost_environments} environments were killed and replaced` : "";
    feed.replaceChildren(...(data.feed.length ? data.feed.slice(0, 100).map((each) => el("li", {}, el("i", { class: `dot ${each.level}` }), el("time", {}, clock(each.t)), el("span", { class: "text" }, each.text))) : [el("li", { class: "note" }, "nothing to report")]));
  }

  // Titles, and what of the page this kind of run has.
  function name(work, data) {
    const { success: [title, tip], results: heading } = WORKS[work], has = (box, shown) => { cards[box].hidden = !shown; };
    const [above] = cards.success.getElementsByTagName("h2");
    above.textContent = title; above.dataset.tip = tip;
    cards.results.getElementsByTagName("h2")[0].textContent = heading;
    const rl = work === "train", steps = rl || data.steps_s.length > 0;
    has("films", data.videos.length > 0);
    has("success", work !== "sample" && work !== "eval"); has("reward", rl); has("spread", rl); has("time", steps); has("pace", steps);
    has("loss", data.losses.length > 0 && !data.steps_s.length); // of the warmup only while it lasts
    side.className = `card ${steps ? "w4" : "w5"}`;
  }

  function drawPace(found) {
    pace.replaceChildren(...(found.parts.length ? [
      el("p", { class: "note" }, found.text),
      stack(found.parts.map((part) => ({ ...part, colour: PARTS[part.name] }))),
      el("p", { class: "note" }, "Where trajectories spend their time"),
      bars(found.causes.filter((cause) => cause.share > 0.004).map((cause) => ({ name: cause.name, value: cause.share, text: percent(cause.share), colour: STAGES[cause.stage], tip: cause.hint })), 1),
    ] : [empty("Not known yet", found.text)]));
  }

  // A film that is there already goes on where it is.
  function drawFilms(videos) {
    const key = JSON.stringify(videos);
    if (films.dataset.key === key) return;
    films.dataset.key = key;
    const address = ({ name, changed }) => `/api/video?${new URLSearchParams({ run, name, changed })}`;
    const mp4s = new Map(videos.filter(({ name }) => name.endsWith(".mp4")).map((video) => [stem(video), address(video)]));
    const shown = videos.filter(({ name }) => name.endsWith(".gif"));
    films.replaceChildren(...shown.map((video) => el("figure", {},
      el("img", { src: address(video), alt: `an episode of ${stem(video)}` }),
      el("figcaption", {}, stem(video), mp4s.has(stem(video)) && [" ", el("a", { href: mp4s.get(stem(video)), download: `${stem(video)}.mp4` }, "MP4")]))));
  }
  return { update };
}

const stem = ({ name }) => name.replace(/\.[^.]+$/, "");

function about(data) {
  const a = data.about;
  const packages = Object.entries(a.packages || {}).map(([name, version]) => `${name} ${version}`).join(", ");
  return el("span", { tip: [packages, a.digest && `run file ${a.digest}`, a.commit && `commit ${a.commit}`, a.model && `model ${a.model}`].filter(Boolean).join("\n") || "This run's log does not say what it was made with." }, `${workOf(data) === "train" ? `preset ${data.preset}, alpha ${data.alpha}` : workOf(data)}, seed ${a.seed ?? "–"}${a.wall ? `, started ${new Date(a.wall * 1000).toLocaleString()}` : ""}`);
}

function rate(data, name, label, unit, tip) {
  const [recent, overall] = data.rates[name] || [null, null];
  return stat(label, data.state.complete ? count(data.state.ended ? overall : recent ?? overall) : "–", unit, tip);
}

const interval = (point) => { if (!point) return "–"; const [low, high] = wilson(point.success, point.episodes); return `${percent(point.success, 1)} ± ${((high - low) * 50).toFixed(1)}`; };
function columnsOf(work) {
  const { training } = WORKS[work], half = "with half its 95% interval in percentage points";
  if (work === "sample") return [NAME, { name: "success", num: true, tip: `Share of the sampled trajectories that succeed, ${half}.`, value: (task) => interval(task.now) }, PASSED, ...MEANS];
  if (work === "eval") return [NAME, { name: "success", num: true, tip: `Share of the held-out episodes that succeed, ${half}.`, value: (task) => interval(task.now) }, PASSED, EPISODES];
  if (work === "imitation") return [NAME, { name: "first", num: true, tip: `Success at the first evaluation, ${half}.`, value: (task) => interval(task.before) }, { name: "last", num: true, tip: "Success at the newest evaluation.", value: (task) => interval(task.now) }, FAILURES, EPISODES];
  return [NAME, { name: "before", num: true, tip: `Held-out success before ${training}, ${half}.`, value: (task) => interval(task.before) }, { name: "now", num: true, tip: "Held-out success of the newest evaluation.", value: (task) => interval(task.now) }, FAILURES, ...MEANS];
}
const NAME = { name: "task", value: (task) => task.name };
const EPISODES = { name: "episodes", num: true, tip: "Episodes of the newest evaluation.", value: (task) => (task.now ? count(task.now.episodes) : "–") };
const PASSED = { name: "pass@k", num: true, tip: "Share of the episodes with an attempt that succeeded; k is the number of attempts at each.", value: (task) => (task.now?.passed === null || task.now?.passed === undefined ? "–" : percent(task.now.passed, 1)) };
const FAILURES = { name: "failures", num: true, tip: "Failures now over failures before: 0.5 means halved.", value: (task) => (task.failure_ratio === null ? "–" : `×${trim(task.failure_ratio, 2)}`) };
const MEANS = [
  { name: "reward", num: true, tip: "Mean reward of the last 128 trainable trajectories.", value: (task) => trim(task.reward) },
  { name: "turns", num: true, tip: "Mean turns of a trajectory.", value: (task) => trim(task.turns, 2) },
  { name: "tokens", num: true, tip: "Mean tokens of a trajectory, prompts included.", value: (task) => count(task.tokens) },
  { name: "time", num: true, tip: "Mean time of a trajectory, from its start to its reward.", value: (task) => seconds(task.seconds) },
];
