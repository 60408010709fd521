// Swim lanes on a canvas: one square for each trajectory, packed into the cell of its lane and phase; a lane is a task, a
// pool, or a task in a pool. It moves when its
// phase changes. All numbers are in typed arrays, by slot; a trajectory keeps its slot while it lives. Positions are
// computed only when something changed, in one pass without sorting; a frame only writes pixels.

const GAP = 14, LABEL = 116, HEAD = 26, MOVE_MS = 260;
const SHORT = { waiting: "wait", resetting: "reset", generating: "gen", stepping: "step", scoring: "score", training: "train" };
const SIZES = [16, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2];

export function phaseColours() {
  const style = getComputedStyle(document.documentElement);
  return ["waiting", "resetting", "generating", "stepping", "scoring", "ready", "training"].map((name) => style.getPropertyValue(`--${name}`).trim());
}

// The trajectories: columns by slot, and the slots in order of their last change.
function createSlots() {
  const slots = new Map(), rows = [], free = [];
  let capacity = 0, order = new Int32Array(0), count = 0;
  const columns = { lane: Int32Array, phase: Uint8Array, at: Int32Array, x: Float32Array, y: Float32Array, fromX: Float32Array, fromY: Float32Array, moved: Float64Array };
  const all = Object.fromEntries(Object.entries(columns).map(([name, Kind]) => [name, new Kind(0)]));

  function grow() {
    capacity = Math.max(1024, capacity * 2);
    for (const [name, Kind] of Object.entries(columns)) { const wider = new Kind(capacity); wider.set(all[name]); all[name] = wider; }
  }
  // An entry of `order` counts only while the slot says that this is its place: moving one to the end is one write.
  function last(slot) {
    if (count === order.length) {
      const live = [];
      for (let i = 0; i < count; i++) if (all.at[order[i]] === i) live.push(order[i]);
      order = new Int32Array(Math.max(1024, live.length * 3));
      count = live.length;
      live.forEach((each, i) => { order[i] = each; all.at[each] = i; });
    }
    order[count] = slot; all.at[slot] = count++;
  }
  return {
    all, rows, slots,
    get size() { return slots.size; },
    put(row) {
      let slot = slots.get(row[0]);
      if (slot === undefined) {
        slot = free.length ? free.pop() : slots.size;
        if (slot >= capacity) grow();
        slots.set(row[0], slot);
        all.x[slot] = NaN; all.moved[slot] = 0;
      }
      rows[slot] = row; all.phase[slot] = row[2];
      last(slot);
      return slot;
    },
    remove(id) {
      const slot = slots.get(id);
      if (slot === undefined) return;
      slots.delete(id); free.push(slot); rows[slot] = null; all.at[slot] = -1;
    },
    // Calls back with every slot, the one that has been in its phase longest first.
    each(visit) { for (let i = 0; i < count; i++) { const slot = order[i]; if (all.at[slot] === i) visit(slot); } },
  };
}

