// One trajectory: the conversation as the model saw it, every sampled token, and its neighbours.

import { get } from "./api.js";
import { bars } from "./chart.js";
import { card, el, empty, stat, table } from "./dom.js";
import { count, percent, seconds, trim } from "./format.js";

const MODES = {
  logprob: "How sure the engine was: pale for likely tokens, strong for surprising ones.",
  version: "The policy version that sampled each token: a change of colour is a swap of weights in between.",
  gap: "Mean distance between the logprobs of engine and trainer for this task's tokens of the same age. The log has no gap of single tokens.",
  none: "Plain text.",
};

export function createReader(pane, { run, query, go }) {
  const id = query.open;
  let mode = "logprob", data = null;
  const chat = el("div", { class: "chat" }), facts = el("div", { class: "stats" }), others = el("div"), parts = el("div"), title = el("h1", { class: "mono" }, id), sub = el("span", { class: "sub" });
  const choose = el("span", { class: "row" }, Object.entries(MODES).map(([name, tip]) => el("button", { type: "button", tip, "data-mode": name, "aria-pressed": String(name === mode), onclick: () => { mode = name; draw(); } }, name)));
  const side = card("Group", { width: "w4 beside" }, others);
  pane.append(el("div", { class: "head" }, el("a", { href: `#/trajectories/${encodeURIComponent(run)}` }, "← all"), title, sub), el("div", { class: "grid" }, facts,
    el("section", { class: "card w8" }, el("header", {}, el("h2", { tip: "Messages as they were given to the model; actions token by token." }, "Conversation"), el("span", { class: "right row" }, el("span", { class: "note" }, "colour by"), choose)), chat), side));

  function draw() {
    for (const button of choose.children) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    if (!data) return;
    chat.replaceChildren(...(data.turns?.length ? data.turns.map(turn) : [empty("No conversation", data.note || "This trajectory has no turns.")]));
    if (data.log_only && data.steps.length) chat.append(table(STEPS, data.steps, { label: "turns" }));
  }

  function turn(each) {
    const messages = each.messages.map((message) => el("div", { class: `msg ${message.role}` }, el("div", { class: "role" }, message.role), el("pre", { dir: "auto" }, message.text || "(empty)")));
    const action = el("pre", { dir: "auto" });
    if (each.pieces && mode !== "none") action.append(...each.pieces.map((piece, i) => token(each, piece, i)));
    else action.textContent = each.action || "(empty)";
    if (each.reasoning && (!each.pieces || mode === "none")) messages.push(el("div", { class: "msg assistant" }, el("div", { class: "role" }, "reasoning"), el("pre", { dir: "auto" }, each.reasoning)));
    if (each.pieces && each.token_count > each.pieces.length) action.append(` … ${count(each.token_count - each.pieces.length)} more tokens`);
    return el("div", { class: "turn chat" }, messages, el("div", { class: "msg assistant" }, el("div", { class: "role" }, `assistant · turn ${each.turn + 1}`), action), notes(each));
  }

  function token(each, piece, i) {
    const logprob = each.logprobs[i], version = each.versions[i];
    const newest = data.about?.age === null || data.about?.age === undefined ? version : data.about.version + data.about.age;
    const gap = data.gaps[newest - version];
    const tip = `${JSON.stringify(piece)}\nprobability ${percent(Math.exp(logprob), 1)} (logprob ${trim(logprob)})\nversion ${version}${gap === undefined ? "" : `\nmean gap at this age ${trim(gap)}`}`;
    return el("span", { class: "tok", title: tip, style: { background: shade(logprob, version, gap) } }, piece);
  }

  function shade(logprob, version, gap) {
    if (mode === "logprob") return `color-mix(in srgb, var(--bad) ${Math.min(70, Math.round(-logprob * 22))}%, transparent)`;
    if (mode === "version") return `color-mix(in srgb, var(--c${version % 8}) 30%, transparent)`;
    return `color-mix(in srgb, var(--c6) ${Math.min(75, Math.round((gap || 0) * 2000))}%, transparent)`;
  }

  function notes(each) {
    const e = each.event, low = Math.min(...each.versions), high = Math.max(...each.versions);
    const list = [`${each.token_count} tokens`, `${each.prompt_count} new prompt tokens`, each.versions.length ? (low === high ? `version ${low}` : `versions ${low} to ${high}`) : null, each.finish !== "stop" ? `ended by ${each.finish}` : null, `generated in ${seconds(each.generate_s)}`, e && e.queue_s > 0 ? `queued ${seconds(e.queue_s)}` : null, e ? `${count(e.cached)} of ${count(e.prompt)} prompt tokens cached` : null, each.env_s ? `environment ${seconds(each.env_s)}` : null, each.reward !== null ? `reward ${trim(each.reward)}` : null];
    return el("div", { class: "note" }, list.filter(Boolean).join(" · "), e ? el("div", { tip: "The engine that the router chose, and its reason." }, `${e.engine}${e.why ? `: ${e.why}` : ""}${e.predicted_s ? `, predicted ${seconds(e.predicted_s)}` : ""}`) : null);
  }

  function update(found) {
    data = found;
    sub.textContent = `${found.task}${found.seed !== undefined ? ` · seed ${found.seed}` : ""}${found.held_out ? " · held out, never trained" : ""}`;
    facts.replaceChildren(...[
      stat("Outcome", found.outcome, "", "How it ended; only finished and truncated ones are trained.", found.reason),
      stat("Reward", trim(found.reward), "", "The reward that is trained on, without unit.", found.success === null ? "" : found.success ? "✓ success" : "✗ no success"),
      stat("Turns", count(found.turns?.length ?? found.turns), "", "Actions of the policy."),
      stat("Tokens", count(found.total_tokens ?? found.tokens), "", "Tokens of prompts and actions.", found.action_tokens ? `${count(found.action_tokens)} sampled` : ""),
      stat("Time", seconds(found.seconds), "", "From its start to its reward."),
      found.about?.age !== null && found.about?.age !== undefined ? stat("Age", String(found.about.age), "versions", "Versions between its start and the step that trained it.") : null].filter(Boolean));
    parts.replaceChildren(...(Object.keys(found.parts || {}).length ? [el("p", { class: "note" }, "Parts of the reward"), bars(Object.entries(found.parts).map(([name, value]) => ({ name, value: Math.abs(value), text: trim(value) })))] : []));
    side.querySelector("h2").textContent = found.held_out ? "The same episode at other versions" : "Its group, side by side";
    others.replaceChildren(parts, ...(found.others?.length ? found.others.map((each) => other(each, found)) : [empty("No others", found.note)]));
    draw();
  }

  function other(each, found) {
    const here = each.id === found.id;
    return el("div", { class: "turn" }, el("div", { class: "row" }, here ? el("b", {}, found.held_out ? `version ${each.version}` : `member ${each.member}`) : el("a", { href: `#/trajectories/${encodeURIComponent(run)}?open=${encodeURIComponent(each.id)}` }, found.held_out ? `version ${each.version}` : `member ${each.member}`), el("span", { class: `pill ${each.success ? "good" : each.success === false ? "bad" : ""}` }, `reward ${trim(each.reward)}`), el("span", { class: "note" }, `${each.turns} turns · ${count(each.tokens)} tokens · ${each.outcome}`)), el("pre", { class: "mono note", dir: "auto", style: { whiteSpace: "pre-wrap", margin: "4px 0 8px", maxHeight: "84px", overflow: "hidden", overflowWrap: "anywhere" } }, each.actions.join(" ⏎ ") || "(nothing)"));
  }
  let done = false;
  return {
    // It does not change any more once it has ended and the log is read, which has its engines and times.
    load: async () => { if (!done) { const found = await get("/api/trajectory", { run, id }); done = found.outcome !== "running" && found.state.complete; data = found; } return data; },
    update: (found) => { if (found !== update.last) { update.last = found; update(found); } },
  };
}

const STEPS = [
  { name: "turn", num: true, value: (s) => String(s.turn + 1) }, { name: "engine", value: (s) => s.engine },
  { name: "prompt", num: true, tip: "Tokens of its context.", value: (s) => count(s.prompt) }, { name: "cached", num: true, tip: "Of these, tokens that needed no prefill.", value: (s) => count(s.cached) },
  { name: "queue", num: true, tip: "Time in the engine's queue.", value: (s) => seconds(s.queue_s) }, { name: "decode", num: true, tip: "Time to sample the action.", value: (s) => seconds(s.decode_s) }, { name: "why", wrap: true, tip: "Why the router chose this engine.", value: (s) => s.why },
];
