"""Nodes -> values: each scalar is read by the type that its key expects, with the place where it stands."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.policies.diagnostics import Findings, Span, suggest
from app.policies.parse import MAX_NUMBER
from app.policies.source import Broken, Items, Node, Scalar, Table

LANGUAGE = 1
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

T = TypeVar("T")
Entry = tuple[Scalar, Node]
"""A key and what stands under it."""

_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """A value and where it stands."""

    value: T
    span: Span


class Values:
    """Reads mappings and values, and reports what they should have been."""

    def __init__(self, found: Findings) -> None:
        self.found = found

    def version(self, entry: Entry | None, start: Span) -> None:
        """`widebeam: 1`, which every file starts with; `start` is where to report that it is missing."""
        if entry is None:
            self.found.add("S009", start, "`widebeam` is missing", f"start the file with `widebeam: {LANGUAGE}`")
            return
        value = self.integer(entry[1], "widebeam")
        if value is not None and value.value != LANGUAGE:
            help_ = f"this server knows version {LANGUAGE}"
            self.found.add("S017", value.span, f"version {value.value} of the language", help_)

    def fields(self, node: Node, where: str, known: Iterable[str]) -> dict[str, Entry]:
        """The entries of a mapping by key; unknown and repeated keys are refused. Empty values are refused too."""
        if not isinstance(node, Table):
            self.refuse_form(node, f"{where} is a mapping", "write its keys on lines of their own, indented")
            return {}
        known = tuple(known)
        entries: dict[str, Entry] = {}
        for key, value in node.entries:
            if known and key.text not in known:
                hint = suggest(key.text, known) or f"keys: {', '.join(known)}"
                self.found.add("S007", key.span, f"unknown key `{key.text}` in {where}", hint)
            elif key.text in entries:
                first = entries[key.text][0].span.line
                self.found.add("S003", key.span, f"`{key.text}` is given twice in {where} (first at line {first})")
            elif _is_empty(value):
                self.found.add("S010", key.span, f"`{key.text}` has no value", "give one, or remove the line")
                entries[key.text] = (key, Broken(value.span))
            else:
                entries[key.text] = (key, value)
        return entries

    def items(self, node: Node, where: str) -> tuple[Node, ...]:
        """The entries of a list that is not empty."""
        if isinstance(node, Items):
            if not node.items:
                self.found.add("S010", node.span, f"`{where}` is an empty list", "remove it, or write `none`")
            return node.items
        self.refuse_form(node, f"`{where}` is a list", "write one entry a line, each starting with `- `")
        return ()

    def name(self, entry: Entry | None) -> Given[str] | None:
        """The name of a policy."""
        if entry is None or not isinstance(entry[1], Scalar):
            if entry is not None:
                self.refuse_form(entry[1], f"`{entry[0].text}` takes one name", "")
            return None
        if not NAME.fullmatch(entry[1].text):
            self.found.add(
                "S011",
                entry[1].span,
                f"`{entry[1].text}` is no policy name",
                "names are a-z, 0-9 and _, a letter first",
            )
            return None
        return Given(entry[1].text, entry[1].span)

    def text(self, entry: Entry | None) -> str:
        """A text, "" where there is none."""
        if entry is None:
            return ""
        if not isinstance(entry[1], Scalar):
            self.refuse_form(entry[1], f"`{entry[0].text}` is a text", "")
            return ""
        return entry[1].text

    def flag(self, entry: Entry | None) -> bool:
        """`true` or `false`."""
        given = self.choice(entry, ("true", "false"))
        return given is not None and given.value == "true"

    def choice(self, entry: Entry | None, words: tuple[str, ...]) -> Given[str] | None:
        """One of a few plain words."""
        if entry is None:
            return None
        key, node = entry
        if not isinstance(node, Scalar):
            self.refuse_form(node, f"`{key.text}` is one of {', '.join(words)}", "")
            return None
        if node.text not in words or node.style != "plain":
            hint = suggest(node.text, words) or f"one of: {', '.join(words)}"
            self.found.add("S011", node.span, f"`{node.text}` is no value of `{key.text}`", hint)
            return None
        return Given(node.text, node.span)

    def integer(self, node: Node, where: str, low: int = 0, high: int = 10**9) -> Given[int] | None:
        """A whole number low..high in decimal digits: no leading zeros, exponents or quotes."""
        text = self._number_text(node, where)
        if text is None:
            return None
        if not _INT.fullmatch(text) or len(text) > 18:
            hint = "write it in decimal digits, without leading zeros, exponent or quotes"
            self.found.add("S011", node.span, f"`{_short(text)}` is no whole number", hint)
            return None
        if not low <= int(text) <= high:
            self.found.add("S011", node.span, f"{int(text)} is outside {low} to {high}")
            return None
        return Given(int(text), node.span)

    def decimal(self, node: Node, where: str) -> Given[float] | None:
        """A number of at most MAX_NUMBER."""
        text = self._number_text(node, where)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            self.found.add("S011", node.span, f"`{_short(text)}` is no number", "write it like `0.5`, `-3` or `1e-6`")
            return None
        value = float(text)
        if not math.isfinite(value) or abs(value) > MAX_NUMBER:
            self.found.add("T010", node.span, f"the number is above {MAX_NUMBER:g}")
            return None
        return Given(value, node.span)

    def _number_text(self, node: Node, where: str) -> str | None:
        if not isinstance(node, Scalar):
            self.refuse_form(node, f"`{where}` takes a number", "")
            return None
        if node.style != "plain":
            self.found.add("S011", node.span, f"`{where}` takes a number, this is text", "remove the quotes")
            return None
        return node.text

    def refuse_form(self, node: Node, message: str, hint: str) -> None:
        """Report a node of the wrong form, unless it was refused already."""
        if not isinstance(node, Broken):
            self.found.add("S008", node.span, message, hint)


def _is_empty(node: Node) -> bool:
    plain = isinstance(node, Scalar) and node.style == "plain" and node.text in ("", "~", "null")
    return plain or (isinstance(node, Table) and not node.entries)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
