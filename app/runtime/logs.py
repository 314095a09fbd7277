"""Logs: one JSON object a line, through structlog, to one byte stream. Nothing here is global but `route_stdlib`."""

from __future__ import annotations

import logging
from typing import Any, BinaryIO, Final, Protocol, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


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


def make_log(stream: BinaryIO, level: str = "info") -> Log:
    """A logger that writes JSON lines to `stream` (flushed after each). level: debug | info | warning | error."""
    encoder = msgspec.json.Encoder(enc_hook=repr)

    def serialize(event: EventDict, **_: Any) -> bytes:
        return encoder.encode(event)

    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _event_first,
        structlog.processors.JSONRenderer(serializer=serialize),
    ]
    return cast(
        Log,
        structlog.wrap_logger(
            structlog.BytesLogger(stream),
            processors=processors,
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
            context_class=dict,
            cache_logger_on_first_use=True,
        ),
    )


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
