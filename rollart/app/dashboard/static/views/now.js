// Where every trajectory is at this moment, and how full the engines are.

import { card, el, empty, stat, swatch, table } from "../dom.js";
import { bytes, clock, count, percent, seconds } from "../format.js";
import { createLanes } from "../lanes.js";

const MEANING = {
  waiting: "waits for an environment or a slot", resetting: "its environment is being reset", generating: "an engine samples its next action, or it waits in the engine's queue",
  stepping: "its environment or agent works", scoring: "its reward is computed", ready: "complete; waits until its group and batch are", training: "in the batch that the trainer works on",
};

const GROUPS = { task: ["tasks", "A lane for each task."], pool: ["pools", "A lane for each pool of engines: the one that answers a trajectory, or answered it last."], both: ["tasks and pools", "A lane for each task in each pool."] };
const MOST_LANES = 16, MOST_ENGINES = 16; // that are shown without being asked for

export function create(pane, { run, go, query }) {
  const canvas = el("canvas", { role: "img", tabindex: 0, "aria-label": "trajectories by phase" });
  const note = el("span", { class: "note" }), stats = el("div", { class: "stats" }), engines = el("div"), hosts = el("div"), hover = el("div", { class: "note" }, "Point at a square to see its trajectory; click to read it.");
  const lanes = createLanes(canvas, { onPick: (row) => go("trajectories", { open: row[0] }), onHover: describe });
  let names = {}, now = 0, by = query.lanes in GROUPS ? query.lanes : "";
  const choose = el("span", { class: "row" }, el("span", { class: "note" }, "lanes:"), Object.entries(GROUPS).map(([name, [text, tip]]) => el("button", { type: "button", tip, "data-by": name, onclick: () => { by = name; last && update(last); } }, text)));
  const keys = el("div", { class: "keys" }, Object.entries(MEANING).map(([name, tip]) => el("span", { tip }, swatch(`var(--${name})`), name)));
  const nothing = el("div"), pools = el("div"), more = el("button", { type: "button", onclick: () => { every = !every; last && update(last); } });
  let every = false, last = null;
  pane.append(el("div", { class: "head" }, el("h1", {}, "Now"), note), el("div", { class: "grid" }, stats,
    card("Trajectories by phase", { tip: "One square is one trajectory. Rows are tasks and the pools of engines that answer them, columns are phases; in each cell, the one that has been there longest comes first.", right: choose }, keys, nothing, canvas, hover),
    card("Engines", { width: "w8", tip: "Batches, queues and KV cache at the last sample of each engine; many engines are added up by pool." }, pools, engines, more), card("Machines", { width: "w4", tip: "The last sample of each machine that reports one." }, hosts)));

  // Until somebody chooses: by pool as well, where there are several and the lanes stay readable.
  function group() {
    const pools = names.pools?.length || 0, chosen = by || (pools > 1 && (pools + 1) * names.tasks.length <= MOST_LANES ? "both" : "task");
    lanes.group(chosen);
    for (const button of choose.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.by === chosen));
  }

  function describe(row) {
    if (!row) { hover.textContent = "Point at a square to see its trajectory; click to read it."; return; }
    const [id, task, phase, pool, since, version, turn, heldOut] = row;
    hover.textContent = `${id} · ${names.tasks[task]} · ${names.phases[phase]} for ${seconds(Math.max(0, now - since))} · turn ${turn + 1} · version ${version}${pool >= 0 ? ` · pool ${names.pools[pool] || "default"}` : ""}${heldOut ? " · held out" : ""}`;
  }

  function drawEngines(data) {
    const many = data.engines.length > MOST_ENGINES, shown = every || !many ? data.engines : [];
    pools.replaceChildren(...(many ? [table(POOLS, inPools(data.engines), { label: "pools of engines" })] : []));
    engines.replaceChildren(...(shown.length ? [table(ENGINES, shown, { label: "engines" })] : data.engines.length ? [] : [empty("No engine has reported yet")]));
    more.hidden = !many; more.textContent = every ? "hide single engines" : `show all ${data.engines.length} engines`;
  }

  function update(data) {
    last = data;
    names = data.lanes; now = data.t;
    group();
    const p = data.pipeline, total = lanes.size;
    const sum = (phase) => Object.values(data.counts).reduce((all, each) => all + (each[phase] || 0), 0);
    note.textContent = data.state.ended ? `the run ended at ${clock(data.t)}: ${data.state.phase}` : `${clock(data.t)} into the run, version ${data.state.step}`;
    nothing.replaceChildren(...(total ? [] : [empty(data.state.ended ? "The run has ended" : "No trajectory is under way", data.state.ended ? "Its trajectories are in the view Trajectories." : "They appear here as soon as rollout begins.")]));
    canvas.hidden = !total; hover.hidden = !total;
    canvas.setAttribute("aria-label", `${total} trajectories: ${names.phases.map((name) => `${sum(name)} ${name}`).join(", ")}; lanes: ${lanes.names().join(", ")}`);
    stats.replaceChildren(...[
      stat("Under way", count(total), "trajectories", "Trajectories that have started and are not trained or dropped yet."),
      stat("In engines", count(data.engines.reduce((all, e) => all + e.running, 0)), "requests", "Requests in the running batches of all engines.", `${count(data.engines.reduce((all, e) => all + e.waiting, 0))} queued`),
      stat("Environments", p ? count(p.environments) : "–", p ? `of ${count(p.processes)}` : "", "Environment processes in use, of those that may run at once."),
      stat("Ready", p ? count(p.ready) : "–", "trajectories", "Complete trajectories that wait for their group or batch."),
      data.gateway ? stat("Gateway", count(data.gateway.sessions), "episodes", "Episodes of agents that are open at the gateway.", `${count(data.gateway.requests)} requests in flight`) : null].filter(Boolean));
    drawEngines(data);
    hosts.replaceChildren(data.hosts.length ? table(data.hosts.some((host) => host.gpus.length) ? HOSTS : HOSTS.slice(0, 3), data.hosts, { label: "machines" }) : empty("No sample of a machine", "Runs report theirs every few seconds; simulated ones have none."));
  }
  return { receive: (patch) => patch.lanes && lanes.set(patch.lanes), update, destroy: () => lanes.destroy() };
}

