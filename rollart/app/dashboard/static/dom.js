// Elements from data. Children that are strings become text nodes: there is no way to pass HTML through this module.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "tip") withTip(node, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function withTip(node, text) {
  node.dataset.tip = text;
  if (!/^(A|BUTTON|SELECT|INPUT|TR|TH)$/.test(node.tagName)) node.tabIndex = 0;
}

export const colour = (number) => `var(--c${number % 8})`;

export function swatch(value, dashed = false) {
  return el("i", { class: `swatch ${dashed ? "dashed" : ""}`, style: { background: value } });
}

export function card(title, options = {}, ...body) {
  const heading = el("h2", options.tip ? { tip: options.tip } : {}, title);
  const header = el("header", {}, heading, options.note ? el("span", { class: "note" }, options.note) : null, options.right ? el("span", { class: "right" }, options.right) : null);
  return el("section", { class: `card ${options.width || ""}` }, header, ...body);
}

export function stat(label, value, unit, tip, more) {
  return el("div", { class: "stat", tip }, el("span", { class: "label" }, label), el("span", { class: "value" }, value, unit ? el("span", { class: "unit" }, unit) : null), more ? el("span", { class: "more" }, more) : null);
}

export function empty(title, text, code) {
  return el("div", { class: "empty" }, el("b", {}, title), text || "", code ? [" ", el("code", {}, code)] : null);
}

// A table whose columns say how to read a row: {name, tip, value(row) -> string or node, num, wrap}.
export function table(columns, rows, { onRow, label } = {}) {
  const head = el("tr", {}, columns.map((column) => el("th", { class: column.num ? "num" : "", tip: column.tip, scope: "col" }, column.name)));
  const body = rows.map((row) => {
    const cells = columns.map((column) => el("td", { class: `${column.num ? "num" : ""} ${column.wrap ? "wrap" : ""}` }, column.value(row) ?? "–"));
    const open = onRow && (() => onRow(row));
    return el("tr", open ? { class: "link", tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() } : {}, cells);
  });
  return el("div", { class: "scroll" }, el("table", { "aria-label": label }, el("thead", {}, head), el("tbody", {}, body)));
}

// One tooltip for the page, for the pointer and for keyboard focus.
export function startTips() {
  const tip = document.getElementById("tip");
  const show = (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (!target) { tip.hidden = true; return; }
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const box = target.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(6, box.top - tip.offsetHeight - 6)}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", (event) => event.target.matches?.(":focus-visible") && show(event));
  document.addEventListener("focusout", () => { tip.hidden = true; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}
