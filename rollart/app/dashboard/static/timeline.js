// The timeline on a canvas: tracks of services, and below them trajectories. Far out, trajectories are areas (how many
// were in which phase); close up, each is a lane of slices. Wheel or pinch zooms, drag moves, shift and drag
// zooms to a range.

import { seconds } from "./format.js";

const ROW = 18, LABEL = 120, HEAD = 24, AREA = 150, LANE = 9;
const KINDS = ["--resetting", "--generating", "--stepping", "--scoring"];

export function createTimeline(canvas, { onWindow, onPick, onHover }) {
  const context = canvas.getContext("2d", { alpha: false });
  let data = null, low = 0, high = 1, end = 1, width = 0, height = 0, theme = {}, dragging = null, placed = [], stopped = false, wanted = true, live = true;

  function readTheme() {
    const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
    theme = { ink: of("--ink"), soft: of("--soft"), faint: of("--faint"), line: of("--line"), card: of("--card"), bad: of("--bad"), warn: of("--warn"), kinds: KINDS.map(of), tracks: ["--training", "--c7", "--c0", "--c4", "--c2", "--c3", "--c6", "--c5"].map(of) };
    wanted = true;
  }
  const label = () => (canvas.clientWidth < 560 ? 0 : LABEL);
  const px = (t) => label() + (t - low) / (high - low) * (width - label());
  const at = (x) => low + (x - label()) / (width - label()) * (high - low);

  function show(a, b) {
    const span = Math.max(0.02, Math.min(b - a, end * 1.02));
    low = Math.max(-end * 0.01, Math.min(a, end * 1.01 - span)); high = low + span;
    live = high >= end * 0.999 && low <= 0;
    wanted = true;
    onWindow(low, high);
  }

  function ticks() {
    const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((s) => (high - low) / s < (width - label()) / 80) || 86400;
    const found = [];
    for (let t = Math.ceil(low / step) * step; t < high; t += step) if (t >= 0) found.push([t, step]);
    return found;
  }
  function time(t, step) {
    if (step < 1) return `${t.toFixed(step < 0.01 ? 3 : 2)} s`;
    const h = Math.floor(t / 3600), m = Math.floor(t / 60) % 60, s = Math.round(t % 60), two = (n) => String(n).padStart(2, "0");
    return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
  }

  function lanes() { // first lane of its task that is free, as in the exported trace
    const rows = data.trajectories.map((trajectory) => ({ trajectory, slices: [] }));
    for (const [row, kind, a, b] of data.slices) if (rows[row]) rows[row].slices.push([kind, a, b]);
    const byTask = new Map();
    for (const row of rows.sort((p, q) => p.trajectory.started - q.trajectory.started)) {
      const task = byTask.get(row.trajectory.task) || byTask.set(row.trajectory.task, []).get(row.trajectory.task);
      const until = row.trajectory.seconds === null ? end : row.trajectory.started + row.trajectory.seconds;
      let lane = task.findIndex((free) => free.until <= row.trajectory.started);
      if (lane < 0) { lane = task.length; task.push({ until: 0, rows: [] }); }
      task[lane].until = until; task[lane].rows.push({ ...row, until });
    }
    return byTask;
  }

  function draw() {
    if (!data || !canvas.clientWidth) return;
    width = canvas.clientWidth;
    const ratio = Math.min(2, devicePixelRatio || 1), found = data.slices ? lanes() : null;
    const below = found ? [...found.values()].reduce((sum, task) => sum + Math.min(task.length, 70) * LANE + 22, 0) : AREA + 20;
    height = HEAD + data.tracks.length * ROW + 14 + below + 12;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`; }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.card; context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "left";
    placed = [];
    for (const [t, step] of ticks()) { context.fillStyle = theme.line; context.fillRect(Math.round(px(t)), HEAD - 6, 1, height); context.fillStyle = theme.faint; context.fillText(time(t, step), px(t) + 3, 9); }
    context.save(); context.beginPath(); context.rect(label(), 0, width, height); context.clip();
    data.tracks.forEach((track, i) => drawTrack(track, i));
    const top = HEAD + data.tracks.length * ROW + 14;
    if (found) drawLanes(found, top); else drawAreas(top);
    for (const notice of data.notices) if (notice.level !== "info" && notice.t >= low && notice.t <= high) { context.fillStyle = notice.level === "bad" ? theme.bad : theme.warn; context.fillRect(px(notice.t), HEAD - 4, 1.5, height); placed.push([px(notice.t) - 3, 0, 7, HEAD, notice.text]); }
    if (dragging?.to !== undefined) { context.fillStyle = theme.ink; context.globalAlpha = 0.12; context.fillRect(px(Math.min(dragging.t, dragging.to)), 0, Math.abs(px(dragging.to) - px(dragging.t)), height); context.globalAlpha = 1; }
    context.restore();
    context.strokeStyle = theme.card; context.lineWidth = 3; context.lineJoin = "round"; // names stand on the slices of a narrow screen
    data.tracks.forEach((track, i) => { const name = clip(track.name, label() ? 17 : 40), y = HEAD + i * ROW + ROW / 2; context.fillStyle = theme.soft; if (!label()) context.strokeText(name, 2, y); context.fillText(name, 2, y); });
  }

  function drawTrack(track, i) {
    const y = HEAD + i * ROW + 2;
    const fill = context.fillStyle = track.name === "failures" ? theme.bad : theme.tracks[i % theme.tracks.length];
    for (const [a, b, what] of track.slices) {
      const x = px(a), wide = Math.max(1.2, px(b) - x);
      context.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, ROW - 5);
      placed.push([x, y, wide, ROW - 5, `${track.name}${what >= 0 ? ` ${what}` : ""}: ${((b - a) < 1 ? `${((b - a) * 1000).toFixed(1)} ms` : `${(b - a).toFixed(2)} s`)}`]);
      if (wide > 26 && what >= 0) { context.fillStyle = "#fff"; context.fillText(String(what), Math.max(x, label()) + 4, y + 7); context.fillStyle = fill; }
    }
  }

  function drawAreas(top) {
    const buckets = data.density[0].length, bottom = top + AREA, sums = new Array(buckets).fill(0);
    const most = Math.max(1, ...data.density[0].map((_, i) => data.density.reduce((sum, kind) => sum + kind[i], 0)));
    const x = (i) => px(data.from + (data.to - data.from) * i / buckets);
    data.density.forEach((kind, k) => {
      context.fillStyle = theme.kinds[k];
      context.beginPath(); context.moveTo(x(0), bottom - sums[0] / most * AREA);
      for (let i = 0; i < buckets; i++) { const y = bottom - (sums[i] + kind[i]) / most * AREA; context.lineTo(x(i), y); context.lineTo(x(i + 1), y); }
      for (let i = buckets - 1; i >= 0; i--) { const y = bottom - sums[i] / most * AREA; context.lineTo(x(i + 1), y); context.lineTo(x(i), y); }
      context.fill();
      kind.forEach((value, i) => { sums[i] += value; });
    });
    context.fillStyle = theme.faint; context.fillText(`up to ${Math.round(most).toLocaleString("en")} trajectories at once${label() ? "; zoom in to see each" : ""}`, label() + 4, top - 6);
  }

  function drawLanes(found, top) {
    for (const [task, rows] of found) {
      context.fillStyle = theme.faint; context.fillText(`${task}${rows.length > 70 ? `: 70 of ${rows.length} lanes` : ""}`, label() + 4, top + 4); top += 14;
      for (const lane of rows.slice(0, 70)) {
        for (const row of lane.rows) {
          const x = px(row.trajectory.started), wide = Math.max(1, px(row.until) - x);
          context.fillStyle = row.trajectory.outcome?.endsWith("_failed") ? theme.bad : theme.line; context.fillRect(x, top + 1, wide - 0.5, LANE - 2);
          placed.push([x, top, wide, LANE, `${row.trajectory.id}: ${row.trajectory.outcome}`, row.trajectory.id]);
          for (const [kind, a, b] of row.slices) { context.fillStyle = theme.kinds[kind]; context.fillRect(px(a), top + 1, Math.max(0.7, px(b) - px(a) - 0.3), LANE - 2); }
        }
        top += LANE;
      }
      top += 8;
    }
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return [placed.findLast(([left, top, wide, tall]) => x >= left && x <= left + wide && y >= top && y <= top + tall), x];
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [, x] = hit(event), t = at(x), factor = Math.exp((event.deltaY || 0) * 0.0016);
    event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) ? shift((event.deltaX || event.deltaY) / width) : show(t - (t - low) * factor, t + (high - t) * factor);
  }, { passive: false });
  const shift = (share) => show(low + share * (high - low), high + share * (high - low));
  canvas.addEventListener("pointerdown", (event) => { dragging = { x: event.clientX, low, high, moved: false, select: event.shiftKey, t: at(hit(event)[1]) }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (dragging) { const by = (dragging.x - event.clientX) / (width - label()) * (dragging.high - dragging.low); if (Math.abs(dragging.x - event.clientX) > 3) dragging.moved = true;
      if (dragging.moved && dragging.select) { dragging.to = at(hit(event)[1]); wanted = true; onHover(`${seconds(Math.abs(dragging.to - dragging.t))} selected`, Math.min(dragging.t, dragging.to)); } else if (dragging.moved) show(dragging.low + by, dragging.high + by);
      return; }
    const [found, x] = hit(event);
    onHover(found ? found[4] : null, at(x));
  });
  canvas.addEventListener("pointerup", (event) => { const was = dragging; dragging = null; if (was?.select && was.moved) { show(Math.min(was.t, was.to), Math.max(was.t, was.to)); return; } if (was && !was.moved) { const [found] = hit(event); if (found?.[5]) onPick(found[5]); } });
  canvas.addEventListener("keydown", (event) => {
    const middle = (low + high) / 2, span = high - low;
    const zoomIn = () => show(middle - span / 4, middle + span / 4), zoomOut = () => show(middle - span, middle + span);
    const act = { ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), a: () => shift(-0.2), d: () => shift(0.2), w: zoomIn, s: zoomOut, "+": zoomIn, "=": zoomIn, "-": zoomOut, 0: () => show(0, end) }[event.key];
    if (act) { act(); event.preventDefault(); event.stopPropagation(); }
  });
  addEventListener("themechange", readTheme);
  readTheme();
  (function frame() { if (stopped) return; if (wanted || canvas.clientWidth !== width) { wanted = false; draw(); } requestAnimationFrame(frame); })();

  return {
    set(found) { data = found; const grew = found.end !== end; end = found.end; if (live && grew) { low = 0; high = end * 1.005; } wanted = true; },
    zoom: (factor) => { const middle = (low + high) / 2, half = (high - low) * factor / 2; show(middle - half, middle + half); },
    all: () => { live = true; show(0, end * 1.005); live = true; },
    window: () => (live ? {} : { from: low, to: high }),
    destroy() { stopped = true; removeEventListener("themechange", readTheme); },
  };
}

const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
