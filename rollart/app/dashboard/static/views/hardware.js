// Where everything runs, how busy it is, where requests go, how weights travel, and what it costs.

import { bars } from "../chart.js";
import { card, el, empty, stat, swatch, table } from "../dom.js";
import { bytes, count, percent, seconds, trim } from "../format.js";

const ROLES = { generate: "var(--generating)", train: "var(--training)", environment: "var(--stepping)", reward: "var(--scoring)", gateway: "var(--ready)" };

export function create(pane, { run }) {
  const stats = el("div", { class: "stats" }), map = el("div", { class: "racks" }), routes = el("div"), tree = el("div", { class: "tree" }), swaps = el("div"), rewards = el("div"), envs = el("div"), idle = el("div");
  const busy = el("div");
  pane.append(el("div", { class: "head" }, el("h1", {}, "Hardware")), el("div", { class: "grid" }, stats,
    card("Placement", { tip: "Each worker on its node: the device class that it got, and in the tooltip what its pool wanted and why." }, map),
    card("Engines busy", { width: "w7", tip: "Share of the time inside forward passes, by engine, over its last samples: pale is idle, strong is busy." }, busy),
    card("Use and idle causes", { width: "w5", tip: "Over all of RL. What trajectories wait for is what keeps engines idle or full." }, idle),
    card("Routing: task by pool", { tip: "Requests that each pool answered, the router's prediction and what they took." }, routes),
    card("Weights: the last version", { width: "w5", tip: "The tree by which it spread: from the trainer to the first hosts, and from each of them to the next. An engine is below the one that most of its bytes came from, or in whose host's memory it found them; the time is from publication to swap." }, tree),
    card("Weights: mean swap", { width: "w7", tip: "What a new version costs each engine, over all of its swaps." }, swaps), card("Rewards", { tip: "Calls of reward functions, by function and invoker." }, rewards), card("Environments", { tip: "Resets of environments, by task." }, envs)));

  function update(data) {
    stats.replaceChildren(
      stat("Workers", count(data.places.length), "", "Processes that placement put on a node."),
      stat("Engines", percent(data.use.engine), "busy", "Share of RL that engines were inside a forward pass."),
      stat("Trainer", percent(data.use.trainer), "busy", "Share of RL that the trainer worked on a step."),
      stat("Environments", percent(data.use.environments), "in use", "Mean share of the environment processes that were in use."),
      stat("Price", data.price_per_hour ? trim(data.price_per_hour) : "–", "per hour", "Sum of the device classes' prices; one H20 is 1. CPUs have none."),
      stat("Cost", data.cost_per_step ? trim(data.cost_per_step) : "–", "per step", "Price per hour times the mean time between the last steps; one H20 for an hour is 1."));
    drawMap(data);
    busy.replaceChildren(data.engines.length ? heat(data.engines) : empty("No engine has reported yet"));
    const causes = data.pace.causes.filter((cause) => cause.share > 0.004);
    idle.replaceChildren(causes.length ? bars(causes.map((cause) => ({ name: cause.name, value: cause.share, text: percent(cause.share), tip: cause.hint, colour: "var(--c0)" })), 1) : empty("Not known yet", data.pace.text));
    routes.replaceChildren(data.routes.length ? table(ROUTES, data.routes, { label: "routing" }) : empty("No request yet"));
    drawTree(data);
    swaps.replaceChildren(...[data.swaps.length ? [table(SWAPS, data.swaps.slice(0, 10), { label: "swaps" }), data.swaps.length > 10 ? el("p", { class: "note" }, `and ${data.swaps.length - 10} more engines`) : ""] : empty("No swap yet")].flat());
    rewards.replaceChildren(data.rewards.length ? table(REWARDS, data.rewards, { label: "rewards" }) : empty("No reward function was called", "Environments score their own episodes."));
    envs.replaceChildren(data.environments.length ? table(ENVS, data.environments, { label: "environments" }) : empty("No environment yet"));
  }

  function drawMap(data) {
    const nodes = new Map();
    for (const place of data.places) { const name = place.node || (data.emulated.length ? "simulated" : "this machine"); (nodes.get(name) || nodes.set(name, []).get(name)).push(place); }
    const services = new Map(data.services.map((service) => [service.name, service]));
    const tipOf = (place) => { const service = services.get(place.name); return `${place.name}\n${place.role} of pool ${place.pool}\nwanted ${place.wanted}, got ${place.device}\n${place.why}${service ? `\nprocess ${service.pid}${service.address ? ` at ${service.address}` : ""}, started in ${seconds(service.seconds)}` : ""}`; };
    const paint = (place) => swatch(ROLES[place.role] || "var(--faint)");
    const worker = (place) => el("div", { class: "worker", tip: tipOf(place) }, paint(place), el("span", { class: "name" }, place.name), el("span", { class: "pill" }, place.device));
    const pool = (name, members) => el("div", { class: "pool" }, el("span", {}, `${name}: ${members.length} × ${members[0].device}`), el("div", { class: "squares" }, members.slice(0, 1024).map((place) => el("span", { tip: tipOf(place) }, paint(place)))), members.length > 1024 ? el("span", { class: "note" }, `and ${members.length - 1024} more`) : null);
    const rack = (node, places) => {
      const pools = Map.groupBy(places, (place) => `${place.pool || place.role}, ${place.role}`), many = [...pools].filter(([, members]) => members.length > 12);
      const few = [...pools.values()].filter((members) => members.length <= 12).flat();
      return el("div", { class: "rack" }, el("b", {}, node), many.map(([name, members]) => pool(name, members)), few.length ? el("div", { class: "workers" }, few.map(worker)) : null);
    };
    map.replaceChildren(...(nodes.size ? [...nodes].map(([node, places]) => rack(node, places)) : [empty("Nothing is placed yet")]));
  }

  function drawTree(data) {
    const { published, engines } = data.fan_out, all = [];
    if (!published) { tree.replaceChildren(empty("No version is published yet")); return; }
    (function collect(rows) { for (const row of rows) { all.push(row); collect(row.below); } })(engines);
    const worst = Math.max(...all.map((row) => row.after_s), 1e-9), relayed = all.filter((row) => row.hops.some((hop) => hop.engine)).length;
    const many = (n) => `${n} ${n === 1 ? "engine" : "engines"}`, here = data.emulated.length ? "simulated" : "this machine";
    const box = (row) => el("div", { class: "node", tip: wayOf(row) }, el("b", {}, row.engine), `${row.node || here} · after ${seconds(row.after_s)}`, el("div", { class: "progress" }, el("i", { style: { width: percent(row.after_s / worst) } })));
    const crowd = (rows) => [...Map.groupBy(rows, (row) => row.node || here)].map(([node, own]) => el("div", { class: "pool" }, el("span", { class: "note" }, `${node}: ${many(own.length)}, after ${seconds(Math.min(...own.map((row) => row.after_s)))} to ${seconds(Math.max(...own.map((row) => row.after_s)))}`), el("div", { class: "squares" }, own.slice(0, 1024).map((row) => el("span", { tip: wayOf(row) }, swatch(`color-mix(in srgb, var(--generating) ${Math.round(25 + 75 * row.after_s / worst)}%, transparent)`))))));
    // Engines without anything below them stand side by side, the others each with its branch.
    const level = (rows) => {
      const leaves = rows.filter((row) => !row.below.length), relays = rows.filter((row) => row.below.length);
      return el("div", { class: "branch" }, relays.slice(0, 16).map((row) => [el("div", { class: "nodes" }, box(row), el("span", { class: "note" }, edge(row))), level(row.below)]),
        relays.length > 16 ? el("div", { class: "note" }, `and ${relays.length - 16} more relays`) : null, leaves.length > 12 ? crowd(leaves) : leaves.length ? el("div", { class: "nodes" }, leaves.map(box)) : null);
    };
    tree.replaceChildren(
      el("div", { class: "nodes" }, el("div", { class: "node", tip: "The trainer wrote the version to its weight store, which serves it to the first hosts." }, el("b", {}, `version ${published.version}`), `published in ${seconds(published.seconds)}${published.bytes ? `, ${bytes(published.bytes)}` : ""}`)),
      el("div", { class: "note" }, `↓ ${all.length < data.swapping ? `${all.length} of ` : ""}${many(data.swapping)} swapped to it${relayed ? `, ${relayed} by way of a relay` : ""}`), all.length ? level(engines) : "");
  }
  return { update };
}

