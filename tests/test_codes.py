"""docs/codes.md names every code of a refusal and every event of the log, and none that is not there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error"}
FILES = {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "app").rglob("*.py"))}
Place = int | str | None


def word(node: ast.AST | None) -> str | None:
    """A constant that may be a code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[a-z][a-z0-9_]*", node.value):
        return node.value
    return None


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def takers() -> dict[tuple[Path | None, str], Place]:
    """Where a function takes a code: the place of its argument. What begins with _ is its file's own."""
    found: dict[tuple[Path | None, str], Place] = {(None, "Rejected"): 0, (None, "Reason"): 0}
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [one.arg for one in node.args.args if one.arg not in {"self", "cls"}]
                if "code" in names:
                    found[path if node.name.startswith("_") else None, node.name] = names.index("code")
    return found


def codes() -> Iterator[str]:
    """Every code that something is refused with, or that a reason has."""
    known = takers()
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                place = known.get((path, name_of(node)), known.get((None, name_of(node))))
                given = node.args[place] if isinstance(place, int) and place < len(node.args) else None
                yield from filter(None, [word(given), *(word(k.value) for k in node.keywords if k.arg == "code")])
            elif isinstance(node, ast.FunctionDef):
                defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                yield from filter(None, (word(value) for one, value in defaults if one.arg == "code"))
            elif isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "code" for one in node.targets):
                yield from filter(None, [word(node.value)])


def events() -> dict[str, set[str]]:
    """Every event of the log with its levels."""
    found = defaultdict(set)
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) in LEVELS and isinstance(node.func, ast.Attribute):
                event = word(node.args[0]) if node.args else None
                if event and "log" in ast.unparse(node.func.value):
                    found[event].add(name_of(node))
    return found


PAGE = (ROOT / "docs" / "codes.md").read_text("utf-8")
REQUESTS = (ROOT / "docs" / "api.md").read_text("utf-8")
NOBODY_SEES = {"moot", "connection_lost", "not_http"}
"""Of an answer that nobody waits for any more; of the load generator, which counts them."""


def listed(page: str, columns: int) -> dict[str, str]:
    """The codes of a page's tables of so many columns, by the last but one of these."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == columns:
            found |= dict.fromkeys(re.findall(r"`([a-z0-9_]+)`", cells[0]), cells[1])
    return found


def test_every_code_is_listed():
    named = set(re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\| \d{3}.*? \| (.*?) \|", REQUESTS, re.MULTILINE))))
    found = set(codes()) - NOBODY_SEES
    assert len(found) > 130
    assert sorted(found - set(listed(PAGE, 2)) - named) == []


def test_every_event_is_listed_with_its_level():
    found, told = events(), listed(PAGE, 3)
    assert len(found) > 50
    assert sorted(set(found) - set(told)) == []
    for event, levels in found.items():
        assert levels <= set(told[event].split(", ")), event


def test_nothing_is_listed_that_is_not_there():
    words = {node.value for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert sorted({*listed(PAGE, 2), *listed(PAGE, 3)} - words) == []
