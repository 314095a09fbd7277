"""Figures of measurements as SVG, by no library: panels of lines, bars or stacked bars over evenly spaced places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

WIDTH = 900
"""Pixels of a figure."""
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 26, 44
"""Around the field of a panel."""
LETTER, LINE = 6.9, 17
"""Pixels of a letter and of a line of text at 12 pixels; a little too many."""
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, GREY, BLACK = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#8c564b", "#888888", "#222222",
)  # fmt: skip
"""Told apart by those who see few colours, too."""
Values = tuple[float | None, ...]


class Series(NamedTuple):
    """name: in the legend · values: one for each place, None = not measured · dash: of a line that is a bound and no
    measurement, say · older: places whose values are hollow, being of another commit"""

    name: str
    values: Values
    colour: str
    dash: str = ""
    older: frozenset[int] = frozenset()


class Panel(NamedTuple):
    """title above · x, y: what the axes say, with units · places: along x · log: of y · kind: "stacked": the series of
    a place stand on each other · bounds: of y, None = its own"""

    title: str
    x: str
    y: str
    places: tuple[str, ...]
    series: tuple[Series, ...]
    kind: Literal["lines", "bars", "stacked"] = "lines"
    log: bool = False
    bounds: tuple[float, float] | None = None


def bounds(panels: Iterable[Panel]) -> tuple[float, float]:
    """What an axis must reach to hold the values of all panels, all of them linear or all logarithmic."""
    found, log = list[float](), False
    for panel in panels:
        log = panel.log
        places = [
            [x for x in values if x is not None] for values in zip(*(s.values for s in panel.series), strict=True)
        ]
        found += [sum(some) for some in places] if panel.kind == "stacked" else [x for some in places for x in some]
    if not found:
        return 0.1, 1.0
    return (min(found) / 1.4, max(found) * 1.4) if log else (0.0, max(found) * 1.08)


def alike(panels: Sequence[Panel]) -> list[Panel]:
    """The same panels with one scale."""
    return [one._replace(bounds=bounds(panels)) for one in panels]


def figure(title: str, panels: Sequence[Panel], *, columns: int, height: int, notes: Sequence[str] = ()) -> str:
    """An SVG. columns: panels beside each other · height: of a panel in pixels · notes: sentences below."""
    legend = list(_legend(panels))
    above = 34 + LINE * (1 + legend[-1].line)
    below = [line for note in notes for line in wrapped(note)]
    rows, width = -(-len(panels) // columns), WIDTH / columns
    foot = above + rows * height
    out = [begin(WIDTH, foot + LINE * len(below) + 10), f'<text x="10" y="20" font-size="14">{escape(title)}</text>']
    out += [_entry(one) for one in legend]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        out += _panel(panel, column * width, above + row * height, width, height)
    out += [f'<text x="12" y="{foot + 12 + LINE * n}" fill="#444">{escape(one)}</text>' for n, one in enumerate(below)]
    return "\n".join([*out, "</svg>"]) + "\n"


def begin(width: float, height: float) -> str:
    """An SVG's start: a white ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
    )


def log_ticks(low: float, top: float) -> list[float]:
    """Powers of ten between two bounds, with 2 and 5 times them where those are few."""
    times = (1, 2, 5) if top / low < 500 else (1,)
    return [m * 10.0**e for e in range(-6, 7) for m in times if low <= m * 10.0**e <= top]


def ticks(top: float) -> list[float]:
    """Round numbers from 0 up to a bound, about five."""
    size = 10.0 ** math.floor(math.log10(top / 5))
    step = next(m * size for m in (1, 2, 5, 10) if top / (m * size) <= 6)
    return [n * step for n in range(int(top / step) + 1)]


def wrapped(note: str) -> Iterator[str]:
    """Its lines."""
    line = ""
    for word in note.split():
        if line and (len(line) + 1 + len(word)) * LETTER > WIDTH - 24:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


class _Key(NamedTuple):
    """A name of the legend: how it is drawn, in which line, pixels from the left."""

    series: Series
    bar: bool
    line: int
    x: float


def _legend(panels: Sequence[Panel]) -> Iterator[_Key]:
    """Each name once, as it is drawn in the first panel that has it."""
    known = {one.name: (one, panel.kind != "lines") for panel in reversed(panels) for one in reversed(panel.series)}
    line, x = 0, 0.0
    for one, bar in reversed(known.values()):
        wide = 42 + LETTER * len(one.name)
        if x and x + wide > WIDTH - 24:
            line, x = line + 1, 0.0
        yield _Key(one, bar, line, x)
        x += wide


