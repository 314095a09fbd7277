"""Logs: one JSON object a line, through structlog, to one byte stream. Nothing here is global but `route_stdlib`."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, Protocol, cast

import msgspec
import structlog
from msgspec import Struct
from structlog.typing import EventDict, Processor, WrappedLogger

PIPE_BYTES: Final = 1 << 20
"""What a pipe that takes the log holds, where that may be had: 16 times the usual. A line of more than 4 KiB (a
traceback) goes in pieces where the pipe is full, and a line of another process (a front end) may come between them."""
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Line(Struct, kw_only=True):
    """A line whose facts are known beforehand: a struct's fields in their order; UNSET leaves one out. What is written
    with every request is one of these, since structlog's processors take many times as long."""

    at: str = ""
    level: str = "info"
    event: str


class Log(Protocol):
    """A logger as the rooms use it: an event's name, then its facts by key. Levels as methods."""

    def bind(self, **facts: object) -> Log:
        """A logger that adds these facts to every line."""

    def debug(self, event: str, **facts: object) -> None:
        """Log below the usual level."""

    def info(self, event: str, **facts: object) -> None:
        """Log a change of state, or a request's one line."""

    def warning(self, event: str, **facts: object) -> None:
        """Log something that a person should look at."""

    def error(self, event: str, **facts: object) -> None:
        """Log a failure; `exc_info=error` adds its traceback."""

    def writes(self, level: str) -> bool:
        """Whether lines of this level are written: who would gather facts for nothing can ask."""

    def line(self, line: Line) -> None:
        """Log a line of its own level, without what `bind` added; the time is set here."""


class Lines:
    """A stream of lines that may lose some and never fails: on a full disk, or with nobody at the other end of a pipe,
    a server goes on. What was lost is counted, and said on a line of its own as soon as there is room."""

    def __init__(self, stream: BinaryIO) -> None:
        self._owner = stream  # it would close its raw one when it dies
        self._stream: BinaryIO = getattr(stream, "raw", stream)  # no buffer: it would keep half of a line
        self._lost = 0
        _widen(self._stream)
        self._one = threading.Lock()  # what is longer than a pipe's buffer goes in pieces

    def write(self, line: bytes) -> None:
        """Write a line, or lose it. Any thread."""
        with self._one:
            self._write(line)

    def _write(self, line: bytes) -> None:
        if self._lost:  # in front of it the end of what may be half a line
            facts = {"at": _now(), "level": "warning", "event": "log_lines_lost", "lines": self._lost}
            line = b"\n" + msgspec.json.encode(facts) + b"\n" + line
        try:
            left = memoryview(line)
            while left:
                left = left[self._stream.write(left) or self._full() :]
        except OSError:
            self._lost += 1
        else:
            self._lost = 0

    def flush(self) -> None:
        """Nothing is held back."""
        with suppress(OSError):
            self._stream.flush()

    @staticmethod
    def _full() -> int:
        raise BlockingIOError(errno.EAGAIN, "a pipe that nobody reads is full")


def _widen(stream: BinaryIO) -> None:
    """Let a pipe hold `PIPE_BYTES`; one that holds more, and everything else, stays as it is."""
    with suppress(OSError, ValueError, AttributeError):  # no descriptor, no pipe, not Linux, or more than is allowed
        if fcntl.fcntl(stream, fcntl.F_GETPIPE_SZ) < PIPE_BYTES:
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def make_log(stream: BinaryIO, level: str = "info") -> Log:
    """A logger that writes JSON lines to `stream`, each at once; see `Lines`. level: debug | info | warning | error."""
    lines = Lines(stream)
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _event_first,
        structlog.processors.JSONRenderer(serializer=_serialize),
    ]
    filtering = structlog.make_filtering_bound_logger(LEVELS[level])
    return cast(
        Log,
        structlog.wrap_logger(
            structlog.BytesLogger(cast(BinaryIO, lines)),
            processors=processors,
            wrapper_class=type("Logger", (filtering,), _direct(lines, LEVELS[level])),
            context_class=dict,
            cache_logger_on_first_use=True,
        ).bind(),
    )


_ENCODER: Final = msgspec.json.Encoder(enc_hook=repr)


def _serialize(event: EventDict | Line, **_: Any) -> bytes:
    try:
        return _ENCODER.encode(event)
    except UnicodeEncodeError:  # a name that is no text: the line must not fail whoever writes it
        return json.dumps(msgspec.to_builtins(event) if isinstance(event, Line) else event, default=repr).encode()


def _direct(lines: Lines, least: int) -> dict[str, Any]:
    """The methods of a logger that pass the processors by."""

    def writes(_logger: object, level: str) -> bool:
        return LEVELS[level] >= least

    def line(_logger: object, line: Line) -> None:
        if LEVELS[line.level] >= least:
            line.at = _now()
            lines.write(_serialize(line) + b"\n")

    return {"writes": writes, "line": line}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _event_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {"at": event.pop("at"), "level": event.pop("level"), "event": event.pop("event"), **event}


class StdlibHandler(logging.Handler):
    """Turns records of other libraries' loggers into lines of `log`."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a record that cannot be formatted is reported by logging itself."""
        try:
            write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
            if record.levelno < logging.WARNING:
                write = self._log.info if record.levelno >= logging.INFO else self._log.debug
            facts: dict[str, object] = {"logger": record.name, "message": record.getMessage().strip()}
            if record.exc_info and record.exc_info[1]:
                facts["exc_info"] = record.exc_info
            write("stdlib", **facts)
        except Exception:  # noqa: BLE001  what logging prescribes: a bad record must not end its caller
            self.handleError(record)


def route_stdlib(log: Log) -> None:
    """Send warnings and errors of uvicorn, asyncio and everything else under the root logger to `log`."""
    root = logging.getLogger()
    root.handlers = [StdlibHandler(log)]
    root.setLevel(logging.WARNING)
