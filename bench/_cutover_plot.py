"""p99 over time while versions change, as an SVG: the paper's figure 20 (RecoGEM 5.6)."""

from __future__ import annotations

import numpy as np

from bench._cutover_samples import Floats, Row, Samples

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 320, 60, 40, 16
COLOURS = {"live": "#1f6feb", "naive": "#c0392b"}


def plot(parts: Row) -> str:
    """p99 of each second's requests over time, one line a mode, updates shaded, as an SVG: the paper's figure 20."""
    curves = {mode: _curve(Samples.of(part)) for mode, part in parts.items()}
    span = max(float(x[-1]) for x, _ in curves.values()) or 1.0
    top = max(float(y.max()) for _, y in curves.values()) * 1.2
    low = min(float(y.min()) for _, y in curves.values()) / 1.5
    scale = (HEIGHT - BOTTOM - TOP) / (np.log10(top) - np.log10(low))

    def x_of(seconds: float) -> float:
        return LEFT + seconds / span * (WIDTH - LEFT - 10)

    def y_of(ms: float) -> float:
        return HEIGHT - BOTTOM - (np.log10(ms) - np.log10(low)) * scale

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']  # fmt: skip
    first = next(iter(parts.values()))
    marks = np.array(first["marks"]) - first["marks"][0]
    out.append(f'<rect x="{x_of(marks[1]):.1f}" y="{TOP}" width="{x_of(marks[2]) - x_of(marks[1]):.1f}" '
               f'height="{HEIGHT - BOTTOM - TOP}" fill="#f2f2f2"/>')  # fmt: skip
    for one in first["updates"]:
        at = x_of(one["active"] - first["marks"][0])
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}" stroke="#888"/>'
        )
    for ms in _ticks(low, top):
        y, right = y_of(ms), WIDTH - 10
        out += [
            f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{ms:g}</text>',
        ]
    for seconds in np.linspace(0, span, 7):
        out.append(
            f'<text x="{x_of(seconds):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds:.0f}</text>'
        )
    for mode, (xs, ys) in curves.items():
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))
        dashes = ' stroke-dasharray="4 3"' if mode == "naive" else ""
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[mode]}" stroke-width="1.3"{dashes}/>')
        out.append(
            f'<text x="{LEFT + 10 + 60 * (mode == "naive")}" y="{TOP + 12}" fill="{COLOURS[mode]}">{mode}</text>'
        )
    out.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">seconds; shaded: while versions are '
        f"published, ticks: cutovers of the first mode ({span:.0f} s in all); p99 of each second, ms (log)</text></svg>"
    )
    return "\n".join(out) + "\n"


def _curve(samples: Samples) -> tuple[Floats, Floats]:
    inside = (samples.stretch >= 1) & (samples.stretch <= 3)
    at, latency = samples.intended[inside] - samples.marks[0], samples.latency[inside]
    second = at.astype(int)
    cuts = np.flatnonzero(np.diff(second)) + 1
    groups = np.split(latency, cuts)
    return second[np.concatenate([[0], cuts])] + 0.5, np.array([np.quantile(one, 0.99) for one in groups])


def _ticks(low: float, top: float) -> list[float]:
    return [m * 10.0**e for e in range(-1, 6) for m in (1, 2, 5) if low <= m * 10.0**e <= top]
