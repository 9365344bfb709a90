"use strict";
const root = document.documentElement;
const metric = () => root.dataset.metric;
const cells = (row) => [...row.children];

// Which results, and by which accuracy.
function choose(name, value) {
  root.dataset[name] = value;
  if (name === "metric") document.querySelectorAll(".leaderboard").forEach(resort);
}
document.querySelector("#board")?.addEventListener("change", (event) => choose("board", event.target.value));
document.querySelectorAll("[name=metric]").forEach((input) =>
  input.addEventListener("change", () => choose("metric", input.value)));

// Sorting: the first click puts the best first, the second turns the order round. Rows without a value stay last.
function valueOf(row, column) {
  const cell = cells(row)[column];
  const text = cell.dataset[metric()] ?? cell.dataset.sort;
  if (text === undefined || text === "") return null;
  return isNaN(text) ? text : Number(text);
}
function sort(table, column, ascending) {
  const body = table.tBodies[0];
  const compare = (a, b) => {
    const [x, y] = [valueOf(a, column), valueOf(b, column)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return ascending ? order : -order;
  };
  body.append(...[...body.rows].sort(compare));
}
function resort(table) {
  const head = cells(table.tHead.rows[0]);
  const column = head.findIndex((cell) => cell.hasAttribute("aria-sort"));
  if (column >= 0) sort(table, column, head[column].getAttribute("aria-sort") === "ascending");
}
document.querySelectorAll(".leaderboard").forEach((table) => {
  const head = cells(table.tHead.rows[0]);
  head.forEach((cell, column) => cell.querySelector("button").addEventListener("click", () => {
    const text = ["layer", "family"].includes(cell.dataset.key);
    const first = "up" in cell.dataset || text ? "ascending" : "descending";
    const next = cell.getAttribute("aria-sort") === first ? { ascending: "descending", descending: "ascending" }[first] : first;
    head.forEach((other) => other.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", next);
    sort(table, column, next === "ascending");
  }));
});

// Filters.
document.querySelectorAll(".filters").forEach((form) => {
  const table = form.parentElement.querySelector(".leaderboard");
  const apply = () => {
    const value = (name) => form.elements[name].value.trim();
    const atMost = (name, figure) => value(name) === "" || (figure !== "" && Number(figure) <= Number(value(name)));
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const { layer, family, grows, parameters, floats } = row.dataset;
      row.hidden = !(layer.includes(value("text").toLowerCase()) && (!value("family") || family === value("family")) &&
        (!value("state") || grows === value("state")) && atMost("parameters", parameters) && atMost("floats", floats));
      shown += !row.hidden;
    }
    for (const box of form.querySelectorAll("[name=task]"))
      table.querySelectorAll(`[data-task="${box.value}"]`).forEach((cell) => { cell.hidden = !box.checked; });
    form.querySelector("output").textContent = `${shown} of ${table.tBodies[0].rows.length} layers`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
});

// Details of a cell: on hover and focus; a click keeps them open, so that command and record can be reached.
const tip = document.querySelector("#tip");
let described = null, kept = null;
function showTip(link) {
  tip.replaceChildren(link.nextElementSibling.content.cloneNode(true));
  tip.hidden = false;
  described = link;
  placeTip(link);
}
function placeTip(link) {
  const at = link.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = at.bottom + size.height + 8 < innerHeight || at.top < size.height + 8;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? Math.min(at.bottom + 4, Math.max(8, innerHeight - size.height - 8)) : at.top - size.height - 4}px`;
}
function hideTip() { tip.hidden = true; described = kept = null; }
function moveTip() {
  if (!described) return;
  const at = described.getBoundingClientRect();
  if (at.bottom < 0 || at.top > innerHeight) hideTip(); else placeTip(described);
}
document.querySelectorAll("a.cell").forEach((link) => {
  link.addEventListener("mouseenter", () => { if (!kept) showTip(link); });
  link.addEventListener("mouseleave", () => { if (!kept) hideTip(); });
  link.addEventListener("focus", () => { if (!kept) showTip(link); });
  link.addEventListener("blur", () => { if (!kept) hideTip(); });
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (kept === link) return hideTip();
    showTip(link);
    kept = link;
  });
});
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("click", (event) => { if (kept && !event.target.closest("#tip, a.cell")) hideTip(); });
addEventListener("scroll", moveTip, { passive: true, capture: true });

// Claims of one verdict.
const verdicts = document.querySelectorAll("button.verdict");
verdicts.forEach((button) => button.addEventListener("click", () => {
  const on = button.getAttribute("aria-pressed") !== "true";
  verdicts.forEach((other) => other.setAttribute("aria-pressed", String(on && other === button)));
  document.querySelectorAll(".claim").forEach((claim) => {
    claim.hidden = on && claim.dataset.verdict !== button.dataset.verdict;
  });
}));
