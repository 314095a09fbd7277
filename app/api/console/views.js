// What the status document looks like. Every function gives one section; nothing here asks the server or keeps anything.

import { bar } from "./charts.js";
import { h } from "./dom.js";
import { amount, change, duration, milliseconds, short, tone, when } from "./words.js";

const ORDER = ["rejected", "verifying", "loading", "validating", "warming", "incomplete", "waiting", "active", "ready",
  "draining", "discovered", "retired"];
const OFFERED = ["discovered", "waiting", "ready", "retired"];
const SHOWN_CUTOVERS = 12;
const SHOWN_VERSIONS = 24;
const SHOWN_EVENTS = 40;
const KINDS = { weights: "Weights", vocab: "Vocab", takedowns: "Take-downs", engine: "Engine" };

const badge = (state) => h("span", { class: `badge ${tone(state)}` }, state);
const time = (iso) => h("time", { datetime: iso, title: iso }, when(iso));
const code = (text) => h("code", {}, text);

function section(id, title, note, ...body) {
  return h("section", { class: "card", id, "data-key": id, "aria-labelledby": `${id}-title` },
    h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), note && h("p", { class: "quiet" }, note)),
    body);
}

const empty = (text) => h("p", { class: "empty" }, text);

function button(label, action, facts, about) {
  return h("button", { type: "button", class: "small", "data-action": action, "aria-label": `${label}: ${about}`, ...facts }, label);
}

/** What keeps the server from being ready, and what an operator should know first. */
export function notes(status) {
  const found = status.reasons.map((reason) => ["bad", "Not ready", reason]);
  const { problem } = status.desired ?? {};
  if (problem) found.push(["warn", "What is asked for cannot be", said(problem)]);
  const edit = status.deployment ?? {};
  if (edit.reason) found.push(["warn", "The edit of deployment.toml was refused", said(edit.reason)]);
  for (const key of edit.restart ?? []) found.push(["warn", "Needs a restart", key]);
  for (const one of status.killed ?? []) found.push(["warn", "Killed", `${one.name} (by ${one.by})`]);
  return h("div", { "data-key": "notes", class: "notes" }, found.map(([kind, title, text]) =>
    h("p", { class: `note ${kind}` }, h("strong", {}, title), " ", text)));
}

const said = (one) => `${one.location ? `${one.location}: ` : ""}${one.message} (${one.code})`;

export function serving(status) {
  const { active } = status;
  if (!active) return section("serving", "Serving", "Nothing yet", empty("No snapshot is active. What keeps it is above and under Versions."));
  const policies = Object.values(status.policies);
  const live = policies.filter((one) => one.state === "live").length;
  const fact = (name, value, under) => h("div", {}, h("dt", {}, name), h("dd", {}, value), under && h("dd", { class: "quiet" }, under));
  return section("serving", "Serving", follows(status),
    h("dl", { class: "facts" },
      fact("Weights", active.weights.version, ["since ", time(active.weights.since)]),
      fact("Vocab", active.vocab.version, ["since ", time(active.vocab.since)]),
      fact("Policies", `${live} of ${policies.length} live`, `generation ${active.policies.generation}`),
      fact("Take-downs", active.takedowns?.version || "none", null)),
    h("p", { class: "quiet ids" }, "snapshot ", code(short(active.snapshot)), " · contract ", code(short(active.contract)),
      " · ", status.device, " · up ", duration(status.uptime_s)));
}

/** Who decides what serves. */
function follows(status) {
  const { asked = {}, by } = status.desired ?? {};
  const versions = Object.entries(asked).map(([kind, version]) => `${kind} ${version}`).join(", ");
  if (!by) return "Follows the newest versions";
  if (by !== "state/pin.json") return `${by} asks for ${versions}`;
  return [`Pinned to ${versions} `, button("Unpin", "unpin", {}, "follow release.json or the newest versions again")];
}

const numbers = new Intl.Collator(undefined, { numeric: true });

/** Whether a snapshot's versions are older than those of the one that serves. */
const isOlder = (one, active) =>
  (numbers.compare(one.weights.version, active.weights.version) || numbers.compare(one.vocab.version, active.vocab.version)) < 0;

