"""Bytes of a policy file -> a tree of nodes with exact places.

YAML is read as events, never loaded: every scalar stays text and is read later by the type that its key expects, so
`no`, `010` and `1e3` mean what the author sees. Limits hold before anything is built. Anchors, aliases, tags, merge
keys, directives and second documents are refused. Columns are characters here and everywhere after.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from app.policies.diagnostics import Findings, Span

MAX_BYTES = 256 * 1024
MAX_NODES = 4000
MAX_DEPTH = 12

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")

Style = Literal["plain", "quoted", "block", "folded"]


@dataclass(frozen=True, slots=True)
class Source:
    """One file as read: `file` is how messages call it; `size` is its true size where only a part was read."""

    file: str
    data: bytes
    size: int | None = None

    @property
    def sha(self) -> str:
        """SHA-256 (hex) of what was read."""
        return hashlib.sha256(self.data).hexdigest()

    def lines(self) -> list[str]:
        """The source lines for messages; never fails."""
        return _BREAK.split(self.data[:MAX_BYTES].decode("utf-8", "replace").removeprefix("\ufeff"))


Sources = Mapping[str, Source]
"""Policy name -> file. All policies that may name each other in `extends`."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A piece of text. `places` holds line and column of the first character of each of its lines; empty where its
    characters do not map one to one to the file (folded text, escapes)."""

    text: str
    span: Span
    style: Style
    places: tuple[tuple[int, int], ...] = ()

    def at(self, line: int, start: int, end: int) -> Span:
        """The place of characters start..end of its line `line` (all from 0)."""
        if not 0 <= line < len(self.places):
            return self.span
        row, col = self.places[line]
        return Span(self.span.file, row, col + start, col + max(end, start + 1))


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping; entries in file order, repeated keys included."""

    entries: tuple[tuple[Scalar, Node], ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that was refused already; readers pass over it in silence."""

    span: Span


Node = Scalar | Items | Table | Broken


def compose(source: Source, found: Findings) -> Node | None:
    """The node tree of a file, or None where there is none. Never raises for bad text."""
    start = Span(source.file, 1, 1, 2)
    size = source.size if source.size is not None else len(source.data)
    if size > MAX_BYTES:
        found.add("S001", start, f"the file has {size} bytes", f"a policy file has at most {MAX_BYTES} bytes")
        return None
    text = _decode(source, start, found)
    if text is None:
        return None
    builder = _Builder(source.file, text, found)
    try:
        return builder.document()
    except _Stop:
        return None
    except yaml.MarkedYAMLError as error:
        builder.syntax(error)
    except yaml.reader.ReaderError as error:
        place = builder.place(error.position)
        found.add("S002", place, f"character U+{int(error.character):04X} is not allowed in a file")
    except (ValueError, OverflowError, RecursionError):  # escapes beyond Unicode, which PyYAML hands to chr()
        found.add("S002", start, "a quoted text holds an escape that is no character")
    return None


def _decode(source: Source, start: Span, found: Findings) -> str | None:
    if source.data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        found.add("S001", start, "the file starts with a byte order mark", "save it as UTF-8 without BOM")
        return None
    try:
        return source.data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = _BREAK.split(source.data[: error.start].decode("utf-8"))
        place = Span(source.file, len(before), len(before[-1]) + 1, len(before[-1]) + 2)
        found.add("S001", place, f"byte 0x{source.data[error.start]:02x} is not UTF-8", "save the file as UTF-8")
        return None


class _Stop(Exception):
    """The rest of the file is not worth reading."""


@dataclass(frozen=True, slots=True)
class _At:
    """A place as YAML counts it: characters from the start, line and column from 0."""

    index: int
    line: int
    column: int


def _at(mark: Any) -> _At:
    return _At(mark.index, mark.line, mark.column)


class _Builder:
    """Events of one file -> nodes."""

    def __init__(self, file: str, text: str, found: Findings) -> None:
        self.file, self.text, self.found = file, text, found
        self.lines = _BREAK.split(text)
        self.left = MAX_NODES

    def document(self) -> Node | None:
        events: Iterator[yaml.Event] = yaml.parse(self.text, Loader=yaml.SafeLoader)
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if event.version or event.tags:
                    self.add("S006", event.start_mark, "a YAML directive", "remove the lines that start with `%`")
                if root is not None:
                    self.add("S006", event.start_mark, "a second document", "write one policy a file, without `---`")
                    return root
                root = self.node(next(events), events, 0)
        if root is None:
            self.found.add("S010", Span(self.file, 1, 1, 2), "the file is empty", "start with `widebeam: 1`")
        return root

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self.left < 0 else f"{MAX_DEPTH} levels"
            self.add("S012", event.start_mark, f"the file has more than {limit}")
            raise _Stop
        if isinstance(event, yaml.AliasEvent):
            self.add("S004", event.start_mark, f"alias `*{event.anchor}`", "write the value out, or use `extends`")
            return Broken(self.span(event.start_mark, event.end_mark))
        refused = self.refused(event)
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = self.scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(event, events, depth)
        else:
            node = self.table(event, events, depth)
        return Broken(node.span) if refused else node

    def sequence(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Items:
        items: list[Node] = []
        for inner in events:
            if isinstance(inner, yaml.SequenceEndEvent):
                break
            items.append(self.node(inner, events, depth + 1))
        return Items(tuple(items), self.span(event.start_mark, event.end_mark))

    def table(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Table:
        entries: list[tuple[Scalar, Node]] = []
        for inner in events:
            if isinstance(inner, yaml.MappingEndEvent):
                break
            key = self.node(inner, events, depth + 1)
            value = self.node(next(events), events, depth + 1)
            if isinstance(key, Scalar) and key.text == "<<" and key.style == "plain":
                self.found.add("S004", key.span, "merge key `<<`", "use `extends`")
            elif isinstance(key, Scalar):
                entries.append((key, value))
            elif not isinstance(key, Broken):
                self.found.add("S008", key.span, "a key is a list or a mapping", "keys are plain words")
        return Table(tuple(entries), self.span(event.start_mark, event.end_mark))

    def refused(self, event: yaml.Event) -> bool:
        """Report what YAML attaches to a node: anchors and tags."""
        mark = _at(event.start_mark)
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            self.add("S004", mark, f"anchor `&{anchor}`", "write the value out, or use `extends`")
        if tag is not None:
            written = re.compile(r"!\S*").search(self.text, mark.index)
            text = written[0] if written else str(tag)
            place = self.place(written.start() if written else mark.index)
            self.found.add(
                "S005",
                place,
                f"YAML tag `{text}` is not allowed",
                "write `not x` for negation; quote the text if it really starts with `!`",
            )
        return anchor is not None or tag is not None

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        start, end, text = _at(event.start_mark), _at(event.end_mark), str(event.value)
        span = self.span(start, end)
        if _SURROGATE.search(text):
            self.found.add("S002", span, "a quoted text holds half a character", "write the character itself")
            return Scalar("", span, "folded")
        if event.style == "|":
            return Scalar(text, span, "block", self.block(text, start.line + 1))
        if event.style == ">" or start.line != end.line:
            return Scalar(text, span, "folded")
        if event.style is None:
            return Scalar(text, span, "plain", ((start.line + 1, start.column + 1),))
        exact = self.text[start.index + 1 : end.index - 1] == text
        return Scalar(text, span, "quoted", ((start.line + 1, start.column + 2),) if exact else ())

    def block(self, text: str, first: int) -> tuple[tuple[int, int], ...]:
        """Where the lines of a `|` block start: its first line is line `first` (from 0), its indent that of the first
        line with text."""
        rows = text.split("\n")
        indent = next(
            (
                len(self.lines[first + at]) - len(row)
                for at, row in enumerate(rows)
                if row and first + at < len(self.lines)
            ),
            0,
        )
        return tuple((first + at + 1, max(indent, 0) + 1) for at in range(len(rows)))

    def syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        problem = (error.problem or error.context or "cannot be read").rstrip(".")
        hint = ""
        if "'\\t'" in problem:
            hint = "indent with spaces"
        elif "',' or ']'" in problem:
            hint = "a `[...]` list cannot hold calls with commas; write one operator per line, each starting with `- `"
        elif "mapping values are not allowed" in problem:
            hint = "put quotes round a text that holds `: `"
        elif "could not find expected ':'" in problem:
            hint = "write `key: value`"
        place = self.span(mark, mark) if mark else Span(self.file, 1, 1, 2)
        self.found.add("S002", place, problem.replace("<", "").replace(">", ""), hint)

    def add(self, code: str, mark: object, message: str, hint: str = "") -> None:
        self.found.add(code, self.span(mark, mark), message, hint)

    def span(self, first: object, after: object) -> Span:
        """Marks count from 0; a span that goes on to other lines ends with its first."""
        start, end = _at(first), _at(after)
        line = min(start.line, len(self.lines) - 1)
        last = end.column if end.line == start.line else len(self.lines[line])
        return Span(self.file, line + 1, start.column + 1, max(last, start.column + 1) + 1)

    def place(self, index: int) -> Span:
        before = _BREAK.split(self.text[:index])
        return Span(self.file, len(before), len(before[-1]) + 1, len(before[-1]) + 2)
