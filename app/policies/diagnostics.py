"""What is wrong with a policy file, where, and what to write instead.

Passes only add findings; terminal, JSON and HTTP render the same objects.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from app.policies.rules import RULES, Rule

CROP = 100
"""Longest piece of a source line that is shown."""
SOURCE = 500
"""Longest piece of a source line that is handed on as data."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A place on one line: line and columns count characters from 1, `end` is the column after the last one."""

    file: str
    line: int
    col: int
    end: int


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `excerpt` is the source line, so that the finding can be shown where the file is not at hand."""

    span: Span
    rule: Rule
    message: str
    help: str
    excerpt: str

    def text(self) -> str:
        """The finding for a terminal: place, message, source line with caret, help."""
        span, rule = self.span, self.rule
        head = f"{span.file}:{span.line}:{span.col}: {rule.severity} {rule.code}: {self.message}"
        line, left = _crop(self.excerpt, span.col - 1, span.end - 1)
        marked = self.excerpt[span.col - 1 : span.end - 1][: CROP - 10]
        caret = " " * _cells(line[:left]) + "^" * max(1, _cells(marked))
        body = f"{head}\n{span.line:6d} | {line}\n       | {caret}" if line else head
        return f"{body}\n  help: {self.help}" if self.help else body

    def data(self) -> dict[str, str | int]:
        """The finding as JSON-ready data with the fields that editors use."""
        return {
            "file": self.span.file,
            "line": self.span.line,
            "col": self.span.col,
            "end_col": self.span.end,
            "code": self.rule.code,
            "severity": self.rule.severity,
            "message": self.message,
            "help": self.help,
            "source": self.excerpt.rstrip()[:SOURCE],
        }


class Findings:
    """The findings of one compilation, in order of position, without repetitions.

    `lines(file)` gives a file's source lines.
    """

    def __init__(self, lines: Callable[[str], Sequence[str]]) -> None:
        self._lines = lines
        self._found: dict[tuple[str, Span, str], Diagnostic] = {}

    def add(self, code: str, span: Span, message: str, help: str = "") -> None:  # noqa: A002  the word authors see
        """Record a finding; the same one from two steps counts once."""
        lines = self._lines(span.file)
        excerpt = lines[span.line - 1] if 0 < span.line <= len(lines) else ""
        self._found.setdefault((code, span, message), Diagnostic(span, RULES[code], message, help, excerpt))

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(sorted(self._found.values(), key=lambda one: (one.span, one.rule.code, one.message)))

    def __len__(self) -> int:
        return len(self._found)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that keep the policy from being served."""
        return tuple(one for one in self if one.rule.severity == "error")

    def text(self) -> str:
        """All findings for a terminal, a blank line between them."""
        return render(self)

    def data(self) -> list[dict[str, str | int]]:
        """All findings as JSON-ready data."""
        return [one.data() for one in self]


def render(findings: Iterable[Diagnostic]) -> str:
    """Findings for a terminal, a blank line between them."""
    return "\n\n".join(one.text() for one in findings)


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` where a known word is close enough, else nothing."""
    close = get_close_matches(word, sorted(known), n=1, cutoff=0.7)
    return f"did you mean `{close[0]}`?" if close else ""


def listing(words: Iterable[str]) -> str:
    """Words as an author reads them: `a`, `b`, `c`."""
    return ", ".join(f"`{word}`" for word in words)


def _crop(line: str, start: int, end: int) -> tuple[str, int]:
    """The part of a line to show, on one row, and where `start` lies in it."""
    shown = "".join(" " if unicodedata.category(char)[0] == "C" else char for char in line.rstrip())
    start = min(start, len(shown))
    if len(shown) <= CROP:
        return shown, start
    first = max(0, min(start - CROP // 3, max(start, end) - CROP + 10, len(shown) - CROP)) if start > CROP // 2 else 0
    first = max(first, start - CROP // 2)
    left, right = ("…" if first else ""), ("…" if first + CROP < len(shown) else "")
    return left + shown[first : first + CROP] + right, start - first + len(left)


def _cells(text: str) -> int:
    """Terminal cells of a text: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