export function createLanes(canvas, { onPick, onHover }) {
  const dots = createSlots(), all = dots.all;
  let phases = [], names = { tasks: [], pools: [] }, by = "task", lanes = [], numbers = new Map(), width = 0, height = 0, size = 5, columns = [], bands = [], dirty = true, moving = 0, hovered = -1, atRest = true;
  let starts = new Int32Array(1), placed = new Int32Array(0), image = null, pixels = null, base = null; // slots by cell, cells by lane and phase
  let colours = [], ink = "", soft = "", line = "", faint = "", back = "", stopped = false;
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });

  function readTheme() {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
    colours = phaseColours(); ink = of("--ink"); soft = of("--soft"); line = of("--line"); faint = of("--hover"); back = of("--card"); dirty = true;
  }

  // A lane stays once it was seen, so that nothing jumps when it is empty for a moment.
  const keyOf = ([, task, , pool]) => (by === "task" ? `${task}` : by === "pool" ? ` ${pool}` : `${task} ${pool}`);
  function setLane(slot) {
    const key = keyOf(dots.rows[slot]);
    if (!numbers.has(key)) { numbers.set(key, -1); reorder(); } else all.lane[slot] = numbers.get(key);
  }
  function reorder() {
    lanes = [...numbers.keys()].map((key) => { const [task, pool] = key.split(" "); return { key, task: task === "" ? -1 : Number(task), pool: pool === undefined ? undefined : Number(pool) }; });
    lanes.sort((p, q) => p.task - q.task || (p.pool ?? 0) - (q.pool ?? 0));
    lanes.forEach((lane, i) => numbers.set(lane.key, i));
    for (const slot of dots.slots.values()) { const known = numbers.get(keyOf(dots.rows[slot])); if (known !== undefined) all.lane[slot] = known; }
  }
  const poolName = (number) => (number < 0 ? "not routed" : names.pools[number] || "default");
  const titles = (lane) => [lane.task < 0 ? poolName(lane.pool) : names.tasks[lane.task], lane.task >= 0 && lane.pool !== undefined ? poolName(lane.pool) : ""];

  function intoCells() {
    const cells = lanes.length * phases.length, counts = new Int32Array(cells + 1);
    dots.each((slot) => { counts[all.lane[slot] * phases.length + all.phase[slot] + 1]++; });
    for (let cell = 0; cell < cells; cell++) counts[cell + 1] += counts[cell];
    starts = counts;
    if (placed.length < dots.size) placed = new Int32Array(dots.size * 2);
    const next = counts.slice();
    dots.each((slot) => { placed[next[all.lane[slot] * phases.length + all.phase[slot]]++] = slot; });
  }
  const inCell = (lane, phase) => { const cell = lane * phases.length + phase; return starts[cell + 1] - starts[cell]; };

  // The largest square at which every cell has room, so that ten trajectories and twenty thousand both fill the picture.
  function layout() {
    const ratio = Math.min(2, devicePixelRatio || 1), narrow = canvas.clientWidth < 560;
    width = canvas.clientWidth;
    intoCells();
    const label = narrow ? 0 : LABEL, column = (width - label) / Math.max(1, phases.length), inner = column - 10;
    columns = phases.map((_, i) => label + i * column);
    const room = Math.max(220, Math.min(560, innerHeight * 0.55));
    const rowsAt = (px) => { const wide = Math.max(1, Math.floor(inner / px)); return lanes.map((_, lane) => Math.max(1, ...phases.map((_, phase) => Math.ceil(inCell(lane, phase) / wide)))); };
    size = SIZES.find((px) => rowsAt(px).reduce((sum, n) => sum + n * px + GAP + (narrow ? 16 : 8), 0) <= room) || 2;
    bands = []; let top = HEAD;
    for (const n of rowsAt(size)) { const tall = Math.max(narrow ? 34 : by === "both" ? 36 : 30, n * size + GAP + (narrow ? 14 : 0)); bands.push([top, tall]); top += tall; }
    height = top + 4;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const wide = Math.max(1, Math.floor(inner / size)), now = performance.now();
    for (let lane = 0, cell = 0; lane < lanes.length; lane++) for (let phase = 0; phase < phases.length; phase++, cell++) {
      const left = columns[phase] + 4, above = bands[lane][0] + GAP / 2 + (narrow ? 14 : 0);
      for (let i = starts[cell]; i < starts[cell + 1]; i++) {
        const nth = i - starts[cell];
        goTo(placed[i], left + (nth % wide) * size, above + Math.floor(nth / wide) * size, now);
      }
    }
    drawBase();
    dirty = false;
  }

  function goTo(slot, x, y, now) {
    const { x: xs, y: ys, fromX, fromY, moved } = all;
    if (Number.isNaN(xs[slot])) { xs[slot] = fromX[slot] = x; ys[slot] = fromY[slot] = y; return; }
    if (Math.abs(xs[slot] - x) < 0.01 && Math.abs(ys[slot] - y) < 0.01) return;
    const left = now - moved[slot] < MOVE_MS ? (1 - (now - moved[slot]) / MOVE_MS) ** 3 : 0;
    fromX[slot] = xs[slot] + (fromX[slot] - xs[slot]) * left; fromY[slot] = ys[slot] + (fromY[slot] - ys[slot]) * left;
    xs[slot] = x; ys[slot] = y; moved[slot] = now; moving = now + MOVE_MS;
  }

  // What does not move: labels and lines, kept as pixels.
  function fit(text, room) {
    let end = text.length;
    while (end > 1 && context.measureText(end < text.length ? `${text.slice(0, end)}…` : text).width > room) end--;
    return end < text.length ? `${text.slice(0, end)}…` : text;
  }
  function drawBase() {
    context.fillStyle = back; context.fillRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "left";
    const narrow = width < 560, number = (n) => n.toLocaleString("en");
    context.fillStyle = soft;
    phases.forEach((name, phase) => context.fillText(narrow ? SHORT[name] || name : `${name} ${number(lanes.reduce((sum, _, lane) => sum + inCell(lane, phase), 0))}`, columns[phase] + 4, 12));
    bands.forEach(([top, tall], lane) => {
      const [title, below] = titles(lanes[lane]), held = number(starts[(lane + 1) * phases.length] - starts[lane * phases.length]);
      const same = lane > 0 && below && lanes[lane - 1].task === lanes[lane].task; // the name of a task stands once above its pools
      context.fillStyle = same ? faint : line; context.fillRect(same && !narrow ? LABEL : 0, top, width, same ? 0.5 : 1);
      context.fillStyle = ink; if (!same || narrow) context.fillText(fit(narrow && below ? `${title} · ${below}` : title, narrow ? width - 8 : LABEL - 8), 2, top + (narrow ? 10 : 13));
      context.fillStyle = soft;
      if (!narrow && below) context.fillText(fit(tall > 40 || same ? `${below} · ${held}` : below, LABEL - 10), 2, top + (same ? 13 : 27));
      else if (!narrow && tall > 34) context.fillText(held, 2, top + 28);
    });
    image = context.getImageData(0, 0, canvas.width, canvas.height);
    pixels = new Uint32Array(image.data.buffer);
    base = pixels.slice();
  }

  // Squares are written as pixels: twenty thousand take a millisecond, which as rectangles of the canvas take thirty.
  function draw(now) {
    const ratio = canvas.width / width, wide = canvas.width, tall = canvas.height, still = now > moving;
    const side = Math.max(1, Math.round((size > 4 ? size - 1.5 : size > 2 ? size - 1 : size - 0.5) * ratio));
    const { x: xs, y: ys, fromX, fromY, moved } = all, packedColours = colours.map(packed);
    pixels.set(base);
    for (let cell = 0; cell < starts.length - 1; cell++) {
      const colour = packedColours[cell % phases.length];
      for (let i = starts[cell]; i < starts[cell + 1]; i++) {
        const slot = placed[i];
        let x = xs[slot], y = ys[slot];
        if (!still && now - moved[slot] < MOVE_MS) { const left = 1 - (now - moved[slot]) / MOVE_MS, rest = left * left * left; x += (fromX[slot] - x) * rest; y += (fromY[slot] - y) * rest; }
        const column = Math.round(x * ratio), row = Math.round(y * ratio);
        if (column < 0 || row < 0 || column + side > wide || row + side > tall) continue;
        for (let r = row * wide + column, end = r + side * wide; r < end; r += wide) for (let p = r; p < r + side; p++) pixels[p] = colour;
      }
    }
    context.putImageData(image, 0, 0);
    if (hovered >= 0 && dots.rows[hovered]) { const edge = side / ratio + 4; context.strokeStyle = ink; context.lineWidth = 2; context.strokeRect(xs[hovered] - 2, ys[hovered] - 2, edge, edge); }
  }

  function frame(now) {
    if (stopped) return;
    if (canvas.clientWidth !== width) dirty = true;
    const had = dirty;
    if (dirty && canvas.clientWidth) layout();
    if (pixels && (had || now < moving || !atRest)) { draw(now); atRest = now >= moving; } // the last frame is one at rest
    requestAnimationFrame(frame);
  }

  function pick(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, near = (size + 3) ** 2;
    for (let i = 0; i < starts[starts.length - 1]; i++) {
      const slot = placed[i], far = (all.x[slot] + size / 2 - x) ** 2 + (all.y[slot] + size / 2 - y) ** 2;
      if (far < near) { near = far; best = slot; }
    }
    return best;
  }
  function hover(slot) {
    if (slot === hovered) return;
    hovered = slot; canvas.style.cursor = slot >= 0 ? "pointer" : ""; atRest = false;
    onHover(slot >= 0 ? dots.rows[slot] : null);
  }
  // Arrow keys go through the squares, by lane, phase and age; up and down go to the next cell.
  function step(key) {
    const total = starts[starts.length - 1], here = hovered < 0 ? -1 : placed.indexOf(hovered);
    if (!total) return;
    if (here < 0) { hover(placed[0]); return; }
    const cell = starts.findLastIndex((start) => start <= here);
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: starts[cell + 1], ArrowUp: starts[starts.findLastIndex((start) => start < starts[cell])] ?? 0 }[key];
    hover(placed[Math.min(total - 1, Math.max(0, next))]);
  }
  canvas.addEventListener("pointermove", (event) => hover(pick(event)));
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("click", (event) => { const found = dots.rows[pick(event)]; if (found) onPick(found); });
  canvas.addEventListener("blur", () => hover(-1));
  canvas.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) { step(event.key); event.preventDefault(); }
    else if (event.key === "Enter" && dots.rows[hovered]) onPick(dots.rows[hovered]);
  });
  addEventListener("themechange", readTheme);
  readTheme();
  requestAnimationFrame(frame);

  return {
    // Rows come with the newest change first.
    set(change) {
      phases = change.phases; names = change;
      if (change.all) {
        const kept = new Set(change.rows.map((row) => row[0]));
        for (const id of [...dots.slots.keys()]) if (!kept.has(id)) dots.remove(id);
      }
      for (let i = change.rows.length - 1; i >= 0; i--) setLane(dots.put(change.rows[i]));
      for (const id of change.gone) dots.remove(id);
      if (change.rows.length || change.gone.length || change.all) dirty = true;
    },
    get size() { return dots.size; },
    names: () => lanes.map((lane) => titles(lane).filter(Boolean).join(" on ")),
    // Lanes by "task", "pool" or "both".
    group(how) {
      if (how === by) return;
      by = how; numbers = new Map();
      for (const slot of dots.slots.values()) numbers.set(keyOf(dots.rows[slot]), -1);
      reorder(); dirty = true;
    },
    destroy() { stopped = true; removeEventListener("themechange", readTheme); },
  };
}

// "#rrggbb" as a pixel of ImageData.
function packed(colour) {
  const value = Number.parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

