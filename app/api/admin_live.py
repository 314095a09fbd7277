"""The admin routes of live updates: policies and the kill switch."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from app.api import errors, media, openapi
from app.errors import InvalidRequest, Refused, Rejected
from app.runtime.control import Control, Document, Kind

T = TypeVar("T", bound=msgspec.Struct)
REFUSED: Final = (400, 401, 403, 422, 503)
Name = Annotated[str, Meta(min_length=1, max_length=128)]
PolicyName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$", max_length=64)]


class PolicyText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy that is not installed: the name that its file would have, and its text."""

    name: PolicyName
    text: Annotated[str, Meta(max_length=1 << 20)]


class Kill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of policies and experiments to kill, and to revive; `*` = all of them."""

    kill: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    revive: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Versions to pin and serve; what is left out is the newest that goes with the rest."""

    weights: Name | None = None
    vocab: Name | None = None


BODIES: Final = (PolicyText, Kill, Versions)


def routes(control: Control) -> APIRouter:
    """The routes, without their prefix."""
    router = APIRouter()

    async def policies() -> Response:
        """The policies in force, and what is wrong with their files."""
        return answer(control.policies())

    async def reload() -> Response:
        """Read the policy folder now: 200 where everything in it is in force, 422 with the findings where not."""
        document = await control.reload_policies()
        if document["last_attempt_ok"]:
            return answer(document)
        message = "some files are not in force; see `policies` and `errors`"
        error = {"code": "policy_rejected", "message": message, "retryable": False}
        return answer({"error": error, **document}, 422)

    async def check(request: Request) -> Response:
        """Compile a text as a policy of this folder; nothing is installed."""
        asked = await body(request, PolicyText)
        return answer(await control.check_policy(asked.name, asked.text))

    async def kill(request: Request) -> Response:
        """Kill or revive policies and experiments from the next admission on."""
        asked = await body(request, Kill)
        try:
            return answer(await control.kill(asked.kill, asked.revive))
        except OSError as error:
            raise Refused(f"the kill cannot be kept: {error.strerror}") from error

    _add(router, "/policies", policies, "GET", "policies")
    _add(router, "/policies:reload", reload, "POST", "policies_reload")
    _add(router, "/policies:check", check, "POST", "policies_check", PolicyText)
    _add(router, "/kill", kill, "POST", "kill", Kill)
    _snapshots(router, control)
    return router


def _snapshots(router: APIRouter, control: Control) -> None:
    """The routes of snapshots."""

    async def snapshots() -> Response:
        """The snapshots in memory, and what is asked for."""
        return answer(control.snapshots())

    async def promote_versions(request: Request) -> Response:
        """Pin versions, load them where they are not in memory, serve them: 200, or 202 after `wait` seconds."""
        asked = await body(request, Versions)
        versions: dict[Kind, str] = {}
        if asked.weights is not None:
            versions["weights"] = asked.weights
        if asked.vocab is not None:
            versions["vocab"] = asked.vocab
        if not versions:
            raise InvalidRequest("name weights, vocab or both", path="$")
        document = await _decided(control.ask(versions, _number(request, "wait", 600)))
        return answer(document, 200 if document["state"] == "active" else 202)

    async def promote(snapshot: str) -> Response:
        """Pin a snapshot that is in memory and admit on it at once."""
        return answer(await _decided(control.select(snapshot, "promote")))

    async def rollback(snapshot: str) -> Response:
        """The same, for the way back."""
        return answer(await _decided(control.select(snapshot, "rollback")))

    async def pin(snapshot: str) -> Response:
        """The same, in order to stay: newer versions prepare, and wait."""
        return answer(await _decided(control.select(snapshot, "pin")))

    async def unpin() -> Response:
        """Follow release.json, or the newest versions, again."""
        try:
            return answer(control.unpin())
        except OSError as error:
            raise Refused(f"the decision cannot be kept: {error.strerror}") from error

    async def events(request: Request) -> Response:
        """What happened to versions, pins and snapshots after event number `after`, oldest first."""
        return answer({"events": control.events(int(_number(request, "after", 2**53)))})

    async def drain() -> Response:
        """Refuse new requests; what is queued or running finishes."""
        return answer(control.drain())

    _add(router, "/snapshots", snapshots, "GET", "snapshots")
    _add(router, "/snapshots:promote", promote_versions, "POST", "snapshots_promote", Versions)
    _add(router, "/snapshots:unpin", unpin, "POST", "snapshots_unpin")
    for verb, handler in (("promote", promote), ("rollback", rollback), ("pin", pin)):
        _add(router, f"/snapshots/{{snapshot}}:{verb}", handler, "POST", f"snapshot_{verb}")
    _add(router, "/events", events, "GET", "events")
    _add(router, "/drain", drain, "POST", "drain")


def _add(router: APIRouter, path: str, handler: Any, method: str, name: str, kind: type | None = None) -> None:
    answers = {200: dict, 202: dict} if kind is Versions else {200: dict}
    described = openapi.operation(name, tag="admin", answers=answers, errors=REFUSED)
    if kind is not None:
        schema = {"schema": {"$ref": openapi.REF.format(name=kind.__name__)}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": {media.JSON: schema}}}
    router.add_api_route(path, handler, methods=[method], **described)


async def _decided(decision: Awaitable[Document]) -> Document:
    """What the gate refuses is the client's business: 422 with its code and place."""
    try:
        return await decision
    except Rejected as error:
        refused = InvalidRequest(error.message, path=error.location)
        refused.code = error.code
        raise refused from error
    except OSError as error:
        raise Refused(f"the decision cannot be kept: {error.strerror}") from error


def answer(document: Document, status: int = 200) -> Response:
    """A document as JSON that nobody keeps."""
    return Response(media.ENCODE[media.JSON](document), status, {"cache-control": "no-store"}, media.JSON)


async def body(request: Request, kind: type[T]) -> T:
    """A JSON body as a struct. Raises MalformedBody, or InvalidRequest with the field's path."""
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        raise InvalidRequest(message, path=place.rstrip("`") or "$") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.MalformedBody(f"the body is not JSON: {error}") from error


def _number(request: Request, name: str, most: float) -> float:
    """A number of the query from 0 to `most`; 0 where it is not given. Raises InvalidRequest."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequest(f"expected a number from 0 to {most:g}", path=f"query {name}")
    return value
