// Numbers as people read them, always with their unit.

const SI = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, letter] of SI) if (size >= limit) return `${trim(value / limit)}${letter}`;
  return size >= 100 || Number.isInteger(value) ? String(Math.round(value)) : trim(value);
}

export function trim(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e-", "e−").replace("e+", "e");
  return Number(value.toPrecision(digits)).toString().replace("-", "−");
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${trim(value * 1e6, 2)} µs`;
  if (size < 1) return `${trim(value * 1e3, 3)} ms`;
  if (size < 120) return `${trim(value, 3)} s`;
  return clock(value);
}

export function clock(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const whole = Math.max(0, Math.round(value));
  const [d, h, m, s] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  if (d) return `${d}d ${h}h ${two(m)}m`;
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [limit, letter] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= limit) return `${trim(value / limit)} ${letter}`;
  return `${Math.round(value)} B`;
}

// Half the 95% Wilson interval of a share of n episodes, as [low, high].
export function wilson(share, n) {
  if (!n) return [share, share];
  const z = 1.96, z2 = z * z / n;
  const middle = (share + z2 / 2) / (1 + z2);
  const half = (z / (1 + z2)) * Math.sqrt(share * (1 - share) / n + z2 / (4 * n));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}
