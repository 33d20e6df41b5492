"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement, theme = window.matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  $("theme").onclick = () => setTheme(root.dataset.theme !== "dark");
  theme.addEventListener("change", (event) => setTheme(event.matches));
  setTheme(theme.matches);

  const rows = [...document.querySelectorAll("tbody tr")];
  const filter = () => {
    const words = $("words").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const inRow = (row) => words.filter((word) => !D.columns.some((name) => name.toLowerCase().includes(word))).every((word) => row.dataset.words.includes(word));
    const engines = words.filter((word) => D.columns.some((name) => name.toLowerCase().includes(word)));
    const shown = D.columns.map((name) => engines.every((word) => name.toLowerCase().includes(word)));
    for (const row of rows) {
      const cells = [...row.querySelectorAll("button.cell")].filter((cell) => shown[cell.dataset.column]);
      const kinds = new Set(cells.map((cell) => cell.className));
      const level = row.closest("table").dataset.level;
      const levelShown = level === "MUST" ? $("must").checked : level === "SHOULD" ? $("should").checked : true;
      const red = cells.some((cell) => /fail|stale|error|known/.test(cell.className));
      row.hidden = !levelShown || !inRow(row) || ($("differ").checked && kinds.size < 2) || ($("red").checked && !red);
    }
    for (const table of document.querySelectorAll("table")) {
      table.hidden = ![...table.tBodies[0].rows].some((row) => !row.hidden);
      for (const row of table.rows) for (let n = 1; n < row.cells.length; n++) row.cells[n].hidden = !shown[n - 1];
    }
  };
  for (const id of ["must", "should", "differ", "red"]) $(id).onchange = filter;
  $("words").oninput = filter;

  const add = (list, name, value) => {
    if (!value) return;
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; if (value instanceof Node) dd.append(value); else dd.textContent = value;
    list.append(dt, dd);
  };
  const code = (text) => { const node = document.createElement("code"); node.textContent = text; return node; };
  const link = (href, text) => { const node = document.createElement("a"); node.href = href; node.textContent = text; return node; };
  for (const button of document.querySelectorAll("td button.cell")) button.onclick = () => {
    const requirement = D.requirements[button.dataset.row], cell = D.cells[button.dataset.row][button.dataset.column];
    const body = $("detail-body"), title = document.createElement("h2"), list = document.createElement("dl");
    body.textContent = ""; title.id = "detail-title";
    title.textContent = `${button.dataset.row} ${requirement.title}: ${cell.status} on ${D.columns[button.dataset.column]}`;
    add(list, requirement.level, requirement.text); add(list, "because", requirement.rationale); add(list, "source", requirement.source);
    for (const reason of cell.reasons) add(list, "here", reason);
    for (const found of cell.findings) { add(list, "fuzzer", found.message); add(list, "expected", found.expected); add(list, "got", found.got); add(list, "known", found.known); if (found.page) add(list, "", link(found.page, "the shortest trace as a page")); else if (found.trace) add(list, "trace", code(`kvconform explain ${found.trace}`)); }
    if (cell.page) add(list, "", link(cell.page, "the trace as a page")); else if (cell.trace) add(list, "trace", code(`kvconform explain ${cell.trace}`));
    body.append(title, list); $("detail").showModal();
  };
  filter();
  window.kvconform = { filter };
})();
