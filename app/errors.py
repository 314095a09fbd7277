"""Every error of Widebeam, in one tree.

    WidebeamError
    ├── InvalidRequest      the client's fault; `path` names the field
    ├── Refused             not now: nothing was queued
    │   ├── QueueFull
    │   ├── DeadlineTooShort
    │   ├── Draining
    │   ├── NotReady
    │   └── ExplainBusy
    ├── Expired             the deadline passed
    ├── Cancelled           the client left
    ├── ModelOutput         a model wrote too many bad numbers for this request
    ├── Underfilled         fewer than k items, and the policy wants all or nothing
    ├── Rejected            an artifact did not pass the gate; `location` names file, row or tensor
    │   └── PolicyRejected  carries the diagnostics of a policy file
    ├── BadDeployment       deployment.toml is wrong; file and line
    └── Fault               our own bug, never a client's

HTTP status codes and exit codes are not here: `api.errors.STATUS` and `cli` map the classes. What happens to one
request without anybody's fault (underfilled, no candidates) is a value of the answer, not an exception.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import ClassVar, Final

MAX_MESSAGE: Final = 4000
MAX_LOCATION: Final = 500
"""Characters. What a file says may be quoted, and a file may say anything: reasons stay in memory, in the status and in
the log."""


class WidebeamError(Exception):
    """An error with a stable `code`. `path`, where there is one, is the place in the input: `$.context.history[1]`."""

    code: str = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path


class InvalidRequest(WidebeamError):
    """The request cannot be served as written, now or later."""

    code = "invalid_request"


class Refused(WidebeamError):
    """Refused at admission. `retry_after_s` is a whole number of seconds where a retry may help."""

    code = "refused"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    """As many requests wait as the queue holds."""

    code = "queue_full"


class DeadlineTooShort(Refused):
    """The predicted finish lies after the deadline: `message` says both."""

    code = "deadline_unreachable"


class Draining(Refused):
    """The server is on its way out."""

    code = "draining"


class NotReady(Refused):
    """Nothing serves yet; the message says why."""

    code = "not_ready"


class ExplainBusy(Refused):
    """As many answers are being explained as the deployment allows; the same request without `explain` is served."""

    code = "explain_busy"


class Expired(WidebeamError):
    """The deadline passed before the answer was ready; the request leaves its batch at the next step."""

    code = "deadline_exceeded"
    retryable = True


class Cancelled(WidebeamError):
    """The client went away."""

    code = "cancelled"


class ModelOutput(WidebeamError):
    """More than 1 % of this request's logits of a step were NaN or +inf; its batch-mates are untouched."""

    code = "model_output"


class Underfilled(WidebeamError):
    """Fewer than k items, under a policy that says `underfill: error`."""

    code = "underfilled"


class Rejected(WidebeamError):
    """An artifact was refused. `code` is per instance here: the gate has many reasons, all with one shape.

    others  further findings about the same artifact, where all were looked for
    """

    def __init__(self, code: str, message: str, *, location: str | None = None) -> None:
        message, location = _clipped(message, MAX_MESSAGE), location and _clipped(location, MAX_LOCATION)
        super().__init__(message, path=location)
        self.code = code
        self.location = location
        self.others: tuple[Rejected, ...] = ()

    @classmethod
    def together(cls, found: Sequence[Rejected]) -> Rejected:
        """The first of several findings, with the others beside it. A new error: whoever raises it and has `found` in a
        variable makes no ring of that."""
        made = found[0].bare()
        made.others = tuple(found[1:])
        return made

    def bare(self) -> Rejected:
        """The same without its traceback, for whoever keeps it: the frames in that hold all that was being loaded."""
        found = Rejected(self.code, self.message, location=self.location)
        found.others = tuple(one.bare() for one in self.others)
        return found

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.location else self.message


DISK: Final = frozenset(
    getattr(errno, name)
    for name in ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EDQUOT", "ETIMEDOUT", "EAGAIN", "EREMOTEIO")
    if hasattr(errno, name)
)
"""What an operating system says where nothing is wrong with a file: it may be there the next time."""


class LeadsOut(OSError):
    """Links lead out of the folder that a file is said to lie in: it is not opened, whatever lies there."""

    def __init__(self) -> None:
        super().__init__(errno.ELOOP, "is a link that leads out of its folder, which is never followed")


def unreadable(error: OSError, code: str, location: str | None) -> Rejected:
    """A file that cannot be read: "path_escape" where it was not opened, "disk_error" where that says nothing about the
    file, else `code`."""
    if isinstance(error, LeadsOut):
        return Rejected("path_escape", str(error.strerror), location=location)
    code = "disk_error" if error.errno in DISK else code
    return Rejected(code, f"cannot be read: {error.strerror or error}", location=location)


class PolicyRejected(Rejected):
    """A policy file was refused; `diagnostics` holds every finding of the file, in file order."""

    def __init__(self, message: str, diagnostics: tuple[object, ...], *, location: str | None = None) -> None:
        super().__init__("policy_rejected", message, location=location)
        self.diagnostics = diagnostics


class BadDeployment(WidebeamError):
    """deployment.toml cannot be used. `file` and `line` say where (line 0: the whole file)."""

    code = "bad_deployment"

    def __init__(self, message: str, *, file: str, line: int = 0) -> None:
        super().__init__(message, path=f"{file}:{line}" if line else file)
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Fault(WidebeamError):
    """A bug of ours. Never raised for what a client or a file says."""

    code = "internal"

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Wrap whatever broke; the original stays as the cause and is logged once, with its traceback."""
        if isinstance(error, Fault):
            return error
        fault = cls(f"{type(error).__name__}: {error}")
        fault.__cause__ = error
        return fault


def let_go(error: BaseException) -> None:
    """Take the tracebacks from an error, and from what caused it or was being handled, once they are written down.
    Their frames hold all that was being computed, snapshots with it; whoever holds the error in turn, as a client's
    future does, would keep these until garbage is collected."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += [one for one in (found.__cause__, found.__context__) if one is not None]


def counted(number: int, noun: str, many: str | None = None) -> str:
    """`1 error`, `2 errors`: a number and what it counts, as messages say it. many: the plural, by default with an s"""
    return f"{number} {noun if number == 1 else many or f'{noun}s'}"


def printable(text: str) -> str:
    """A text that can be written as UTF-8: names of files are any bytes, and JSON may spell half a character."""
    return text.encode("utf-8", "backslashreplace").decode()


def _clipped(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."
