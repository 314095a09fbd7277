"""p99 over time while versions change, as an SVG: the paper's figure 20 (RecoGEM 5.6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench._cutover_samples import Floats, Row, Samples
from bench._plots import begin as svg
from bench._plots import log_ticks

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RATE = 900, 400, 60, 120, 16, 56
"""Pixels; RATE: of the curve of answers a second, below the other."""
COLOURS = {"live": "#1f6feb", "naive": "#c0392b"}


def plot(parts: Row) -> str:
    """p99 of each second's requests over time, below it how many there were, one line a mode, seconds since its first
    update, as an SVG: the paper's figure 20."""
    samples = {mode: Samples.of(part) for mode, part in parts.items()}
    curves = {mode: _curve(some, lambda one: float(np.quantile(one, 0.99))) for mode, some in samples.items()}
    rates = {mode: _curve(some, lambda one: float(len(one))) for mode, some in samples.items()}
    most = max(float(y.max()) for _, y in rates.values())
    begin = min(float(x[0]) for x, _ in curves.values()) - 0.5
    span = max(float(x[-1]) for x, _ in curves.values()) + 0.5 - begin
    top = max(float(y.max()) for _, y in curves.values()) * 1.2
    low = min(float(y.min()) for _, y in curves.values()) / 1.5
    scale = (HEIGHT - BOTTOM - TOP) / (np.log10(top) - np.log10(low))

    def x_of(seconds: float) -> float:
        return LEFT + (seconds - begin) / span * (WIDTH - LEFT - 10)

    def y_of(ms: float) -> float:
        return HEIGHT - BOTTOM - (np.log10(ms) - np.log10(low)) * scale

    out = [svg(WIDTH, HEIGHT), *_grid(x_of, y_of, (begin, begin + span), log_ticks(low, top))]
    for number, (mode, part) in enumerate(parts.items()):
        out += _updates(x_of, part, mode, HEIGHT - BOTTOM - 6 * number)
    for number, (mode, (xs, ys)) in enumerate(curves.items()):
        out += [
            _line(mode, xs, ys, x_of, y_of),
            f'<text x="{LEFT + 10 + 60 * number}" y="{TOP + 12}" fill="{COLOURS[mode]}">{mode}</text>',
        ]
        out.append(_line(mode, *rates[mode], x_of, lambda rate: HEIGHT - 22 - rate / most * RATE))
    out += [
        f'<text x="{LEFT - 6}" y="{HEIGHT - 22 - RATE + 4}" text-anchor="end">{most:.0f}/s</text>',
        f'<text x="{LEFT - 6}" y="{HEIGHT - 18}" text-anchor="end">0</text>',
    ]
    out.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">seconds since the first update; shaded: updates, '
        "a tick at each cutover; p99 of each second, ms (log); below: answers a second</text></svg>"
    )
    return "\n".join(out) + "\n"


def _grid(
    x_of: Callable[[float], float], y_of: Callable[[float], float], bounds: tuple[float, float], levels: list[float]
) -> list[str]:
    out = []
    for ms in levels:
        y, right = y_of(ms), WIDTH - 10
        out += [
            f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{ms:g}</text>',
        ]
    step = next(one for one in (1, 2, 5, 10, 20, 30, 60, 120, 300) if (bounds[1] - bounds[0]) / one <= 12)
    for seconds in np.arange(np.ceil(bounds[0] / step) * step, bounds[1], step):
        x = x_of(float(seconds))
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds:.0f}</text>')
    return out


def _updates(x_of: Callable[[float], float], part: Row, mode: str, foot: int) -> list[str]:
    """The stretch of a mode's updates, shaded, and its cutovers."""
    since = part["marks"][1]
    left, right = x_of(0.0), x_of(part["marks"][2] - since)
    out = [f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM - TOP}" '
           f'fill="{COLOURS[mode]}" opacity="0.06"/>']  # fmt: skip
    for one in part["updates"]:
        x = x_of(one["active"] - since)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot - 5}" stroke="{COLOURS[mode]}"/>')
    return out


def _line(mode: str, xs: Floats, ys: Floats, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))
    dashes = ' stroke-dasharray="4 3"' if mode == "naive" else ""
    return f'<polyline points="{points}" fill="none" stroke="{COLOURS[mode]}" stroke-width="1.3"{dashes}/>'


def _curve(samples: Samples, of: Callable[[Floats], float]) -> tuple[Floats, Floats]:
    """A figure of the latencies of each second's requests."""
    inside = (samples.stretch >= 1) & (samples.stretch <= 3)
    at, latency = samples.intended[inside] - samples.marks[1], samples.latency[inside]
    second = np.floor(at).astype(int)
    cuts = np.flatnonzero(np.diff(second)) + 1
    groups = np.split(latency, cuts)
    return second[np.concatenate([[0], cuts])] + 0.5, np.array([of(one) for one in groups])
