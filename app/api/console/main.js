// The console: asks for the status every two seconds, shows it, and does what the person confirms.

import { Refusal, decide, read, token } from "./api.js";
import { PERIOD_MS, Samples, chart } from "./charts.js";
import { h, morph } from "./dom.js";
import * as views from "./views.js";
import { amount, milliseconds } from "./words.js";

const WAIT_S = 20;
const KEPT_EVENTS = 500;
const TOLD_MS = 8000;
const [pill, view, locked, said, ask] = ["pill", "view", "locked", "said", "ask"].map((id) => document.getElementById(id));

let samples = new Samples();
let status = null;
let others = [];
let events = { boot: "", last: 0, found: [] };
let timer = 0;
let telling = 0;
let asking = false;

// ---- asking -----------------------------------------------------------------------------------------------------------

async function look() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    const found = await read("status");
    others = found.active && !found.active.policies.ok ? (await read("policies")).errors : [];
    await lookAtEvents();
    status = found;
    samples.add(status, Date.now());
    show();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    refused(error);
  } finally {
    asking = false;
    timer = setTimeout(look, document.hidden ? 10 * PERIOD_MS : PERIOD_MS);
  }
}

async function lookAtEvents() {
  const { boot, events: found } = await read(`events?after=${events.last}`);
  if (boot !== events.boot && events.boot) { // another process: its numbers begin anew
    events = { boot, last: 0, found: [] };
    return;
  }
  events = { boot, last: found.at(-1)?.number ?? events.last, found: [...events.found, ...found].slice(-KEPT_EVENTS) };
}

function refused(error) {
  if (error.status === 401) {
    const wrong = token.get() !== "";
    lock(wrong ? "The server does not know this token. Type another one." : "Its admin API answers to nobody without one, so there is nothing to show yet.");
  } else {
    light(error.status === 0 ? "Unreachable" : `Error ${error.status}`, "bad");
    view.classList.add("old");
    if (!status) tell(error.message, "bad");
  }
}

// ---- showing ----------------------------------------------------------------------------------------------------------

function light(text, kind) {
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
}

function lock(why) {
  token.forget();
  [status, samples, events] = [null, new Samples(), { boot: "", last: 0, found: [] }];
  view.hidden = true;
  view.replaceChildren();
  document.getElementById("forget").hidden = true;
  document.getElementById("why").textContent = why;
  light("Locked", "warn");
  if (locked.hidden) {
    locked.hidden = false;
    document.getElementById("token").focus();
  }
}

function show() {
  locked.hidden = true;
  view.hidden = false;
  view.classList.remove("old");
  document.getElementById("forget").hidden = token.get() === "";
  light(status.ready ? "Ready" : status.reasons.some((one) => one.startsWith("draining")) ? "Draining" : "Not ready", status.ready ? "good" : "bad");
  document.title = `${status.ready ? "" : "! "}Widebeam ${location.host}`;
  morph(view, h("div", { id: "view" },
    views.notes(status),
    tiles(),
    h("div", { class: "columns", "data-key": "columns" },
      h("div", { "data-key": "left" }, views.serving(status), views.memory(status), views.versions(status), views.events(events.found)),
      h("div", { "data-key": "right" }, views.cutovers(status), views.policies(status, others), views.experiments(status)))));
}

function tiles() {
  const now = Date.now();
  const marks = status.history.map((one) => Date.parse(one.at));
  const rate = (value) => `${amount(value)}/s`;
  const { all } = samples;
  return h("div", { class: "tiles", "data-key": "tiles" },
    chart("Answers", all, [{ name: "", of: (one) => one.served, tone: "main", show: rate }], marks, now),
    chart("Latency", all, [{ name: "p99", of: (one) => one.p99, tone: "main", show: milliseconds },
      { name: "p50", of: (one) => one.p50, tone: "side", show: milliseconds }], marks, now),
    chart("Queue", all, [{ name: "waiting", of: (one) => one.depth, tone: "main", show: amount },
      { name: "running", of: (one) => one.flight, tone: "side", show: amount }], marks, now),
    chart("Refused or failed", all, [{ name: "", of: (one) => one.lost, tone: "bad", show: rate }], marks, now));
}

function tell(text, kind) {
  clearTimeout(telling);
  said.className = `said ${kind}`;
  said.textContent = text;
  telling = setTimeout(() => { said.textContent = ""; }, kind === "bad" ? 2 * TOLD_MS : TOLD_MS);
}

// ---- doing ------------------------------------------------------------------------------------------------------------

const ACTIONS = {
  rollback: ({ snapshot, names, epoch }) => ({
    title: "Roll back?", text: `New requests go to ${names} at once.`, yes: "Roll back",
    send: () => decide(`snapshots/${snapshot}:rollback`, epoch), done: `Rolled back to ${names}.`,
  }),
  promote: ({ snapshot, names, epoch }) => ({
    title: "Promote?", text: `New requests go to ${names} at once.`, yes: "Promote",
    send: () => decide(`snapshots/${snapshot}:promote`, epoch), done: `Promoted ${names}.`,
  }),
  ask: ({ kind, version, epoch }) => ({
    title: "Promote?", text: `New requests go to ${kind} ${version} as soon as it is in memory.`, yes: "Promote",
    send: () => decide("snapshots:promote", epoch, { [kind]: version }, WAIT_S), done: `Promoted ${kind} ${version}.`,
  }),
  unpin: ({ epoch }) => ({
    title: "Unpin?", text: "The server follows release.json, or the newest versions, again.", yes: "Unpin",
    send: () => decide("snapshots:unpin", epoch), done: "Unpinned.",
  }),
};

async function confirmed({ title, text, yes }, pins) {
  document.getElementById("ask-title").textContent = title;
  document.getElementById("ask-text").textContent = text;
  document.getElementById("ask-note").textContent = pins ? "This pins these versions: newer ones prepare, and wait until you unpin." : "";
  document.getElementById("ask-yes").textContent = yes;
  ask.returnValue = "no";
  ask.showModal();
  await new Promise((resolve) => ask.addEventListener("close", resolve, { once: true }));
  return ask.returnValue === "yes";
}

async function act(target) {
  const action = ACTIONS[target.dataset.action]({ ...target.dataset, epoch: status.epoch }); // of what the person sees now
  const { send, done } = action;
  if (!(await confirmed(action, target.dataset.action !== "unpin"))) return;
  tell("Asking the server …", "");
  try {
    const { status: code } = await send();
    tell(code === 202 ? "Under way: the server loads it, and cuts over by itself." : done, "good");
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    tell(error.status === 412 ? "Something changed since this page looked. Nothing was done; look again."
      : error.status === 403 ? `${error.message}. Nothing was done.` : `Not done: ${error.message}`, "bad");
  }
  await look();
}

document.addEventListener("click", (event) => {
  const target = event.target.closest?.("[data-action]");
  if (target && status && !ask.open) act(target);
});

locked.addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  token.set(field.value.trim());
  field.value = "";
  tell("", "");
  look();
});

document.getElementById("forget").addEventListener("click", () => lock("The token is forgotten."));
document.addEventListener("visibilitychange", () => document.hidden || look());
document.getElementById("where").textContent = location.host;
look();
