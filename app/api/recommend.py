"""POST /v1/recommend: decode, admit, await the outcome unless the client leaves, encode."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Final

from fastapi import Request, Response
from starlette.types import Receive

from app import core
from app.api import codec, errors, media, wire
from app.api.middleware import Record
from app.config import Deployment
from app.errors import Cancelled, Draining, InvalidRequest, Refused
from app.runtime.front import Counts, Door, Ticket

TIMEOUT_HEADERS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
ARM_HEADER: Final = b"x-widebeam-arm"
_DIGITS: Final = re.compile(r"[0-9]{1,8}")


class Recommend:
    """The hot handler. Everything that can be made once is made here."""

    def __init__(self, door: Door, deployment: Deployment, counts: Counts, clock: Callable[[], float]) -> None:
        self.body = wire.body_type(deployment.limits)
        self._door = door
        self._override = deployment.server.policy_override
        self._counts = counts
        self._clock = clock
        self._decoders = codec.decoders(self.body)

    async def post(self, request: Request) -> Response:
        """Recommend catalogue items for one user context."""
        record: Record = request.scope["widebeam"]
        start, policy = self._clock(), None
        try:
            kind, asked = await self._asked(request, record)
            start = asked.received
            ticket = self._door.admit(asked)
            outcome = await outcome_or_cancel(ticket, request.receive)
            data = media.ENCODE[kind](wire.to_answer(outcome))
            record.outcome, policy = outcome.status, outcome.versions.policy
            record.facts.update(facts(asked, outcome))
        except Exception as error:
            record.outcome = errors.outcome_of(error)
            if isinstance(error, Refused):
                self._counts.shed(error.code)
            raise
        finally:
            self._counts.request_done(record.outcome, policy, self._clock() - start)
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
        received = self._clock()
        body = self._decoders[spoken].decode(data)
        if body.request_id:
            record.rename(body.request_id)
        budget = shortest(headers, body.deadline_ms or None)
        return kind, wire.to_request(
            body,
            request_id=record.request_id,
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


async def outcome_or_cancel(ticket: Ticket, receive: Receive) -> core.Outcome:
    """Wait for the outcome; a client that leaves first cancels the ticket.

    Raises what the ticket raises; Cancelled where the client left; Draining where the runtime cancelled on its own.
    """
    answer: asyncio.Future[core.Outcome] = asyncio.ensure_future(ticket.outcome())
    left: asyncio.Future[None] = asyncio.ensure_future(_left(receive))
    answer.add_done_callback(_retrieve)
    left.add_done_callback(_retrieve)
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Cancelled("the client left")
        try:
            return answer.result()
        except Cancelled as error:
            raise Draining("the server stopped before the answer was ready") from error
    finally:
        if not answer.done():
            ticket.cancel()
            answer.cancel()
        left.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _retrieve(task: asyncio.Future[core.Outcome] | asyncio.Future[None]) -> None:
    """Look at a task's end, so that asyncio does not report an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def facts(asked: core.Request, outcome: core.Outcome) -> Mapping[str, object]:
    """What the log line says about an answer: no user data, no ids of items."""
    found: dict[str, object] = {
        "k": asked.k,
        "items": len(outcome.items),
        "versions": outcome.versions._asdict(),
        "timings_ms": {name: round(value, 3) for name, value in outcome.timings._asdict().items()},
        "batch": {"requests": outcome.batch_requests, "rows": outcome.batch_rows},
    }
    if outcome.reason is not None:
        found["reason"] = outcome.reason
    if outcome.load is not None:
        found["load"] = outcome.load
    if outcome.experiments:
        found["arms"] = {seen.name: seen.arm for seen in outcome.experiments}
    if outcome.unknown_history or outcome.unknown_exclude:
        found["unknown"] = {"history": outcome.unknown_history, "exclude": outcome.unknown_exclude}
    return found