export function memory(status) {
  const rows = (status.snapshots ?? []).map((one) => {
    const names = `weights ${one.weights.version} · vocab ${one.vocab.version}`;
    const facts = { "data-snapshot": one.id, "data-names": names };
    const earlier = one.deployment === "earlier" && one.state === "ready";
    const act = one.state !== "ready" || earlier ? null
      : isOlder(one, status.active) ? button("Roll back", "rollback", facts, names) : button("Promote", "promote", facts, names);
    return h("li", { "data-key": one.id },
      h("div", { class: "what" }, badge(one.state), " ", h("strong", {}, names)),
      h("div", { class: "more quiet" }, code(short(one.id)), ` · ${amount(one.requests)} in flight`, earlier ? " · made for an earlier deployment.toml" : "",
        one.active_at ? [" · served since ", time(one.active_at)] : [" · ready since ", time(one.ready_at)]),
      h("div", { class: "act" }, act));
  });
  return section("memory", "In memory", "Going back to one of these loads nothing",
    rows.length ? h("ul", { class: "rows" }, rows) : empty("No snapshot is in memory."));
}

export function versions(status) {
  const all = [...status.artifacts].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || (a.at < b.at ? 1 : -1));
  const bad = all.filter((one) => one.state === "rejected").length;
  const rows = all.slice(0, SHOWN_VERSIONS).map((one) => {
    const name = `${KINDS[one.kind] ?? one.kind} ${one.version}`;
    const offer = ["weights", "vocab"].includes(one.kind) && OFFERED.includes(one.state);
    return h("li", { "data-key": `${one.kind}/${one.version}` },
      h("div", { class: "what" }, badge(one.state), " ", h("strong", {}, name)),
      h("div", { class: "more quiet" }, time(one.at), one.digest && [" · ", code(short(one.digest))]),
      h("div", { class: "act" }, offer && button("Promote", "ask", { "data-kind": one.kind, "data-version": one.version }, name)),
      one.reason && h("div", { class: `reason ${tone(one.state)}` },
        h("p", {}, one.reason.message), h("p", { class: "quiet" }, code(one.reason.code), one.reason.location && [" at ", code(one.reason.location)])));
  });
  return section("versions", "Versions", bad ? `${bad} refused` : "What is on the disk, and what became of it",
    rows.length ? h("ul", { class: "rows" }, rows) : empty("weights/ and vocab/ are empty."),
    all.length > SHOWN_VERSIONS && empty(`and ${all.length - SHOWN_VERSIONS} more`));
}

export function cutovers(status) {
  const rows = [...status.history].reverse().slice(0, SHOWN_CUTOVERS).map((one) => {
    const { p99_before_ms: before, p99_after_ms: after } = one;
    const open = after === null && Date.now() - Date.parse(one.at) < 11000;
    return h("tr", { "data-key": `${one.at}/${one.to}` },
      h("td", {}, time(one.at)),
      h("td", {}, h("span", { class: "cause" }, one.cause), " ", h("span", { class: "quiet" }, h("span", { class: "whole" }, `weights ${one.weights ?? "?"}`), " · ", h("span", { class: "whole" }, `vocab ${one.vocab ?? "?"}`))),
      h("td", { class: "number" }, milliseconds(one.hold_ms)),
      h("td", { class: "number" }, change(before, open ? "…" : after)));
  });
  return section("cutovers", "Cutovers", "Latency of the 10 s before and after each",
    h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "When"), h("th", { scope: "col" }, "What"),
        h("th", { scope: "col", class: "number" }, "Hold"), h("th", { scope: "col", class: "number" }, "p99 before → after"))),
      h("tbody", {}, rows)),
    rows.length === 0 && empty("Nothing has been cut over."));
}

/** One finding of a file: the place, what is wrong, the line with what is marked in it, and a way out. */
function finding(one) {
  const line = one.source ?? "";
  const [from, to] = [Math.max(0, one.col - 1), Math.max(one.col, one.end_col - 1)];
  return h("li", { class: `finding ${one.severity === "error" ? "bad" : "warn"}` },
    h("p", {}, one.message),
    line && h("pre", { tabindex: "0", "aria-label": `line ${one.line}` }, h("span", { class: "lineno" }, String(one.line)),
      line.slice(0, from), h("mark", {}, line.slice(from, to)), line.slice(to)),
    h("p", { class: "quiet" }, code(one.code), " ", one.file, one.line ? `:${one.line}:${one.col}` : "", one.help && ` · ${one.help}`));
}