function meter(used, reserved, budget) {
  return el("span", { class: "meter" }, el("i", { class: "light", style: { width: percent(Math.min(1, reserved / budget)) } }), el("i", { style: { width: percent(Math.min(1, used / budget)) } }));
}

const total = (rows, value) => rows.reduce((sum, row) => sum + (value(row) || 0), 0);
function inPools(engines) {
  return [...Map.groupBy(engines, (engine) => engine.pool)].map(([pool, rows]) => {
    const versions = rows.map((row) => row.version);
    return { pool, engines: rows.length, running: total(rows, (e) => e.running), waiting: total(rows, (e) => e.waiting), kv_bytes: total(rows, (e) => e.kv_bytes), kv_reserved: total(rows, (e) => e.kv_reserved), kv_budget: total(rows, (e) => e.kv_budget), busy: total(rows, recent) / rows.length, oldest: Math.min(...versions), newest: Math.max(...versions), generated: total(rows, (e) => e.generated) };
  });
}

const recent = (engine) => engine.history.at(-1)?.[1];
const LOAD = [
  { name: "batch", num: true, tip: "Requests in running batches.", value: (e) => count(e.running) },
  { name: "queue", num: true, tip: "Requests that wait for a place in a batch.", value: (e) => count(e.waiting) },
  { name: "KV cache", tip: "Attention state in use; in light, what running and queued requests need at their maximum length; the whole bar is the budget.", value: (e) => (e.kv_budget ? el("span", { tip: `${bytes(e.kv_bytes)} in use, ${bytes(e.kv_reserved)} reserved, of ${bytes(e.kv_budget)}` }, meter(e.kv_bytes, e.kv_reserved, e.kv_budget), ` ${percent(e.kv_bytes / e.kv_budget)}`) : bytes(e.kv_bytes)) },
];
const POOLS = [
  { name: "pool", value: (p) => p.pool || "default" }, { name: "engines", num: true, tip: "Engines of the pool that have reported.", value: (p) => count(p.engines) }, ...LOAD,
  { name: "busy", num: true, tip: "Mean share of the last sample's time inside forward passes.", value: (p) => percent(p.busy) },
  { name: "version", num: true, tip: "Policy versions of their weights, oldest and newest.", value: (p) => (p.oldest === p.newest ? String(p.newest) : `${p.oldest} to ${p.newest}`) },
  { name: "generated", num: true, tip: "Tokens sampled since their start.", value: (p) => count(p.generated) },
];
const ENGINES = [
  { name: "engine", value: (e) => e.engine }, { name: "pool", tip: "The pool that it belongs to.", value: (e) => e.pool || "default" }, ...LOAD,
  { name: "busy", num: true, tip: "Share of the last sample's time inside forward passes.", value: (e) => percent(recent(e)) },
  { name: "version", num: true, tip: "Policy version of its weights.", value: (e) => String(e.version) },
  { name: "swaps", num: true, tip: "Times that it replaced its weights.", value: (e) => count(e.swaps) },
  { name: "generated", num: true, tip: "Tokens sampled since its start.", value: (e) => count(e.generated) },
];
const HOSTS = [
  { name: "machine", value: (h) => h.node },
  { name: "CPU", num: true, tip: "Share of all cores that is busy, with whatever else runs there.", value: (h) => `${percent(h.cpu)} of ${h.cores}` },
  { name: "memory", num: true, tip: "Memory in use, of all.", value: (h) => `${bytes(h.memory)} of ${bytes(h.memory_total)}` },
  { name: "GPUs", num: true, tip: "Share busy and memory in use of each GPU.", value: (h) => h.gpus.map(([busy, used]) => `${percent(busy)} ${bytes(used)}`).join(", ") || "–" },
];
