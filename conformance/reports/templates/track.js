"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = dark.matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
  const rows = [...document.querySelectorAll("tbody tr")];
  const status = document.getElementById("status");
  function filter() {
    const words = document.getElementById("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    status.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length} ${rows.length === 1 ? "trace" : "traces"}`;
  }
  document.getElementById("words").addEventListener("input", filter);
  filter();
  window.kvconform = { filter };
})();
