"""POST /v1/recommend: decode, admit, await the outcome unless the client leaves, encode."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from fastapi import Request, Response
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from app import core
from app.api import codec, errors, media, wire
from app.api.middleware import Record, RequestLine
from app.api.protocol import WHOLE, Client
from app.config import Deployment
from app.errors import Cancelled, Draining, InvalidRequest, Refused
from app.runtime.front import Counts, Door, Ticket

PATH: Final = "/v1/recommend"
TIMEOUT_HEADERS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
ARM_HEADER: Final = b"x-widebeam-arm"
_DIGITS: Final = re.compile(r"[0-9]{1,8}")


class Recommend:
    """The hot handler, an ASGI application of one route. Everything that can be made once is made here."""

    def __init__(self, door: Door, deployment: Deployment, counts: Counts, clock: Callable[[], float]) -> None:
        self.body = wire.body_type(deployment.limits)
        self._door = door
        self._override = deployment.server.policy_override
        self._counts = counts
        self._clock = clock
        self._decoders = codec.decoders(wire.Body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one POST; errors are for whoever is around it."""
        scope["widebeam"].line.route = PATH
        response = await self.post(Request(scope, receive))
        await response(scope, receive, send)

    async def post(self, request: Request) -> Response:
        """Recommend catalogue items for one user context."""
        record: Record = request.scope["widebeam"]
        line, start, policy = record.line, self._clock(), None
        try:
            kind, asked = await self._asked(request, record)
            start = asked.received
            ticket = self._door.admit(asked)
            outcome = await outcome_or_cancel(ticket, record.client)
            answer = wire.to_answer(outcome)
            data = media.ENCODE[kind](answer)
            policy = outcome.versions.policy
            line.outcome = answer.status
            record.facts = partial(note, line, asked, answer)
        except asyncio.CancelledError:
            line.outcome = errors.outcome_of(Draining(""))  # that is what the edge makes of it
            raise
        except Exception as error:
            line.outcome = errors.outcome_of(error)
            if isinstance(error, Refused):
                self._counts.shed(error.code)
            raise
        finally:
            self._counts.request_done(line.outcome, policy, self._clock() - start)
        return Response(data, media_type=kind)

    async def _asked(self, request: Request, record: Record) -> tuple[str, core.Request]:
        """The media type of the answer, and the request. Raises InvalidRequest and what is below it, Cancelled."""
        headers = request.scope["headers"]
        kind = media.answer_media(media.header(headers, b"accept"))
        if kind is None:
            raise errors.NotAcceptable("answers come as application/json or application/msgpack")
        spoken = media.body_media(media.header(headers, b"content-type"))
        if spoken is None:
            raise errors.UnsupportedMedia("Content-Type must be application/json or application/msgpack")
        data = await read(request.receive)
        received = request.scope.get(WHOLE) or self._clock()
        body = self._decoders[spoken].decode(data)
        if body.request_id:
            record.rename(body.request_id)
        budget = shortest(headers, body.deadline_ms or None)
        return kind, wire.to_request(
            body,
            request_id=record.line.request_id,
            received=received,
            deadline=None if budget is None else received + budget / 1e3,
            override=self._override,
            arms=arms(headers),
        )


async def read(receive: Receive) -> bytes:
    """The whole body. Raises Cancelled where the client leaves in the middle of it."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before the body was complete")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def shortest(headers: media.Headers, deadline_ms: int | None) -> int | None:
    """The smallest time budget among the body's and the headers', in milliseconds; None where there is none."""
    budgets = [] if deadline_ms is None else [deadline_ms]
    for name in TIMEOUT_HEADERS:
        for key, value in headers:
            if key == name:
                budgets.append(_milliseconds(value.decode("latin-1").strip(), name.decode()))
    return min(budgets, default=None)


def _milliseconds(text: str, name: str) -> int:
    value = int(text) if _DIGITS.fullmatch(text) else 0
    if not 1 <= value <= wire.MAX_DEADLINE_MS:
        raise InvalidRequest(f"expected whole milliseconds from 1 to {wire.MAX_DEADLINE_MS}", path=f"header {name}")
    return value


def arms(headers: media.Headers) -> dict[str, str]:
    """Arms by experiment that a tester asks for: `x-widebeam-arm: EXPERIMENT=ARM[,EXPERIMENT=ARM]`. Whether that is
    allowed, and whether they exist, admission says."""
    found: dict[str, str] = {}
    for key, value in headers:
        if key != ARM_HEADER:
            continue
        for part in value.decode("latin-1").split(","):
            name, equals, arm = (word.strip() for word in part.partition("="))
            if not (name and equals and arm) or name in found:
                raise InvalidRequest("expected EXPERIMENT=ARM, each experiment once", path="header x-widebeam-arm")
            found[name] = arm
    return found


async def outcome_or_cancel(ticket: Ticket, client: Client) -> core.Outcome:
    """Wait for the outcome; a client that leaves first cancels the ticket.

    Raises what the ticket raises; Cancelled where the client left; Draining where the runtime cancelled on its own.
    """
    client.watch(ticket.cancel)
    try:
        return await ticket.outcome()
    except Cancelled as error:
        if client.gone:
            raise
        raise Draining("the server stopped before the answer was ready") from error
    finally:
        client.watch(None)


def note(line: RequestLine, asked: core.Request, answer: wire.Answer) -> None:
    """What the log line says about an answer."""
    timings = answer.timings_ms
    line.k, line.items = asked.k, len(answer.items)
    line.versions, line.batch, line.unknown = answer.versions, answer.batch, answer.unknown
    line.timings_ms = wire.Timings(
        round(timings.queue, 3), round(timings.context, 3), round(timings.decode, 3), round(timings.total, 3)
    )
    line.reason, line.load = answer.reason, answer.load
    line.arms = {seen.name: seen.arm for seen in answer.experiments} if answer.experiments else UNSET