// What came over the last edge to an engine, and how long it took.
function edge(row) {
  const size = row.hops.reduce((sum, hop) => sum + hop.bytes, 0);
  return row.hops.length ? `${bytes(size)} in ${seconds(Math.max(...row.hops.map((hop) => hop.seconds)))}, then relays it` : "in the memory of its host";
}
function wayOf(row) {
  const hops = row.hops.map((hop) => `${bytes(hop.bytes)} from ${hop.engine || "the publisher"} (${hop.source}), all there after ${seconds(hop.seconds)}`);
  return [`${row.engine}: ${row.transport || "memory"}`, ...(hops.length ? hops : ["found in the memory of its host"]), `${seconds(row.transfer_s)} to fetch and check, ${seconds(row.exposed_s)} without steps`, `${count(row.recomputed)} tokens of KV recomputed`].join("\n");
}

// A row for each engine, a cell for each sample: many engines at once, which lines cannot show.
function heat(all) {
  const engines = all.slice(0, 16);
  const rows = engines.map((engine) => {
    const cells = engine.history.slice(-60);
    return [el("span", { class: "note" }, engine.engine), el("span", { class: "heat", tip: `${engine.engine}: ${percent(cells.reduce((sum, cell) => sum + cell[1], 0) / Math.max(1, cells.length))} busy from ${seconds(cells[0]?.[0])} to ${seconds(cells.at(-1)?.[0])}` }, cells.map(([, share]) => el("i", { style: { opacity: 0.08 + 0.92 * share } })))];
  });
  return el("div", {}, el("div", { class: "heats" }, rows), all.length > engines.length ? el("p", { class: "note" }, `and ${all.length - engines.length} more engines`) : null);
}

