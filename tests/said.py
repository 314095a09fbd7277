"""What servers of a test have said, for the report of a test that fails: their logs, those of other processes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MOST = 20_000
"""Characters of each log: its end says what went wrong last."""


class Log(NamedTuple):
    """title: what is shown above it · text: the log as it is when somebody asks · goes_on: a server may write more."""

    title: str
    text: Callable[[], str]
    goes_on: Callable[[], bool]


LOGS: list[Log] = []


def listen(title: str, text: Callable[[], str], goes_on: Callable[[], bool]) -> None:
    """Remember a log until the test is over that ran when its server ended."""
    LOGS.append(Log(title, text, goes_on))


def forget() -> None:
    """A test begins: logs of servers that have ended belong to others."""
    LOGS[:] = [one for one in LOGS if one.goes_on()]


def sections() -> list[tuple[str, str]]:
    """Titles and texts for a report."""
    return [(one.title, _text(one)[-MOST:]) for one in LOGS]


def _text(log: Log) -> str:
    try:
        return log.text()
    except (OSError, ValueError) as error:  # a file that is gone: the report says the rest
        return f"cannot be read: {error}"
