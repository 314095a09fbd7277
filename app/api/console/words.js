// Numbers, times and states as people read them.

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

/** An ISO time in this place's hours; with the day where that is not today. */
export function when(iso) {
  const at = new Date(iso);
  if (Number.isNaN(at.getTime())) return iso ?? "";
  return at.toDateString() === new Date().toDateString() ? clock.format(at) : `${day.format(at)} ${clock.format(at)}`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

/** Two times side by side: "8.1 → 8.4 ms". */
export function change(before, after) {
  const [one, other] = [milliseconds(before), typeof after === "string" ? after : milliseconds(after)];
  const unit = / m?s$/.exec(one)?.[0];
  return `${unit && other.endsWith(unit) ? one.slice(0, -unit.length) : one} → ${other}`;
}

export function amount(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

export function duration(seconds) {
  const s = Math.floor(seconds ?? 0);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const short = (id) => (id ? String(id).slice(0, 10) : "–");

const TONES = {
  active: "good", live: "good", running: "good",
  ready: "calm",
  verifying: "busy", loading: "busy", validating: "busy", warming: "busy",
  stale: "warn", waiting: "warn", incomplete: "warn",
  rejected: "bad", killed: "bad",
};

/** The tone of a state: good, calm, busy, warn, bad, or quiet. */
export const tone = (state) => TONES[state] ?? "quiet";
