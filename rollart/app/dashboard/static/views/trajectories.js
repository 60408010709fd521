// All trajectories, filtered and sorted by the server; one of them opens in the reader.

import { get } from "../api.js";
import { histogram } from "../chart.js";
import { card, el, empty } from "../dom.js";
import { clock, count, seconds, trim } from "../format.js";
import { createReader } from "../reader.js";

const PAGE = 50;
const RANGES = [["reward", "Reward"], ["turns", "Turns"], ["tokens", "Tokens"], ["version", "Version"], ["age", "Age"]];

export function create(pane, context) {
  const { run, go } = context;
  const query = { sort: "started", order: "desc", ...context.query };
  if (query.open) return createReader(pane, context);
  let offset = Number(query.offset) || 0, typing = null, known = "";
  const head = el("span", { class: "sub" }), body = el("tbody"), rewards = el("div"), pages = el("div", { class: "row" }), filters = el("div", { class: "filters" }), nothing = el("div");
  const headings = COLUMNS.map((column) => {
    const cell = el("th", { class: column.num ? "num" : "", scope: "col", tip: column.tip }, column.sort ? el("button", { type: "button", onclick: () => sort(column.sort) }, column.name) : column.name);
    cell.dataset.sort = column.sort || "";
    return cell;
  });
  pane.append(el("div", { class: "head" }, el("h1", {}, "Trajectories"), head), el("div", { class: "grid" },
    el("details", { class: "card w9", open: innerWidth > 720 }, el("summary", {}, el("h2", {}, "Filter")), filters), card("Rewards", { width: "w3", tip: "Rewards of the trajectories that match, those without one left out." }, rewards),
    el("section", { class: "card" }, el("div", { class: "scroll" }, el("table", { "aria-label": "trajectories" }, el("thead", {}, el("tr", {}, headings)), body)), nothing, pages)));

  function apply() {
    offset = 0;
    history.replaceState(null, "", `#/trajectories/${encodeURIComponent(run)}?${new URLSearchParams(Object.entries(query).filter(([, value]) => value !== ""))}`);
    context.refresh();
  }
  function sort(by) { query.order = query.sort === by && query.order === "desc" ? "asc" : "desc"; query.sort = by; apply(); }
  const later = (name, value) => { query[name] = value; clearTimeout(typing); typing = setTimeout(apply, 200); };

  function select(name, label, options) {
    const node = el("select", { "aria-label": label, onchange: (event) => { query[name] = event.target.value; apply(); } }, el("option", { value: "" }, "all"), options.map(([value, text]) => el("option", { value }, text)));
    node.value = query[name] || "";
    return el("label", {}, label, node);
  }
  function build(data) {
    const same = JSON.stringify([data.tasks, data.outcomes, data.reasons]);
    if (same === known) return;
    known = same;
    const plain = (names) => names.map((name) => [name, name.length > 44 ? `${name.slice(0, 43)}…` : name]);
    filters.replaceChildren(
      el("label", {}, "Id contains", el("input", { type: "search", class: "wide", value: query.id || "", "aria-label": "Id contains", oninput: (event) => later("id", event.target.value) })),
      select("task", "Task", plain(data.tasks)), select("outcome", "Outcome", plain(data.outcomes)), select("success", "Success", [["yes", "yes"], ["no", "no"]]),
      select("split", "From", [["training", "training episodes"], ["held_out", "held-out episodes"]]), select("reason", "Failure reason", plain(data.reasons)),
      ...RANGES.map(([name, label]) => el("label", {}, label, el("span", { class: "row" }, ["min", "max"].map((end) => el("input", { type: "text", inputmode: "decimal", placeholder: end, "aria-label": `${label} ${end}`, value: query[`${name}_${end}`] || "", oninput: (event) => later(`${name}_${end}`, event.target.value) }))))),
      el("button", { type: "button", onclick: () => { for (const key of Object.keys(query)) if (!["sort", "order"].includes(key)) query[key] = ""; known = ""; apply(); } }, "Clear"));
  }

  function update(data) {
    build(data);
    head.textContent = `${data.matching.toLocaleString("en")} of ${data.total.toLocaleString("en")}`;
    rewards.replaceChildren(data.rewards.counts.length ? histogram(data.rewards) : empty("No rewards"));
    for (const cell of headings) { if (cell.dataset.sort && cell.dataset.sort === query.sort) cell.setAttribute("aria-sort", query.order === "desc" ? "descending" : "ascending"); else cell.removeAttribute("aria-sort"); }
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    body.replaceChildren(...data.rows.map((row) => {
      const show = () => go("trajectories", { open: row.id });
      return el("tr", { class: "link", tabindex: 0, "data-id": row.id, onclick: show, onkeydown: (event) => event.key === "Enter" && show() }, COLUMNS.map((column) => el("td", { class: `${column.num ? "num" : ""} ${column.wrap ? "wrap" : ""}` }, column.value(row))));
    }));
    if (focused) [...body.children].find((row) => row.dataset.id === focused)?.focus();
    nothing.replaceChildren(...(data.rows.length ? [] : [data.total ? empty("No trajectory matches", "Change or clear the filter.") : empty("No trajectory yet", "They appear as soon as rollout begins.")]));
    const move = (by) => { offset = Math.max(0, offset + by); context.refresh(); };
    pages.replaceChildren(el("button", { type: "button", disabled: offset <= 0, onclick: () => move(-PAGE) }, "← previous page"), el("span", { class: "note" }, `${data.matching ? offset + 1 : 0} to ${Math.min(offset + PAGE, data.matching)} of ${data.matching.toLocaleString("en")}`), el("button", { type: "button", disabled: offset + PAGE >= data.matching, onclick: () => move(PAGE) }, "next page →"));
  }
  return { load: () => get("/api/view/trajectories", { ...query, run, offset, limit: PAGE }), update };
}

const verdict = (row) => (row.success === null ? "–" : el("span", { class: `success-${row.success ? "yes" : "no"}` }, row.success ? "✓ yes" : "✗ no"));
const COLUMNS = [
  { name: "id", sort: "id", tip: "Group, then member. Held-out ones begin with before, eval or after.", value: (row) => el("span", { class: "mono" }, row.id) },
  { name: "task", sort: "task", value: (row) => row.task },
  { name: "outcome", sort: "outcome", tip: "How it ended; only finished and truncated ones are trained.", value: (row) => row.outcome },
  { name: "reward", sort: "reward", num: true, tip: "The reward that is trained on, without unit.", value: (row) => trim(row.reward) },
  { name: "success", sort: "success", tip: "As the reward or the environment says.", value: verdict },
  { name: "turns", sort: "turns", num: true, tip: "Actions of the policy.", value: (row) => count(row.turns) },
  { name: "tokens", sort: "tokens", num: true, tip: "Tokens of prompts and actions.", value: (row) => count(row.tokens) },
  { name: "time", sort: "seconds", num: true, tip: "From its start to its reward.", value: (row) => seconds(row.seconds) },
  { name: "started", sort: "started", num: true, tip: "Time since the run began.", value: (row) => clock(row.started) },
  { name: "version", sort: "version", num: true, tip: "Policy version when it started.", value: (row) => String(row.version) },
  { name: "age", sort: "age", num: true, tip: "Versions between its start and the step that trained it.", value: (row) => (row.age === null ? "–" : String(row.age)) },
  { name: "reason", wrap: true, tip: "Why it ended as it did.", value: (row) => row.reason || "" },
];
