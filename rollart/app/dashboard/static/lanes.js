// Swim lanes on a canvas: one square for each trajectory, packed into the cell of its task and phase. It moves when its
// phase changes. Positions are computed only when something changed; a frame only writes pixels.

const GAP = 14, LABEL = 96, HEAD = 26, MOVE_MS = 260;

export function phaseColours() {
  const style = getComputedStyle(document.documentElement);
  return ["waiting", "resetting", "generating", "stepping", "scoring", "ready", "training"].map((name) => style.getPropertyValue(`--${name}`).trim());
}

export function createLanes(canvas, { onPick, onHover }) {
  const dots = new Map(); // id -> {row, x, y, fromX, fromY, moved}
  let phases = [], tasks = [], width = 0, height = 0, size = 5, columns = [], bands = [], dirty = true, moving = 0, frames = 0, hovered = null, byPhase = [], image = null, pixels = null, base = null, atRest = true;
  let colours = phaseColours(), ink = "", soft = "", line = "", stopped = false;
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });

  function readTheme() {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
    colours = phaseColours(); ink = of("--ink"); soft = of("--soft"); line = of("--line"); lanesBack = of("--card"); dirty = true;
  }
  let lanesBack = "#fff";

  // The largest square at which every cell has room, so that ten trajectories and twenty thousand both fill the picture.
  function layout() {
    const ratio = Math.min(2, devicePixelRatio || 1), narrow = canvas.clientWidth < 560;
    width = canvas.clientWidth;
    const label = narrow ? 0 : LABEL;
    const cells = tasks.map(() => phases.map(() => []));
    for (const dot of dots.values()) cells[dot.row[1]]?.[dot.row[2]]?.push(dot);
    const column = (width - label) / Math.max(1, phases.length);
    columns = phases.map((_, i) => label + i * column);
    const inner = column - 10, room = Math.max(220, Math.min(560, innerHeight * 0.55));
    const rowsAt = (px) => cells.map((row) => Math.max(1, ...row.map((cell) => Math.ceil(cell.length / Math.max(1, Math.floor(inner / px))))));
    size = 2;
    for (const px of [16, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2]) if (rowsAt(px).reduce((sum, n) => sum + n * px + GAP + (narrow ? 16 : 8), 0) <= room) { size = px; break; }
    const rows = rowsAt(size);
    bands = []; let top = HEAD;
    rows.forEach((n) => { const tall = Math.max(narrow ? 34 : 30, n * size + GAP + (narrow ? 14 : 0)); bands.push([top, tall]); top += tall; });
    height = top + 4;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const perRow = Math.max(1, Math.floor(inner / size)), now = performance.now();
    byPhase = phases.map((_, phase) => cells.map((row) => row[phase]).flat());
    cells.forEach((row, task) => row.forEach((cell, phase) => {
      // Oldest first, by when it entered the phase: a dot that stays in front is one that is stuck.
      cell.sort((p, q) => p.row[4] - q.row[4]);
      cell.forEach((dot, i) => {
        const x = columns[phase] + 4 + (i % perRow) * size, y = bands[task][0] + GAP / 2 + (narrow ? 14 : 0) + Math.floor(i / perRow) * size;
        if (dot.x === undefined) { dot.x = dot.fromX = x; dot.y = dot.fromY = y; dot.moved = 0; return; }
        if (dot.x !== x || dot.y !== y) {
          const at = position(dot, now);
          dot.fromX = at[0]; dot.fromY = at[1]; dot.x = x; dot.y = y; dot.moved = now; moving = now + MOVE_MS;
        }
      });
    }));
    drawBase();
    dirty = false;
  }

  function position(dot, now) {
    const share = dot.moved ? Math.min(1, (now - dot.moved) / MOVE_MS) : 1;
    if (share >= 1) return [dot.x, dot.y];
    const ease = 1 - (1 - share) ** 3;
    return [dot.fromX + (dot.x - dot.fromX) * ease, dot.fromY + (dot.y - dot.fromY) * ease];
  }

  // What does not move: labels and lines, kept as pixels.
  function drawBase() {
    context.fillStyle = lanesBack; context.fillRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "left";
    const narrow = width < 560, byTask = tasks.map(() => 0);
    for (const list of byPhase) for (const dot of list) byTask[dot.row[1]]++;
    context.fillStyle = soft;
    phases.forEach((name, i) => context.fillText(narrow ? name.slice(0, 5) : `${name} ${byPhase[i].length.toLocaleString("en")}`, columns[i] + 4, 12));
    bands.forEach(([top, tall], i) => {
      context.fillStyle = line; context.fillRect(0, top, width, 1);
      context.fillStyle = ink; context.fillText(clip(tasks[i], narrow ? 40 : 14), 2, top + (narrow ? 10 : 14));
      context.fillStyle = soft;
      if (!narrow && tall > 34) context.fillText(byTask[i].toLocaleString("en"), 2, top + 29);
    });
    image = context.getImageData(0, 0, canvas.width, canvas.height);
    pixels = new Uint32Array(image.data.buffer);
    base = pixels.slice();
  }

  // Squares are written as pixels: twenty thousand take a millisecond, which as rectangles of the canvas take thirty.
  function draw(now) {
    const ratio = canvas.width / width, wide = canvas.width, tall = canvas.height, still = now > moving;
    const side = Math.max(1, Math.round((size > 4 ? size - 1.5 : size > 2 ? size - 1 : size - 0.5) * ratio));
    pixels.set(base);
    byPhase.forEach((list, phase) => {
      const colour = packed(colours[phase]);
      for (const dot of list) {
        let x = dot.x, y = dot.y;
        const left = still || !dot.moved ? 0 : 1 - Math.min(1, (now - dot.moved) / MOVE_MS);
        if (left > 0) { const back = left * left * left; x += (dot.fromX - x) * back; y += (dot.fromY - y) * back; }
        const column = Math.round(x * ratio), row = Math.round(y * ratio);
        if (column < 0 || column + side > wide) continue;
        for (let r = Math.max(0, row); r < Math.min(tall, row + side); r++) pixels.fill(colour, r * wide + column, r * wide + column + side);
      }
    });
    context.putImageData(image, 0, 0);
    if (hovered && dots.has(hovered.row[0])) { const [x, y] = position(hovered, now), edge = side / ratio; context.strokeStyle = ink; context.lineWidth = 2; context.strokeRect(x - 2, y - 2, edge + 4, edge + 4); }
  }

  function frame(now) {
    if (stopped) return;
    if (canvas.clientWidth !== width) dirty = true;
    const had = dirty;
    if (dirty && canvas.clientWidth) layout();
    if (pixels && (had || now < moving || !atRest)) { draw(now); frames++; atRest = now >= moving; } // the last frame is one at rest
    requestAnimationFrame(frame);
  }

  function pick(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, near = (size + 3) ** 2;
    for (const dot of dots.values()) {
      const far = (dot.x + size / 2 - x) ** 2 + (dot.y + size / 2 - y) ** 2;
      if (far < near) { near = far; best = dot; }
    }
    return best;
  }
  canvas.addEventListener("pointermove", (event) => { const found = pick(event); if (found !== hovered) { hovered = found; canvas.style.cursor = found ? "pointer" : ""; atRest = false; onHover(found?.row, event); } });
  canvas.addEventListener("pointerleave", () => { hovered = null; atRest = false; onHover(null); });
  canvas.addEventListener("click", (event) => { const found = pick(event); if (found) onPick(found.row); });
  addEventListener("themechange", readTheme);
  readTheme();
  requestAnimationFrame(frame);

  return {
    set(change) {
      phases = change.phases; tasks = change.tasks;
      if (change.all) {
        const kept = new Set(change.rows.map((row) => row[0]));
        for (const id of dots.keys()) if (!kept.has(id)) dots.delete(id);
      }
      for (const row of change.rows) { const dot = dots.get(row[0]); if (dot) dot.row = row; else dots.set(row[0], { row, moved: 0 }); }
      for (const id of change.gone) dots.delete(id);
      if (change.rows.length || change.gone.length || change.all) dirty = true;
    },
    get size() { return dots.size; },
    get frames() { return frames; },
    redraw() { dirty = true; },
    // For the benchmark: every square moves, all the time.
    shake() { for (const dot of dots.values()) dot.row[2] = (dot.row[2] + 1) % phases.length; dirty = true; },
    destroy() { stopped = true; removeEventListener("themechange", readTheme); },
  };
}

// "#rrggbb" as a pixel of ImageData.
function packed(colour) {
  const value = Number.parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
