// What the server knows. The key is in a cookie that the first page load set.

export async function get(path, query = {}) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query)) if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  let reply;
  try { reply = await fetch(url); } catch { throw new Error("the dashboard's server does not answer; is `rollart dashboard` still running?"); }
  if (reply.status === 403) throw new Error(await reply.text());
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error || `the server answered ${reply.status}`);
  return found;
}

// Calls back with the state of a run whenever it changes, and what changed in the view; returns a function that stops it.
export function follow(run, view, onChange, onLost) {
  const stream = new EventSource(`/api/stream?${new URLSearchParams({ run, view })}`);
  stream.onmessage = (event) => onChange(JSON.parse(event.data));
  stream.onerror = () => onLost();
  return () => stream.close();
}