const why = (route) => Object.entries(route.why).map(([text, n]) => `${count(n)}× ${text || "the only one"}`).slice(0, 8).join("\n");
const ROUTES = [
  { name: "task", value: (r) => r.task }, { name: "pool", value: (r) => el("span", { tip: why(r) }, r.pool || "default") },
  { name: "requests", num: true, value: (r) => count(r.requests), tip: "Turns that this pool generated." },
  { name: "prefilled", num: true, value: (r) => count(r.prefilled), tip: "Prompt tokens that were computed." }, { name: "cached", num: true, value: (r) => percent(r.cached / Math.max(1, r.prefilled + r.cached)), tip: "Share of prompt tokens whose KV was cached." },
  { name: "decoded", num: true, value: (r) => count(r.decoded), tip: "Tokens sampled." }, { name: "predicted", num: true, value: (r) => seconds(r.predicted_s), tip: "Mean time of a request, as the router predicted it." },
  { name: "actual", num: true, value: (r) => seconds(r.actual_s), tip: "Mean time of a request, queue included." }, { name: "off by", num: true, value: (r) => (r.predicted_s ? `×${trim(r.actual_s / r.predicted_s, 2)}` : "–"), tip: "Actual over predicted." },
];
const SWAPS = [
  { name: "engine", value: (s) => s.engine }, { name: "transport", value: (s) => s.transport || "memory" }, { name: "swaps", num: true, value: (s) => count(s.number), tip: "Swaps so far." },
  { name: "size", num: true, value: (s) => bytes(s.bytes), tip: "Bytes of a swap." }, { name: "fetch", num: true, value: (s) => seconds(s.transfer_s), tip: "Time to fetch and check, while generation goes on." }, { name: "exposed", num: true, value: (s) => seconds(s.exposed_s), tip: "Time in which no step could run." },
  { name: "recomputed", num: true, value: (s) => `${count(s.recomputed)} tokens`, tip: "KV of running requests that was computed again." },
];
const REWARDS = [
  { name: "function", wrap: true, value: (r) => r.function }, { name: "invoker", value: (r) => r.invoker }, { name: "calls", num: true, value: (r) => count(r.calls), tip: "Scores, failed ones included." },
  { name: "p50", num: true, value: (r) => seconds(r.call_s.p50), tip: "Half of the calls took at most this." }, { name: "p99", num: true, value: (r) => seconds(r.call_s.p99), tip: "99% of the calls took at most this." },
  { name: "cold", num: true, value: (r) => count(r.cold), tip: "Calls whose function had to start first." }, { name: "failed", num: true, value: (r) => count(r.failed), tip: "Calls that gave no score." }, { name: "billed", num: true, value: (r) => seconds(r.billed_s), tip: "What its platform charges for." },
];
const ENVS = [
  { name: "task", value: (e) => e.task }, { name: "resets", num: true, value: (e) => count(e.resets), tip: "Episodes that began." }, { name: "p50", num: true, value: (e) => seconds(e.reset_s.p50), tip: "Half of the resets took at most this." }, { name: "p99", num: true, value: (e) => seconds(e.reset_s.p99), tip: "99% of the resets took at most this." },
  { name: "hedged", num: true, value: (e) => `${count(e.hedged)}, ${count(e.won)} won`, tip: "Slow resets that got a second one in parallel, and those where the second was faster." }, { name: "killed", num: true, value: (e) => count(e.killed), tip: "Processes that failed or hung in a call." }, { name: "quarantined", num: true, value: (e) => count(e.quarantined), tip: "Times that the task left the mixture." },
];
