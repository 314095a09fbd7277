// Small line charts of what the page has seen since it was opened, at most five minutes, and bars of shares.

import { h } from "./dom.js";

export const PERIOD_MS = 2000;
const KEPT_MS = 300000;
const LEAST_MS = 60000;
const WIDTH = 240;
const HEIGHT = 56;

/** The newest samples. Rates come from what has been counted between two of them. */
export class Samples {
  #all = [];
  #last = null;

  add(status, now) {
    const { counters, queue, latency } = status;
    const counted = { now, done: counters.executed, lost: counters.refused + counters.failed, uptime: status.uptime_s };
    const last = this.#last;
    this.#last = counted;
    if (!last || counted.uptime < last.uptime) return; // the first one, or another process
    const seconds = Math.max((now - last.now) / 1000, 0.001);
    this.#all.push({
      at: now,
      served: (counted.done - last.done) / seconds,
      lost: (counted.lost - last.lost) / seconds,
      depth: queue.depth,
      flight: queue.in_flight,
      p50: latency?.p50_ms ?? null,
      p99: latency?.p99_ms ?? null,
    });
    while (this.#all.length && this.#all[0].at < now - KEPT_MS) this.#all.shift();
  }

  get all() {
    return this.#all;
  }
}

/** A tile: a title, the newest values, and their lines. lines: [{name, of, tone, show}], the first is the main one.
 *  marks: times in ms at which something was cut over. */
export function chart(title, samples, lines, marks, now) {
  const newest = samples.at(-1);
  const values = lines.map(({ name, of, show }) => ({ name, text: newest ? show(of(newest)) : "–" }));
  const top = Math.max(1e-9, ...samples.flatMap((one) => lines.map(({ of }) => of(one) ?? 0)));
  const span = Math.min(KEPT_MS, Math.max(LEAST_MS, Math.ceil((now - (samples[0]?.at ?? now)) / 60000) * 60000));
  const x = (at) => WIDTH - ((now - at) / span) * WIDTH;
  const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6);
  const label = `${title}: ${values.map(({ name, text }) => `${name} ${text}`.trim()).join(", ")}`;
  return h("figure", { class: "tile", "data-key": title },
    h("figcaption", {}, title),
    h("div", { class: "values" },
      values.map(({ name, text }, n) => h("span", { class: n ? "second" : "first" }, name && [h("small", {}, name), " "], text))),
    h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      h("line", { class: "ground", x1: 0, x2: WIDTH, y1: HEIGHT - 2, y2: HEIGHT - 2 }),
      marks.filter((at) => at > now - span).map((at) =>
        h("line", { class: "mark", x1: x(at).toFixed(1), x2: x(at).toFixed(1), y1: 0, y2: HEIGHT })),
      [...lines].reverse().map(({ of, tone }) => h("path", { class: tone === "bad" && top < 1e-6 ? "side" : tone, d: path(samples, of, x, y) }))),
    h("p", { class: "scale" }, h("span", {}, `${span / 60000} min ago`), samples.length ? h("span", {}, `top ${lines[0].show(top < 1e-6 ? 0 : top)}`) : null));
}

/** One stroke for each stretch without a gap. */
function path(samples, of, x, y) {
  let pen = false;
  const strokes = samples.map((one) => {
    const value = of(one);
    const move = value === null ? "" : `${pen ? "L" : "M"}${x(one.at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = value !== null;
    return move;
  });
  return strokes.join("");
}

/** A share as a bar, with a tick where it was planned to be. Both in percent. */
export function bar(share, planned, label) {
  return h("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("rect", { class: "rail", width: 100, height: 8 }),
    h("rect", { class: "share", width: share.toFixed(2), height: 8 }),
    h("line", { class: "plan", x1: planned.toFixed(2), x2: planned.toFixed(2), y1: 0, y2: 8 }));
}
