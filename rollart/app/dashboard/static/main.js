// The frame: which run, which view, and when to ask again. The address holds all of it, so a view can be shared.

import { follow, get } from "./api.js";
import { el, empty, startTips, svg } from "./dom.js";
import { clock } from "./format.js";

const VIEWS = [
  ["overview", "Overview", "M2 12l4-4 3 3 5-6", "Results, speed and what sets the pace"],
  ["now", "Now", "M8 2v6l4 2M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12", "Every trajectory, by phase"],
  ["trajectories", "Trajectories", "M3 4h10M3 8h10M3 12h6", "Filter, sort and read them"],
  ["time", "Time", "M2 4h5M5 8h7M9 12h5", "The timeline of the run"],
  ["freshness", "Freshness & loss", "M8 2c3 4 4 5 4 8a4 4 0 0 1-8 0c0-3 1-4 4-8", "Staleness, drops, gaps, gradients"],
  ["hardware", "Hardware", "M4 4h8v8H4zM6 1v3M10 1v3M6 12v3M10 12v3", "Placement, routing, weights, cost"],
  ["compare", "Compare", "M4 13V7M8 13V3M12 13V9", "Runs over each other"],
  ["plans", "Simulate & plan", "M2 13c3 0 3-9 6-9s3 6 6 6", "Sweeps and Pareto fronts"],
];
const EVERY_MS = 1000;
const pane = document.getElementById("view"), status = document.getElementById("status"), picker = document.getElementById("run");
let view = null, stop = null, run = null, asking = false, dirty = false, last = 0, timer = null, place = "", opening = 0, drawing = false;

export function go(name, query = {}, which = run || parse().which) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  location.hash = `#/${name}/${encodeURIComponent(which || "")}${search.size ? `?${search}` : ""}`;
}

function parse() {
  const [path, search] = location.hash.slice(2).split("?");
  const [name, which] = path.split("/");
  return { name: VIEWS.some(([known]) => known === name) ? name : "overview", which: decodeURIComponent(which || ""), query: Object.fromEntries(new URLSearchParams(search)) };
}

function say(text, bad = false) {
  status.textContent = text;
  status.className = `status ${bad ? "bad" : ""}`;
}

// A view without `load` is pushed: each message has the parts that changed.
function receive({ state, patch }) {
  const mine = view;
  if (!mine) return;
  if (mine.load) { refresh(); return; }
  mine.receive?.(patch);
  mine.data = { ...mine.data, ...patch, state };
  progress(state);
  if (drawing) return;
  drawing = true; // messages that come before the next frame are drawn together
  requestAnimationFrame(() => {
    drawing = false;
    const { state: now, about } = mine.data;
    if (mine === view && (now.number || now.complete || about?.name)) mine.update(mine.data); // else nothing is read yet
  });
}

async function refresh() {
  if (!view || asking) { dirty = true; return; }
  const mine = view, wait = EVERY_MS - (performance.now() - last);
  if (wait > 0 && mine.loaded) { clearTimeout(timer); timer = setTimeout(refresh, wait); return; }
  asking = true; dirty = false; last = performance.now();
  try {
    const found = await mine.load();
    if (mine === view) { mine.loaded = true; mine.update(found); progress(found.state); }
  } catch (error) {
    if (mine === view) { say(error.message, true); if (!mine.loaded) pane.replaceChildren(empty("Nothing to show", error.message)); }
  } finally {
    asking = false;
    if (dirty) refresh();
  }
}

function progress(state) {
  if (!state) say("");
  else if (state.error) say(state.error, true);
  else if (!state.headlines) say(`reading steps and results: up to ${clock(state.t)}`);
  else if (!state.complete) say(`reading the event log: ${state.number.toLocaleString("en")} events, ${clock(state.read_t)} of ${clock(state.t)}; results of steps and evaluations are complete`);
  else say("");
}

async function listRuns() {
  const found = await get("/api/runs");
  const names = found.runs.map((each) => each.run);
  picker.replaceChildren(...found.runs.map((each) => el("option", { value: each.run }, each.phase ? `${each.run} · ${each.phase}` : each.run)));
  if (run) picker.value = run;
  return { names, root: found.root };
}

async function open() {
  const mine = ++opening; // a later address wins over one that is still loading
  const { name, which, query } = parse(), loading = import(`./views/${name}.js`);
  const { names, root } = await listRuns().catch((error) => { say(error.message, true); return { names: [] }; });
  if (mine !== opening) return;
  const chosen = names.includes(which) ? which : names[0];
  document.title = chosen ? `${chosen} · rollart` : "rollart";
  document.querySelectorAll("#views a").forEach((link) => {
    link.href = `#/${link.dataset.view}/${encodeURIComponent(chosen || "")}`;
    link.dataset.view === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  });
  document.querySelector("#views [aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" }); // a narrow screen shows some of them
  if (view?.destroy) view.destroy();
  view = null;
  if (!chosen && name !== "plans") { pane.replaceChildren(empty(`No runs in ${root || "this folder"} yet`, "Start one, and it appears here:", "rollart train examples/quickstart.yaml")); setTimeout(() => parse().name === name && open(), 3000); return; }
  picker.value = chosen || "";
  if (place !== name + chosen) pane.replaceChildren(el("div", { class: "skeleton", "aria-label": "loading" }));
  place = name + chosen;
  const module = await loading;
  if (mine !== opening) return;
  pane.replaceChildren();
  view = { name, loaded: false, ...module.create(pane, { run: chosen, runs: names, query, go, refresh: () => { last = 0; refresh(); } }) };
  stop?.();
  run = chosen;
  stop = chosen ? follow(chosen, name, receive, () => say("the connection to the server was lost; trying again", true)) : null;
  last = 0;
  if (view.load) refresh();
}

function theme(value) {
  document.documentElement.dataset.theme = value;
  dispatchEvent(new Event("themechange"));
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  theme(stored() || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => stored() || theme(dark.matches ? "dark" : "light"));
  const flip = () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; try { localStorage.setItem("theme", next); } catch { /* a private window */ } theme(next); };
  document.getElementById("theme").addEventListener("click", flip);
  document.getElementById("views").append(...VIEWS.map(([name, title, path, tip], i) => el("a", { href: `#/${name}/`, "data-view": name, tip: `${tip}. Key: ${i + 1}` }, svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: path })), title)));
  picker.addEventListener("change", () => go(parse().name, {}, picker.value));
  addEventListener("hashchange", open);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    if (event.key >= "1" && event.key <= "8") go(VIEWS[event.key - 1][0]);
    else if (event.key === "d") flip();
    else if (event.key === "/") { document.querySelector("#view input")?.focus(); event.preventDefault(); }
    else if (event.key === "j" || event.key === "k") {
      const rows = [...document.querySelectorAll("#view tr.link")];
      const here = rows.indexOf(document.activeElement);
      rows[Math.min(rows.length - 1, Math.max(0, here + (event.key === "j" ? 1 : -1)))]?.focus();
    }
  });
  startTips();
  // The key has become a cookie: it should not stay in the address, which people share and browsers remember.
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  open();
}

start();
