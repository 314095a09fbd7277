"""Errors on the wire: the HTTP status of each class, one body for all of them.

InvalidRequest
├── MalformedBody        400  not JSON, not msgpack
├── MalformedHeader      400  admin only: an If-Match that is none
├── BodyTooLarge         413
├── UnsupportedMedia     415
├── NotAcceptable        406
├── SlowBody             408
├── NotFound             404
├── MethodNotAllowed     405
├── Unauthorized         401  admin only
├── Forbidden            403  admin only
└── EpochChanged         412  admin only

TooManyStreams is a Refused (503).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from app import errors
from app.api import media, wire


class MalformedBody(errors.InvalidRequest):
    """The body is not what its Content-Type says."""

    code = "malformed_body"


class MalformedHeader(errors.InvalidRequest):
    """A header whose value cannot be understood, and that must not be passed over."""

    code = "malformed_header"


class BodyTooLarge(errors.InvalidRequest):
    """More bytes than `server.max_body`."""

    code = "body_too_large"


class UnsupportedMedia(errors.InvalidRequest):
    """A Content-Type or Content-Encoding that is not served."""

    code = "unsupported_media_type"


class NotAcceptable(errors.InvalidRequest):
    """Accept allows neither JSON nor msgpack."""

    code = "not_acceptable"


class SlowBody(errors.InvalidRequest):
    """The body did not arrive within `server.read_timeout_s`."""

    code = "body_timeout"


class NotFound(errors.InvalidRequest):
    """No such path."""

    code = "not_found"


class MethodNotAllowed(errors.InvalidRequest):
    """The path exists, the method does not."""

    code = "method_not_allowed"


class Unauthorized(errors.InvalidRequest):
    """No valid token."""

    code = "unauthorized"


class Forbidden(errors.InvalidRequest):
    """A valid token that does not allow this."""

    code = "forbidden"


class EpochChanged(errors.InvalidRequest):
    """If-Match names an epoch that has passed: somebody decided, or something was cut over, meanwhile."""

    code = "epoch_changed"


class TooManyStreams(errors.Refused):
    """As many clients follow the events as this server lets."""

    code = "too_many_streams"


STATUS: Final[Mapping[type[BaseException], int]] = {
    errors.WidebeamError: 500,
    errors.InvalidRequest: 422,
    MalformedBody: 400,
    MalformedHeader: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    MethodNotAllowed: 405,
    NotAcceptable: 406,
    SlowBody: 408,
    EpochChanged: 412,
    BodyTooLarge: 413,
    UnsupportedMedia: 415,
    errors.Cancelled: 499,
    errors.Refused: 503,
    errors.ModelOutput: 503,
    errors.Underfilled: 503,
    errors.Expired: 504,
}
"""The status of a class is that of its nearest ancestor here."""

OUTCOME: Final[Mapping[type[BaseException], str]] = {
    errors.WidebeamError: "failed",
    errors.InvalidRequest: "invalid",
    errors.Refused: "refused",
    errors.Expired: "expired",
    errors.Cancelled: "cancelled",
    errors.Underfilled: "underfilled",
}
"""What log and metrics call it."""

CAUGHT: Final[tuple[type[Exception], ...]] = (HTTPException, errors.WidebeamError, Exception)
"""What FastAPI hands to `handle`: the router's 404 and 405, the tree, and anything else."""

MAX_TEXT: Final = 500
"""Longest message and longest path of an error body, in characters."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def outcome_of(error: BaseException) -> str:
    """The outcome of an error for log and metrics."""
    return next((OUTCOME[kind] for kind in type(error).__mro__ if kind in OUTCOME), "failed")


def known(error: Exception) -> errors.WidebeamError:
    """An error of the tree: the router's own are translated, anything else is a Fault."""
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return MethodNotAllowed("this path has other methods")
        return NotFound("no such path") if error.status_code < 500 else errors.Fault(str(error.detail))
    return error if isinstance(error, errors.WidebeamError) else errors.Fault.of(error)


def reply(error: errors.WidebeamError, accept: str = "", allow: str | None = None) -> Response:
    """The response to an error, in the codec that Accept asks for (JSON where it allows neither).

    A fault of ours says nothing about itself to the client; the log has it.
    """
    status = status_of(error)
    kind = media.answer_media(accept) or media.JSON
    if status == 500:
        body = wire.error_body("internal", "internal error; the server's log has the request id", False, None)
    else:
        body = wire.error_body(error.code, _short(error.message), error.retryable, error.path and _short(error.path))
    headers = {}
    if isinstance(error, errors.Refused) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if allow is not None:
        headers["allow"] = allow
    if isinstance(error, SlowBody):  # half a body may still come: this connection cannot carry another request
        headers["connection"] = "close"
    return Response(media.ENCODE[kind](body), status, headers, media_type=kind)


def _short(text: str) -> str:
    """A client's own text can be in a message (an unknown key, say); an answer is not made of it."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


async def handle(request: Request, error: Exception) -> Response:
    """FastAPI's handler for every exception: note it for the log line, answer it."""
    found = known(error)
    record = request.scope.get("widebeam")
    if record is not None:
        record.error = found
    allow = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
    return reply(found, media.header(request.scope["headers"], b"accept"), allow)
