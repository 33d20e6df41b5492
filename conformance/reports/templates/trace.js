"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const curve = $("curve"), blocks = $("blocks"), lanes = $("lanes");
  // Eight colours that stay apart for colour-blind eyes (Okabe and Ito); every next eight have a texture of their own.
  const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#7d7d7d"];
  const ON_PALETTE = ["#fff", "#111", "#fff", "#111", "#111", "#fff", "#111", "#fff"];
  const [HELD, SHARED, LEFT, NULL] = [0, 1, 2, 3];
  const HOLDS = ["held by", "shared by", "free; still contains the KV of", "the null block"];
  const OPACITY = { grey: 0.12, left: 0.16 };
  const GUTTER = 54, HEAD = 18, LANE = 15;
  const steps = D.steps.length, count = D.blocks;
  const rowStart = new Int32Array(count + 1);
  for (const span of D.spans) rowStart[span[0] + 1]++;
  for (let b = 0; b < count; b++) rowStart[b + 1] += rowStart[b];
  const spanFirst = Int32Array.from(D.spans, (span) => span[1]), spanLast = Int32Array.from(D.spans, (span) => span[2]);

  const view = { x: 0, y: 0, cw: 16, ch: 14, laneY: 0 };
  const at = { column: 0, block: 0 };
  let pinnedRequest = -1, pinnedBlock = -1, filter = null;
  let colours = {}, picture = null, dirty = true, queued = false;

  const theme = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const readColours = () => {
    const style = getComputedStyle(root);
    for (const name of ["ground", "panel", "line", "text", "quiet", "bad", "mark", "left", "null", "empty"])
      colours[name] = style.getPropertyValue("--" + name).trim();
  };
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; readColours(); dirty = true; legend(); draw(); };

  const size = (canvas, height) => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = height + "px";
      dirty = true;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [pen, width, height];
  };
  const inner = () => Math.max(10, blocks.clientWidth - GUTTER);
  const blocksHeight = () => Math.min(Math.max(120, window.innerHeight * 0.5), HEAD + count * view.ch + 2);
  const lanesHeight = () => Math.min(260, Math.max(LANE, D.lanes.length * LANE) + 2);
  const rowsShown = () => (blocksHeight() - HEAD) / view.ch;

  const requestOf = (owner) => D.owners[owner][1];
  const greyed = (block, owners) => {
    if (pinnedBlock >= 0) return block !== pinnedBlock;
    if (pinnedRequest < 0 && !filter) return false;
    for (const owner of owners) if (pinnedRequest >= 0 ? requestOf(owner) === pinnedRequest : filter.has(requestOf(owner))) return false;
    return true;
  };
  const laneGreyed = (lane) => (pinnedRequest >= 0 ? lane !== pinnedRequest : filter ? !filter.has(lane) : false);
  const colour = (request) => PALETTE[request % PALETTE.length];

  // A run of equal cells. Every state has a shape of its own beside its colour.
  const paint = (pen, x, y, w, h, hold, owners, grey) => {
    if (hold === NULL) {
      pen.fillStyle = colours.null; pen.fillRect(x, y, w, h);
      pen.strokeStyle = colours.quiet; pen.lineWidth = 1; pen.beginPath();
      for (let i = x; i < x + w; i += Math.max(8, h)) {
        pen.moveTo(i + 2, y + 2); pen.lineTo(Math.min(i + h, x + w) - 2, y + h - 2);
        pen.moveTo(Math.min(i + h, x + w) - 2, y + 2); pen.lineTo(i + 2, y + h - 2);
      }
      pen.stroke();
      return;
    }
    const request = owners.length ? requestOf(owners[0]) : 0;
    pen.fillStyle = colour(request);
    pen.globalAlpha = grey ? OPACITY.grey : hold === LEFT ? OPACITY.left : 1;
    pen.fillRect(x, y, w, h);
    if (hold === LEFT) {
      pen.globalAlpha = grey ? 0.2 : 0.75; pen.strokeStyle = colours.left; pen.lineWidth = 1;
      pen.save(); pen.beginPath(); pen.rect(x, y, w, h); pen.clip(); pen.beginPath();
      for (let i = x - h; i < x + w; i += 6) { pen.moveTo(i, y + h); pen.lineTo(i + h, y); }
      pen.stroke(); pen.restore();
    } else {
      const texture = Math.floor(request / PALETTE.length) % 3;
      if (texture && !grey) {
        pen.globalAlpha = 0.55; pen.fillStyle = colours.ground;
        if (texture === 1) for (let i = x + 3; i < x + w - 1; i += 6) pen.fillRect(i, y + h / 2 - 1, 2, 2);
        else pen.fillRect(x, y + h / 2 - 1, w, 2);
      }
      if (hold === SHARED) {
        pen.globalAlpha = grey ? 0.15 : 1; pen.fillStyle = colour(requestOf(owners[1]));
        pen.fillRect(x, y + h / 2, w, h / 2);
        pen.fillStyle = colours.ground; pen.fillRect(x, y + h / 2 - 1, w, 2);
      }
    }
    pen.globalAlpha = 1;
  };

  const drawBlocks = () => {
    const [pen, width, height] = size(blocks, blocksHeight());
    if (dirty || !picture) {
      picture = picture || document.createElement("canvas");
      picture.width = blocks.width; picture.height = blocks.height;
      const ratio = window.devicePixelRatio || 1, layer = picture.getContext("2d");
      layer.setTransform(ratio, 0, 0, ratio, 0, 0);
      renderBlocks(layer, width, height);
    }
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.drawImage(picture, 0, 0);
    const ratio = window.devicePixelRatio || 1;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    overlay(pen, height, true);
  };
  // The two ways to draw the cells: with a shape and a name each where there is room for it; otherwise, where there may be
  // tens of thousands, straight into the pixels, each state in its colour.
  const drawn = (pen, right, height) => {
    pen.fillStyle = colours.empty; pen.fillRect(GUTTER, HEAD, right - GUTTER, height - HEAD);
    return {
      paint: (x, y, w, h, hold, owners, grey) => {
        paint(pen, x, y, w, h, hold, owners, grey);
        if (hold > SHARED || view.ch < 12 || w <= 24 || grey) return;
        pen.fillStyle = ON_PALETTE[requestOf(owners[0]) % PALETTE.length]; pen.font = "10px sans-serif"; pen.textBaseline = "middle";
        pen.fillText(owners.map((owner) => D.owners[owner][0]).join(" "), x + 3, y + view.ch / 2, w - 4);
      },
      done: () => {},
    };
  };
  const pixels = (pen, right, height) => {
    const ratio = window.devicePixelRatio || 1, left = Math.round(GUTTER * ratio), top = Math.round(HEAD * ratio);
    const across = Math.max(1, Math.round(right * ratio) - left), down = Math.max(1, Math.round(height * ratio) - top);
    const image = pen.createImageData(across, down), words = new Uint32Array(image.data.buffer);
    const empty = channels(pen, colours.empty), flat = (style, alpha) => word(channels(pen, style), empty, alpha);
    const shades = [1, OPACITY.left, OPACITY.grey].map((alpha) => PALETTE.map((style) => flat(style, alpha)));
    const nothing = flat(colours.null, 1);
    words.fill(flat(colours.empty, 1));
    return {
      paint: (x, y, w, h, hold, owners, grey) => {
        const shade = hold === NULL ? nothing : shades[grey ? 2 : hold === LEFT ? 1 : 0][(owners.length ? requestOf(owners[0]) : 0) % PALETTE.length];
        const x0 = Math.max(0, Math.round(x * ratio) - left), x1 = Math.min(across, Math.max(x0 + 1, Math.round((x + w) * ratio) - left));
        const y0 = Math.max(0, Math.round(y * ratio) - top), y1 = Math.min(down, Math.max(y0 + 1, Math.round((y + h) * ratio) - top));
        for (let row = y0 * across; row < y1 * across; row += across) words.fill(shade, row + x0, row + x1);
      },
      done: () => pen.putImageData(image, left, top),
    };
  };
  const channels = (pen, style) => { pen.fillStyle = style; return [1, 3, 5].map((i) => parseInt(pen.fillStyle.slice(i, i + 2), 16)); };
  // A pixel as the machine keeps it: bytes in the order red, green, blue, opacity.
  const word = (over, under, alpha) =>
    new Uint32Array(Uint8Array.from([...over.map((value, i) => Math.round(value * alpha + under[i] * (1 - alpha))), 255]).buffer)[0];
  const renderBlocks = (pen, width, height) => {
    pen.fillStyle = colours.ground; pen.fillRect(0, 0, width, height);
    const c0 = Math.floor(view.x), c1 = Math.min(steps - 1, Math.ceil(view.x + inner() / view.cw));
    const b0 = Math.floor(view.y), b1 = Math.min(count - 1, Math.ceil(view.y + rowsShown()));
    const fine = view.cw >= 4 && view.ch >= 6, gap = view.ch >= 5 ? 1 : 0;
    const right = GUTTER + Math.min(width - GUTTER, (steps - view.x) * view.cw);
    pen.save(); pen.beginPath(); pen.rect(GUTTER, HEAD, width - GUTTER, height - HEAD); pen.clip();
    const cells = fine ? drawn(pen, right, height) : pixels(pen, right, height);
    // Where rows or spans are thinner than a pixel, one of those that fall on it is drawn.
    let lastRow = -1;
    for (let b = b0; b <= b1; b++) {
      const y = HEAD + (b - view.y) * view.ch;
      if (view.ch < 1 && Math.floor(y) === lastRow && b !== pinnedBlock) continue;
      lastRow = Math.floor(y);
      let drawnTo = -1;
      let low = rowStart[b], high = rowStart[b + 1];
      while (low < high) { const mid = (low + high) >> 1; if (spanLast[mid] < c0) low = mid + 1; else high = mid; }
      for (let i = low; i < rowStart[b + 1] && spanFirst[i] <= c1; i++) {
        const first = spanFirst[i], last = spanLast[i];
        const x = GUTTER + (first - view.x) * view.cw, w = Math.max(1, (last - first + 1) * view.cw - gap);
        const from = Math.max(x, GUTTER), to = Math.min(x + w, width);
        if (view.cw < 1 && to - from <= 1 && Math.floor(from) === drawnTo) continue;
        drawnTo = Math.floor(from);
        const hold = D.spans[i][3], owners = D.spans[i][4];
        cells.paint(from, y, Math.max(1, to - from), Math.max(1, view.ch - gap), hold, owners, greyed(b, owners));
      }
    }
    cells.done();
    if (fine) {
      pen.fillStyle = colours.text;
      for (let c = c0; c <= c1; c++)
        for (const b of D.written[c]) if (b >= b0 && b <= b1)
          pen.fillRect(GUTTER + (c - view.x) * view.cw + 1, HEAD + (b - view.y + 1) * view.ch - 4, Math.max(1, view.cw - 3), 2);
    }
    pen.restore();
    pen.font = "11px sans-serif"; pen.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / view.ch));
    pen.textAlign = "right";
    for (let b = Math.ceil(b0 / every) * every; b <= b1; b += every) {
      pen.fillStyle = b === pinnedBlock ? colours.mark : colours.quiet;
      pen.fillText(String(b), GUTTER - 8, HEAD + (b - view.y + 0.5) * view.ch);
    }
    pen.textAlign = "left"; pen.fillStyle = colours.quiet;
    const apart = Math.max(1, Math.ceil(44 / view.cw));
    for (let c = Math.ceil(c0 / apart) * apart; c <= c1; c += apart)
      pen.fillText(String(D.steps[c][0]), GUTTER + (c - view.x) * view.cw, 8);
    pen.fillText("block", 4, 8);
  };
  // What moves with the cursor: the step, the cell, and the marks of the violated steps.
  const overlay = (pen, height, cell) => {
    pen.save(); pen.beginPath(); pen.rect(GUTTER - 3, 0, blocks.clientWidth, height); pen.clip();
    for (const [column] of D.violations) {
      const x = GUTTER + (column - view.x) * view.cw;
      pen.fillStyle = colours.bad; pen.globalAlpha = 0.13; pen.fillRect(x, 0, Math.max(2, view.cw), height); pen.globalAlpha = 1;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x + 8, 0); pen.lineTo(x, 9); pen.fill();
    }
    const x = GUTTER + (at.column - view.x) * view.cw;
    pen.strokeStyle = colours.mark; pen.lineWidth = 1.5; pen.strokeRect(x - 0.5, 0.5, Math.max(2, view.cw), height - 1);
    if (cell) { pen.lineWidth = 2.5; pen.strokeRect(x - 1, HEAD + (at.block - view.y) * view.ch - 1, Math.max(3, view.cw + 1), Math.max(3, view.ch + 1)); }
    pen.restore();
  };

  const drawCurve = () => {
    const [pen, width, height] = size(curve, 70), top = 14, span = height - top - 4;
    pen.fillStyle = colours.ground; pen.fillRect(0, 0, width, height);
    pen.fillStyle = colours.quiet; pen.font = "11px sans-serif"; pen.textBaseline = "middle"; pen.fillText("free", 4, top + 8);
    pen.textAlign = "right"; pen.fillText(String(D.free_max), GUTTER - 8, top); pen.fillText("0", GUTTER - 8, height - 5); pen.textAlign = "left";
    pen.save(); pen.beginPath(); pen.rect(GUTTER, 0, width, height); pen.clip();
    pen.strokeStyle = colours.line; pen.beginPath(); pen.moveTo(GUTTER, height - 4.5); pen.lineTo(width, height - 4.5); pen.stroke();
    pen.strokeStyle = colours.text; pen.lineWidth = 1.4; pen.beginPath();
    const c0 = Math.max(0, Math.floor(view.x)), c1 = Math.min(steps - 1, Math.ceil(view.x + inner() / view.cw));
    for (let c = c0; c <= c1; c++) {
      const x = GUTTER + (c - view.x) * view.cw, y = top + span * (1 - D.steps[c][1] / Math.max(1, D.free_max));
      pen.lineTo(x, y); pen.lineTo(x + view.cw, y);
    }
    pen.stroke(); pen.restore();
    pen.fillStyle = colours.bad;
    for (let c = c0; c <= c1; c++) if (D.preempted[c]) {
      const x = GUTTER + (c - view.x + 0.5) * view.cw;
      pen.beginPath(); pen.moveTo(x - 4, 0); pen.lineTo(x + 4, 0); pen.lineTo(x, 8); pen.fill();
    }
    overlay(pen, height, false);
  };

  // waiting, prefill, recompute, decode, idle, preempted, swapped: height, fill and hatch differ.
  const SHAPES = [[0.25, 0], [1, 0], [1, 1], [0.7, 0], [0.35, 0], [0.25, 2], [0.25, 3]];
  const drawLanes = () => {
    const [pen, width, height] = size(lanes, lanesHeight());
    pen.fillStyle = colours.ground; pen.fillRect(0, 0, width, height);
    pen.font = "11px sans-serif"; pen.textBaseline = "middle";
    const first = Math.floor(view.laneY), last = Math.min(D.lanes.length - 1, Math.ceil(view.laneY + height / LANE));
    for (let n = first; n <= last; n++) {
      const lane = D.lanes[n], y = (n - view.laneY) * LANE;
      pen.globalAlpha = laneGreyed(n) ? 0.2 : 1;
      pen.fillStyle = n === pinnedRequest ? colours.mark : colours.quiet;
      pen.textAlign = "right"; pen.fillText(lane.id, GUTTER - 8, y + LANE / 2); pen.textAlign = "left";
      pen.save(); pen.beginPath(); pen.rect(GUTTER, y, width, LANE); pen.clip();
      for (const [from, to, doing] of lane.spans) {
        const x = GUTTER + (from - view.x) * view.cw, w = Math.max(1, (to - from + 1) * view.cw - 1);
        lanePart(pen, x, y, w, doing, n);
      }
      if (lane.end && lane.column !== null) {
        pen.fillStyle = colours.text;
        pen.fillText({ finished: "■", aborted: "✕", refused: "⊘" }[lane.end], GUTTER + (lane.column - view.x) * view.cw + 1, y + LANE / 2);
      }
      pen.restore(); pen.globalAlpha = 1;
    }
    overlay(pen, height, false);
  };
  const lanePart = (pen, x, y, w, doing, request) => {
    const [share, hatch] = SHAPES[doing], h = (LANE - 3) * share, top = y + (LANE - 3 - h) / 2 + 1;
    pen.fillStyle = doing === 0 || doing >= 5 ? colours.left : colour(request);
    pen.fillRect(x, top, w, h);
    if (hatch === 1) { pen.strokeStyle = colours.ground; pen.lineWidth = 1.5; pen.beginPath();
      for (let i = x - h; i < x + w; i += 5) { pen.moveTo(Math.max(i, x), top + h - Math.max(0, x - i)); pen.lineTo(Math.min(i + h, x + w), top + Math.max(0, i + h - x - w)); } pen.stroke(); }
    if (hatch === 2) { pen.fillStyle = colours.bad; for (let i = x; i < x + w; i += 6) pen.fillRect(i, top, 2, h); }
    if (hatch === 3) { pen.fillStyle = colours.text; for (let i = x; i < x + w; i += 8) pen.fillRect(i, top - 1, 4, 1.5); }
  };

  const spanAt = (block, column) => {
    for (let i = rowStart[block]; i < rowStart[block + 1]; i++) if (D.spans[i][1] <= column && column <= D.spans[i][2]) return D.spans[i];
    return null;
  };
  const describe = () => {
    if (!steps) { $("cell").textContent = "The trace has no step."; return; }
    const span = spanAt(at.block, at.column), lines = [`step ${D.steps[at.column][0]}, block ${at.block}`];
    if (!span) lines.push("free; never held");
    else if (span[3] === NULL) lines.push(HOLDS[NULL]);
    else {
      lines.push(`${HOLDS[span[3]]} ${span[4].map((owner) => D.owners[owner][0]).join(", ")}`);
      lines.push(`positions ${span[5] * D.block_size} to ${(span[5] + 1) * D.block_size - 1}`);
      lines.push(`from step ${D.steps[span[1]][0]} to ${D.steps[span[2]][0]}`);
    }
    if (D.written[at.column].includes(at.block)) lines.push("written in this step");
    lines.push("", `${D.steps[at.column][1]} blocks free before the step`, ...D.said[at.column]);
    for (const [column, text] of D.violations) if (column === at.column) lines.push("", `violated here: ${text}`);
    $("cell").textContent = lines.join("\n");
  };
  // The operation that produced the current step, and the requests that live in it, come into sight by themselves.
  let marked = -1;
  const markOperation = () => {
    const items = $("operations").children;
    let low = 0, high = D.operations.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (D.operations[mid][1] <= at.column) low = mid; else high = mid - 1; }
    if (low === marked || !items.length) return;
    if (marked >= 0) items[marked].removeAttribute("aria-current");
    marked = low; items[low].setAttribute("aria-current", "true");
    const box = $("operations").parentElement, top = items[low].offsetTop;
    if (top < box.scrollTop || top + 30 > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
  };
  const showLanes = () => {
    const lives = (lane) => lane.spans.length && lane.spans[lane.spans.length - 1][1] >= at.column && lane.spans[0][0] <= at.column;
    const shown = lanesHeight() / LANE, first = D.lanes.findIndex(lives);
    if (first >= 0 && (first < view.laneY || first >= view.laneY + shown - 1)) view.laneY = first;
  };

  const clamp = () => {
    at.column = Math.max(0, Math.min(steps - 1, at.column)); at.block = Math.max(0, Math.min(count - 1, at.block));
    view.x = Math.max(0, Math.min(Math.max(0, steps - inner() / view.cw), view.x));
    view.y = Math.max(0, Math.min(Math.max(0, count - rowsShown()), view.y));
    view.laneY = Math.max(0, Math.min(Math.max(0, D.lanes.length - lanesHeight() / LANE), view.laneY));
  };
  const reveal = () => {
    const before = [view.x, view.y].join();
    const across = inner() / view.cw, down = rowsShown();
    if (at.column < view.x) view.x = at.column;
    if (at.column + 1 > view.x + across) view.x = at.column + 1 - across;
    if (at.block < view.y) view.y = at.block;
    if (at.block + 1 > view.y + down) view.y = at.block + 1 - down;
    clamp();
    if ([view.x, view.y].join() !== before) dirty = true;
  };
  const drawNow = () => { queued = false; drawBlocks(); drawCurve(); drawLanes(); dirty = false; };
  const draw = () => { if (!queued) { queued = true; requestAnimationFrame(drawNow); } };
  const moved = () => { showLanes(); reveal(); describe(); markOperation(); draw(); };
  const go = (column, block) => { at.column = column; if (block !== undefined) at.block = block; moved(); };
  const zoom = (factor) => {
    const middle = at.column;
    view.cw = Math.max(Math.min(inner() / Math.max(1, steps), 16), Math.min(64, view.cw * factor));
    view.ch = Math.max(Math.min(2, 14), Math.min(28, view.ch * Math.sqrt(factor)));
    view.x = middle - inner() / view.cw / 2; dirty = true; clamp(); moved();
  };
  const fit = () => {
    view.cw = Math.max(inner() / Math.max(1, steps), 0.05); view.cw = Math.min(view.cw, 24);
    view.ch = Math.max(0.25, Math.min(16, (window.innerHeight * 0.5 - HEAD) / Math.max(1, count)));
    view.x = view.y = 0; dirty = true; clamp(); moved();
  };
  const status = () => {
    const what = pinnedBlock >= 0 ? `block ${pinnedBlock} pinned` : pinnedRequest >= 0 ? `${D.lanes[pinnedRequest].id} pinned` : filter ? `only ${filter.size} of ${D.lanes.length} requests` : "";
    $("status").textContent = what;
  };
  const pin = (request, block) => {
    pinnedRequest = request === pinnedRequest ? -1 : request; pinnedBlock = block === pinnedBlock ? -1 : block;
    dirty = true; status(); draw();
  };
  const violation = () => {
    if (!D.violations.length) return;
    const next = D.violations.find(([column]) => column > at.column) || D.violations[0];
    toViolation(next[0]);
  };
  const toViolation = (column) => {
    view.x = column - inner() / view.cw / 2; dirty = true; clamp();
    go(column, D.touched[column] ?? at.block);
  };

  const keys = {
    ArrowLeft: () => go(at.column - 1), ArrowRight: () => go(at.column + 1),
    ArrowUp: () => go(at.column, at.block - 1), ArrowDown: () => go(at.column, at.block + 1),
    PageUp: () => go(at.column - 10), PageDown: () => go(at.column + 10), Home: () => go(0), End: () => go(steps - 1),
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: fit, v: violation,
    Escape: () => { filter = null; $("filter").value = ""; pin(-1, -1); pinnedRequest = pinnedBlock = -1; dirty = true; status(); draw(); },
    Enter: () => { const span = spanAt(at.block, at.column); if (span && span[4].length) pin(requestOf(span[4][0]), -1); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.target.tagName === "BUTTON" || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = keys[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  const cellOf = (event) => {
    const box = blocks.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return { gutter: x < GUTTER, column: Math.floor(view.x + (x - GUTTER) / view.cw), block: Math.floor(view.y + (y - HEAD) / view.ch), head: y < HEAD };
  };
  blocks.addEventListener("mousemove", (event) => {
    const cell = cellOf(event);
    if (cell.gutter || cell.head || cell.column >= steps || cell.block >= count) return;
    at.column = cell.column; at.block = cell.block; clamp(); describe(); markOperation(); draw();
  });
  blocks.addEventListener("click", (event) => {
    const cell = cellOf(event);
    blocks.focus({ preventScroll: true });
    if (cell.block < 0 || cell.block >= count) return;
    if (cell.gutter) { pin(-1, cell.block); return; }
    const span = spanAt(cell.block, Math.min(steps - 1, cell.column));
    if (span && span[4].length) pin(requestOf(span[4][0]), -1); else pin(-1, -1);
  });
  lanes.addEventListener("click", (event) => {
    const box = lanes.getBoundingClientRect(), n = Math.floor(view.laneY + (event.clientY - box.top) / LANE);
    if (n < D.lanes.length) pin(n, -1);
  });
  const wheel = (event, down) => {
    event.preventDefault();
    if (event.ctrlKey) { zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2); return; }
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    view.x += sideways / view.cw;
    if (!event.shiftKey) down(event.deltaY);
    dirty = true; clamp(); draw();
  };
  blocks.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.deltaX && rowsShown() >= count) return; // nothing to scroll: the page may
    wheel(event, (by) => { view.y += by / view.ch; });
  }, { passive: false });
  lanes.addEventListener("wheel", (event) => {
    if (lanesHeight() / LANE < D.lanes.length) wheel(event, (by) => { view.laneY += by / LANE; });
  }, { passive: false });
  $("in").onclick = () => zoom(1.5); $("out").onclick = () => zoom(1 / 1.5); $("fit").onclick = fit;
  $("theme").onclick = () => setTheme(root.dataset.theme !== "dark");
  $("filter").addEventListener("input", (event) => {
    const words = event.target.value.split(/[\s,]+/).filter(Boolean);
    filter = words.length ? new Set(D.lanes.map((lane, n) => [lane.id, n]).filter(([id]) => words.includes(id)).map(([, n]) => n)) : null;
    dirty = true; status(); draw();
  });
  for (const button of document.querySelectorAll("button[data-column]"))
    button.onclick = () => { toViolation(Number(button.dataset.column)); blocks.focus(); };
  D.operations.forEach(([text, column], n) => {
    const item = document.createElement("li"), number = document.createElement("span"), words = document.createElement("span");
    number.className = "number"; number.textContent = n + 1; words.textContent = text;
    item.append(number, words); item.onclick = () => go(Math.min(column, steps - 1));
    $("operations").append(item);
  });

  const legend = () => {
    const box = $("legend"); box.textContent = "";
    const entry = (paintIt, text) => {
      const sample = document.createElement("canvas"), words = document.createElement("span");
      sample.width = 48; sample.height = 32; words.textContent = text; box.append(sample, words);
      const pen = sample.getContext("2d"); pen.setTransform(2, 0, 0, 2, 0, 0); paintIt(pen);
    };
    const owners = D.owners.length > 1 ? [0, 1] : [0, 0];
    if (D.owners.length) {
      entry((pen) => paint(pen, 1, 1, 22, 14, HELD, owners, false), "held, coloured by request");
      entry((pen) => paint(pen, 1, 1, 22, 14, SHARED, owners, false), "shared: two halves");
      entry((pen) => paint(pen, 1, 1, 22, 14, LEFT, owners, false), "free, hatched: still contains KV, perhaps cached");
    }
    entry((pen) => paint(pen, 1, 1, 22, 14, NULL, [], false), "the null block");
    entry((pen) => { pen.fillStyle = colours.text; pen.fillRect(1, 11, 22, 3); }, "written in this step");
    ["waiting", "prefill", "recompute: once more after a preemption", "decode", "holds blocks, does not run", "preempted", "swapped out"].forEach((text, n) =>
      entry((pen) => { lanePart(pen, 1, 0, 22, n, 0); }, text));
    entry((pen) => { pen.fillStyle = colours.text; pen.font = "12px sans-serif"; pen.fillText("■✕⊘", 0, 12, 24); }, "finished, aborted, refused");
    entry((pen) => { pen.fillStyle = colours.bad; pen.beginPath(); pen.moveTo(8, 2); pen.lineTo(16, 2); pen.lineTo(12, 12); pen.fill(); }, "a preemption");
  };

  window.addEventListener("resize", () => { dirty = true; clamp(); draw(); });
  theme.addEventListener("change", (event) => setTheme(event.matches));
  setTheme(theme.matches);
  fit();
  if (view.cw < 6 && D.violations.length) view.cw = Math.min(16, 6);
  if (D.violations.length) toViolation(D.violations[0][0]); else go(0, 0);
  // For tests and the curious: draws at once and says where it stands.
  window.kvconform = { at, view, drawNow: () => { dirty = true; drawNow(); }, step: (key) => { keys[key](); drawNow(); } };
})();
