// When everything happened, from a day to a millisecond.

import { get } from "../api.js";
import { card, el, swatch } from "../dom.js";
import { clock, seconds } from "../format.js";
import { createTimeline } from "../timeline.js";

const KEYS = [["resetting", "environment reset"], ["generating", "generation, queue included"], ["stepping", "environment step"], ["scoring", "reward"]];

export function create(pane, { run, go, refresh }) {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "timeline; plus and minus zoom, arrows move, 0 shows all" });
  const hover = el("span", { class: "note" }, "Wheel zooms, drag moves, shift and drag zooms to what is selected; keys: w s or + − zoom, a d or ← → move, 0 shows all. Click a trajectory to read it."), note = el("span", { class: "sub" });
  let typing = null;
  const timeline = createTimeline(canvas, {
    onWindow: () => { clearTimeout(typing); typing = setTimeout(refresh, 120); },
    onPick: (id) => go("trajectories", { open: id }),
    onHover: (text, t) => { hover.textContent = text ? `${text} · at ${seconds(t)}` : `${clock(t)} into the run`; },
  });
  const buttons = el("span", { class: "row" }, el("button", { type: "button", "aria-label": "zoom in", onclick: () => timeline.zoom(0.5) }, "+"), el("button", { type: "button", "aria-label": "zoom out", onclick: () => timeline.zoom(2) }, "−"), el("button", { type: "button", onclick: () => timeline.all() }, "All"));
  const keys = el("div", { class: "keys" }, KEYS.map(([name, text]) => el("span", {}, swatch(`var(--${name})`), text)), el("span", { class: "note" }, "For Perfetto: ", el("code", { class: "mono" }, `rollart timeline ${run}`)));
  pane.append(el("div", { class: "head" }, el("h1", {}, "Time"), note), el("div", { class: "grid" }, card("Timeline", { right: buttons, tip: "Services above, trajectories below. Numbers on slices are versions." }, keys, canvas, hover)));
  return {
    load: () => get("/api/view/time", { run, ...timeline.window(), pixels: canvas.clientWidth }),
    update: (data) => { timeline.set(data); note.textContent = `${clock(data.end)} in all`; },
    destroy: () => timeline.destroy(),
  };
}
