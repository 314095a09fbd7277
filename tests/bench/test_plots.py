"""Figures as SVG: everything is drawn, inside of its panel, and the committed ones are those of the committed JSON."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from bench import _plots, redraw
from bench._plots import Panel, Series

SVG = "{http://www.w3.org/2000/svg}"
LINES = (Series("a", (1.0, None, 100.0), "#111111"), Series("floor", (0.5, 1.0, 2.0), "#222222", dash="4 3"))
BARS = (Series("a & b", (1.0, 2.0, None), "#111111"), Series("c", (3.0, 1.0, 1.0), "#222222"))
PLACES = ("1", "2", "32")


def drawn(*panels, notes=()):
    return ElementTree.fromstring(_plots.figure("title", panels, columns=len(panels), height=200, notes=notes))


def words(root):
    return ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]


def rects(root, colour):
    """Bars of a colour, without the legend's: left, top, width, height."""
    found = [one for one in root.iter(f"{SVG}rect") if one.get("fill") == colour and one.get("width") != "14"]
    return [tuple(float(one.get(name)) for name in ("x", "y", "width", "height")) for one in found]


def test_lines_have_their_values_on_a_logarithmic_axis_and_skip_what_was_not_measured():
    root = drawn(Panel("p", "batch", "ms", PLACES, LINES, log=True, bounds=(0.1, 1000.0)))
    a, floor = (one.get("points").split() for one in root.iter(f"{SVG}polyline"))
    assert (len(a), len(floor)) == (2, 3)
    (_, low), (_, high) = (map(float, one.split(",")) for one in a)
    field = 200 - _plots.TOP - _plots.BOTTOM
    assert low - high == pytest.approx(field / 2, abs=0.2)  # two of four decades
    assert {"title", "p", "batch", "ms (log)", "a", "floor", *PLACES, "0.1", "1", "10", "100", "1000"} == set(
        words(root)
    )


def test_values_of_another_commit_are_hollow():
    of_another = LINES[0]._replace(older=frozenset({2}))
    root = drawn(Panel("p", "batch", "ms", PLACES, (of_another,), log=True))
    assert [one.get("fill") for one in root.iter(f"{SVG}circle")] == [
        "#111111",
        "#111111",
        "white",
    ]  # the legend's first


def test_stacked_bars_stand_on_each_other_with_their_sum_above():
    root = drawn(Panel("p", "step", "ms", PLACES, BARS, kind="stacked"))
    below, above = rects(root, "#111111"), rects(root, "#222222")
    for (x, y, wide, _), (left, top, width, height) in zip(below, above, strict=True):
        assert (left, width) == (x, wide)
        assert top + height == pytest.approx(y, abs=0.2)
    assert above[0][3] == pytest.approx(3 * above[1][3], abs=0.3)
    assert {"4.00", "3.00", "1.00"} <= set(words(root))
    assert "a & b" in words(root)


def test_bars_of_a_place_stand_side_by_side():
    root = drawn(Panel("p", "step", "ms", PLACES, BARS, kind="bars", log=True))
    (first, second), (other, *_) = rects(root, "#111111"), rects(root, "#222222")
    assert other[0] == pytest.approx(first[0] + first[2], abs=0.2)
    assert second[0] > other[0] + other[2]
    assert first[1] + first[3] == pytest.approx(second[1] + second[3], abs=0.2)


def test_panels_of_one_scale_reach_as_far_as_the_largest_of_them():
    small = Panel("p", "step", "ms", PLACES, BARS, kind="stacked")
    large = small._replace(series=(*BARS, Series("d", (0.0, 96.0, 0.0), "#333333")))
    first, second = _plots.alike([small, large])
    assert first.bounds == second.bounds == pytest.approx((0.0, 99 * 1.08))
    assert _plots.bounds([small._replace(series=())]) == (0.1, 1.0)


@pytest.mark.parametrize(("top", "expected"), [
    (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (22.4, [0, 5, 10, 15, 20]), (60, [0, 10, 20, 30, 40, 50, 60]),
])  # fmt: skip
def test_ticks_are_round(top, expected):
    assert _plots.ticks(top) == pytest.approx(expected)


def test_long_notes_and_legends_are_wrapped_inside_of_the_figure():
    many = tuple(Series(f"a series with a name, number {n}", (1.0,), "#111111") for n in range(9))
    root = drawn(Panel("p", "x", "y", ("1",), many), notes=["word " * 60])
    width, height = map(float, root.get("viewBox").split()[2:])
    for text in root.iter(f"{SVG}text"):
        if text.get("x"):
            assert float(text.get("x")) + _plots.LETTER * len("".join(text.itertext())) < width + 20
            assert float(text.get("y")) < height
    assert sum(one.startswith("word") for one in words(root)) > 1


@pytest.mark.parametrize("name", [name for name in redraw.KNOWN if (redraw.RESULTS / f"{name}.json").exists()])
def test_committed_tables_and_plots_are_those_of_the_committed_json(name):
    document = json.loads((redraw.RESULTS / f"{name}.json").read_text("utf-8"))
    text, pictures = redraw.KNOWN[name](document, name)
    again = "`python -m bench.redraw` writes it again"
    assert (redraw.RESULTS / f"{name}.md").read_text("utf-8") == text, again
    for file, picture in pictures.items():
        assert (redraw.RESULTS / file).read_text("utf-8") == picture, again
        assert f"]({file})" in text
        ElementTree.fromstring(picture)
    assert {f"{name}.svg", f"{name}_k.svg"} >= set(re.findall(r"\]\((\S+\.svg)\)", text))