def _entry(key: _Key) -> str:
    """A name of the legend, drawn."""
    one, x, y = key.series, 12 + key.x, 40 + LINE * key.line
    text = f'<text x="{x + 28:.1f}" y="{y + 4}">{escape(one.name)}</text>'
    if key.bar:
        return f'<rect x="{x + 8:.1f}" y="{y - 6}" width="14" height="11" fill="{one.colour}"/>{text}'
    line = f'<line x1="{x + 2:.1f}" x2="{x + 24:.1f}" y1="{y}" y2="{y}" stroke="{one.colour}"{_dashes(one)}/>'
    mark = "" if one.dash else f'<circle cx="{x + 13:.1f}" cy="{y}" r="3" fill="{one.colour}"/>'
    return f"{line}{mark}{text}"


def _dashes(one: Series) -> str:
    return f' stroke-dasharray="{one.dash}"' if one.dash else ""


class _Field(NamedTuple):
    """Where a panel's values are drawn, in pixels, and from which to which."""

    left: float
    top: float
    width: float
    height: float
    low: float
    high: float
    log: bool
    places: int

    def x(self, place: float) -> float:
        """The middle of a place."""
        return self.left + (place + 0.5) * self.width / self.places

    def y(self, value: float) -> float:
        """Of a value."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.top + self.height * (1 - share)


def _panel(panel: Panel, x: float, y: float, width: float, height: float) -> list[str]:
    low, high = panel.bounds or bounds([panel])
    size = width - LEFT - RIGHT, height - TOP - BOTTOM
    field = _Field(x + LEFT, y + TOP, *size, low, high, panel.log, len(panel.places))
    draw = {"lines": _lines, "bars": _bars, "stacked": _stacks}[panel.kind]
    middle, foot = field.left + field.width / 2, field.top + field.height
    return [
        f'<text x="{middle:.1f}" y="{y + 16:.1f}" text-anchor="middle">{escape(panel.title)}</text>',
        *_grid(field, log_ticks(low, high) if panel.log else ticks(high)),
        *(f'<text x="{field.x(n):.1f}" y="{foot + 16:.1f}" text-anchor="middle">{escape(place)}</text>'
          for n, place in enumerate(panel.places)),
        f'<text x="{middle:.1f}" y="{foot + 33:.1f}" text-anchor="middle">{escape(panel.x)}</text>',
        f'<text transform="translate({x + 14:.1f} {field.top + field.height / 2:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(panel.y)}{" (log)" if panel.log else ""}</text>',
        *draw(panel, field),
    ]  # fmt: skip


def _grid(field: _Field, levels: Sequence[float]) -> Iterator[str]:
    right = field.left + field.width
    for level in levels:
        y = field.y(level)
        yield f'<line x1="{field.left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{field.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>'
    foot = field.top + field.height
    yield f'<line x1="{field.left:.1f}" x2="{right:.1f}" y1="{foot:.1f}" y2="{foot:.1f}" stroke="#888"/>'


def _lines(panel: Panel, field: _Field) -> Iterator[str]:
    """Through the places that have a value."""
    for one in panel.series:
        at = [(n, field.x(n), field.y(value)) for n, value in enumerate(one.values) if value is not None]
        points = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in at)
        yield f'<polyline points="{points}" fill="none" stroke="{one.colour}" stroke-width="1.5"{_dashes(one)}/>'
        for n, x, y in at if not one.dash else ():
            fill = "white" if n in one.older else one.colour
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{one.colour}"/>'


def _bars(panel: Panel, field: _Field) -> Iterator[str]:
    """Beside each other."""
    wide, foot = 0.84 * field.width / field.places / len(panel.series), field.top + field.height
    for number, one in enumerate(panel.series):
        for n, value in enumerate(one.values):
            if value is not None:
                x, y = field.x(n) + (number - len(panel.series) / 2) * wide, field.y(value)
                yield _bar(x, y, wide, foot - y, one.colour)


def _stacks(panel: Panel, field: _Field) -> Iterator[str]:
    """On each other, with their sum above."""
    wide = 0.6 * field.width / field.places
    for n in range(field.places):
        total = 0.0
        for one in panel.series:
            value, y = one.values[n] or 0.0, field.y(total)
            total += value
            yield _bar(field.x(n) - wide / 2, field.y(total), wide, y - field.y(total), one.colour)
        if total:
            form = ".2f" if total < 10 else ".3g"
            yield f'<text x="{field.x(n):.1f}" y="{field.y(total) - 4:.1f}" text-anchor="middle">{total:{form}}</text>'


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