const findings = (errors) => (errors?.length ? h("ul", { class: "findings" }, errors.map(finding)) : null);

export function policies(status, others) {
  const entries = Object.entries(status.policies);
  const rank = (one) => (one.errors.length ? 0 : 1);
  entries.sort((a, b) => rank(a[1]) - rank(b[1]) || (a[0] < b[0] ? -1 : 1));
  const rows = entries.map(([name, one]) => h("li", { "data-key": name },
    h("div", { class: "what" }, badge(one.state), " ", h("strong", {}, name)),
    h("div", { class: "more quiet" }, code(short(one.policy_id)), one.live_since && [" · since ", time(one.live_since)],
      one.stale_seconds !== undefined && ` · the file has been wrong for ${duration(one.stale_seconds)}`),
    findings(one.errors)));
  const told = new Set(entries.flatMap(([, one]) => one.errors.map((error) => JSON.stringify(error))));
  const rest = others.filter((error) => !told.has(JSON.stringify(error)));
  const broken = entries.filter(([, one]) => one.errors.some((error) => error.severity === "error")).length + (rest.length ? 1 : 0);
  return section("policies", "Policies", broken ? "What was good before serves on" : "All files are in force",
    rows.length ? h("ul", { class: "rows" }, rows) : empty("No policies have been read yet."), findings(rest));
}

export function experiments(status) {
  const rows = Object.entries(status.experiments).map(([name, one]) => {
    const served = one.served ?? {};
    const total = Object.values(served).reduce((sum, count) => sum + count, 0);
    const weight = Object.values(one.weights ?? {}).reduce((sum, share) => sum + share, 0) || 1;
    const arms = Object.entries(one.weights ?? {}).map(([arm, share]) => {
      const [planned, got] = [(100 * share) / weight, total ? (100 * (served[arm] ?? 0)) / total : 0];
      return h("li", { "data-key": arm },
        h("span", { class: "arm" }, arm),
        bar(got, planned, `${arm}: ${got.toFixed(1)} % served, ${planned.toFixed(0)} % planned`),
        h("span", { class: "number" }, `${got.toFixed(1)} %`, h("span", { class: "quiet" }, ` of ${planned.toFixed(0)} % · ${amount(served[arm] ?? 0)}`)));
    });
    const warns = [...(one.alerts ?? []).map((alert) => `${alert.arm}: ${alert.metric} is ${amount(alert.value)}, above ${amount(alert.above)}`),
      ...(one.srm ? [`the arms' sizes are no accident (p = ${one.srm_p})`] : [])];
    return h("li", { "data-key": name },
      h("div", { class: "what" }, badge(one.killed ? "killed" : one.state), " ", h("strong", {}, name)),
      h("div", { class: "more quiet" }, one.layer && `layer ${one.layer}`, one.coverage !== undefined && ` · ${amount(100 * one.coverage)} % of units`),
      arms.length ? h("ul", { class: "arms" }, arms) : null,
      warns.map((text) => h("p", { class: "note warn" }, text)), findings(one.errors));
  });
  return section("experiments", "Experiments", "Served beside planned, since the start or the last change of the split",
    rows.length ? h("ul", { class: "rows" }, rows) : empty("No experiments."));
}

export function events(found) {
  const rows = [...found].reverse().slice(0, SHOWN_EVENTS).map((one) => h("li", { "data-key": String(one.number) },
    time(one.at), " ", h("strong", {}, one.event), " ", h("span", { class: "quiet" }, facts(one))));
  return section("events", "Events", null, rows.length ? h("ol", { class: "events", reversed: true }, rows) : empty("Nothing has happened."));
}

function facts(event) {
  const { number, at, event: name, digest, kind, version, before, state, reason, ...rest } = event;
  if (name === "artifact") {
    return `${kind} ${version}: ${before ? `${before} → ` : ""}${state}${reason ? ` (${reason.code})` : ""}`;
  }
  return Object.entries(rest).filter(([, value]) => value !== null)
    .map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · ");
}
