"""The admin routes of live updates: policies, the kill switch, snapshots.

Writes take `If-Match: "EPOCH"`, the ETag of what the operator saw: 412 where something was decided or cut over since.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from app.api import errors, media, openapi
from app.errors import InvalidRequest, Refused, Rejected, WidebeamError
from app.runtime.control import Control, Document, Kind

T = TypeVar("T", bound=msgspec.Struct)
REFUSED: Final = (400, 401, 403, 404, 412, 422, 503)
MAX_HISTORY: Final = 200
TAG: Final = re.compile(r'(?:W/)?"[^"]*"')
"""An entity tag (RFC 9110, 8.8.3); with `W/` a weak one, which If-Match never matches."""
KINDS: Final = (*get_args(Kind), "engine")
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

    async def reload(request: Request) -> Response:
        """Read the policy folder now: 200 where everything in it is in force, 422 with the findings where not."""
        match(request, control)
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

    async def explain(policy: str) -> Response:
        """What a policy that serves does at each step, and where each value came from."""
        found = await control.explain_policy(policy)
        if found is None:
            raise errors.NotFound("no such policy serves")
        return answer(found)

    async def kill(request: Request) -> Response:
        """Kill or revive policies and experiments from the next admission on."""
        asked = await body(request, Kill)
        match(request, control)
        try:
            return decided(await control.kill(asked.kill, asked.revive), control)
        except OSError as error:
            raise Refused(f"the kill cannot be kept: {error.strerror}") from error

    _add(router, "/policies", policies, "GET", "policies")
    _add(router, "/policies:reload", reload, "POST", "policies_reload")
    _add(router, "/policies:check", check, "POST", "policies_check", PolicyText)
    _add(router, "/policies/{policy}/explain", explain, "GET", "policy_explain")
    _add(router, "/kill", kill, "POST", "kill", Kill)
    _reads(router, control)
    _snapshots(router, control)
    return router


def _reads(router: APIRouter, control: Control) -> None:
    """What there is: snapshots, versions, cutovers."""

    async def snapshots() -> Response:
        """The snapshots in memory, and what is asked for."""
        return decided(control.snapshots(), control)

    async def snapshot(snapshot: str) -> Response:
        """One of them."""
        return decided(_one(control.snapshots()["snapshots"], id=snapshot), control)

    async def artifacts(kind: str) -> Response:
        """The versions of a kind and what became of them; of `policy`, the policies by name."""
        return answer({"artifacts": _artifacts(control.status(), kind)})

    async def artifact(kind: str, version: str) -> Response:
        """One of them."""
        return answer(_one(_artifacts(control.status(), kind), version=version))

    async def history(request: Request) -> Response:
        """The newest `limit` cutovers (50 where it is not given), oldest first."""
        limit = int(number(request, "limit", MAX_HISTORY, 50))
        found = control.status()["history"]
        assert isinstance(found, list)
        return answer({"history": found[-limit:] if limit else []})

    _add(router, "/snapshots", snapshots, "GET", "snapshots")
    _add(router, "/snapshots/{snapshot}", snapshot, "GET", "snapshot")
    _add(router, "/artifacts/{kind}", artifacts, "GET", "artifacts")
    _add(router, "/artifacts/{kind}/{version}", artifact, "GET", "artifact")
    _add(router, "/history", history, "GET", "history")


def _snapshots(router: APIRouter, control: Control) -> None:
    """Decisions about snapshots."""

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
        wait_s = number(request, "wait", 600)
        match(request, control)
        document = await _decided(control.ask(versions, wait_s))
        return decided(document, control, 200 if document["state"] == "active" else 202)

    async def select(request: Request, snapshot: str, cause: str) -> Response:
        match(request, control)
        return decided(await _decided(control.select(snapshot, cause)), control)

    async def promote(request: Request, snapshot: str) -> Response:
        """Pin a snapshot that is in memory and admit on it at once."""
        return await select(request, snapshot, "promote")

    async def rollback(request: Request, snapshot: str) -> Response:
        """The same, for the way back."""
        return await select(request, snapshot, "rollback")

    async def pin(request: Request, snapshot: str) -> Response:
        """The same, in order to stay: newer versions prepare, and wait."""
        return await select(request, snapshot, "pin")

    def unpinned(request: Request, snapshot: str | None) -> Response:
        match(request, control)
        try:
            return decided(control.unpin(snapshot), control)
        except OSError as error:
            raise Refused(f"the decision cannot be kept: {error.strerror}") from error

    async def unpin(request: Request) -> Response:
        """Follow release.json, or the newest versions, again."""
        return unpinned(request, None)

    async def unpin_one(request: Request, snapshot: str) -> Response:
        """The same, where just this snapshot is pinned; else what is pinned stays."""
        return unpinned(request, snapshot)

    async def drain(request: Request) -> Response:
        """Refuse new requests; what is queued or running finishes."""
        match(request, control)
        return decided(control.drain(), control)

    _add(router, "/snapshots:promote", promote_versions, "POST", "snapshots_promote", Versions)
    _add(router, "/snapshots:unpin", unpin, "POST", "snapshots_unpin")
    for verb, handler in (("promote", promote), ("rollback", rollback), ("pin", pin), ("unpin", unpin_one)):
        _add(router, f"/snapshots/{{snapshot}}:{verb}", handler, "POST", f"snapshot_{verb}")
    _add(router, "/drain", drain, "POST", "drain")


def _add(router: APIRouter, path: str, handler: Any, method: str, name: str, kind: type | None = None) -> None:
    answers = {200: dict, 202: dict} if kind is Versions else {200: dict}
    described = openapi.operation(name, tag="admin", answers=answers, errors=REFUSED)
    if kind is not None:
        schema = {"schema": {"$ref": openapi.REF.format(name=kind.__name__)}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": {media.JSON: schema}}}
    router.add_api_route(path, handler, methods=[method], **described)


def _artifacts(status: Document, kind: str) -> list[Document]:
    """What there is of a kind. Raises NotFound for what is no kind."""
    if kind == "policy":
        policies = status["policies"]
        assert isinstance(policies, dict)
        return [{"kind": kind, "version": name, **facts} for name, facts in sorted(policies.items())]
    if kind not in KINDS:
        raise errors.NotFound(f"no such kind; there are {', '.join((*KINDS, 'policy'))}")
    found = status["artifacts"]
    assert isinstance(found, list)
    return [one for one in found if one["kind"] == kind]


def _one(documents: object, **facts: str) -> Document:
    """The document with these facts. Raises NotFound."""
    assert isinstance(documents, list)
    for one in documents:
        if all(one[name] == value for name, value in facts.items()):
            found: Document = one
            return found
    raise errors.NotFound("there is no such thing")


async def _decided(decision: Awaitable[Document]) -> Document:
    """What the gate refuses is the client's business: 422 with its code and place."""
    try:
        return await decision
    except Rejected as error:
        refused: WidebeamError = InvalidRequest(error.message, path=error.location)
        refused.code = error.code
    except OSError as error:
        refused = Refused(f"the decision cannot be kept: {error.strerror}")
    raise refused  # not from the other, whose traceback holds snapshots: ours is kept until the request is logged


def answer(document: Document, status: int = 200) -> Response:
    """A document as JSON that nobody keeps."""
    return Response(media.ENCODE[media.JSON](document), status, {"cache-control": "no-store"}, media.JSON)


def match(request: Request, control: Control) -> None:
    """Raise EpochChanged where If-Match names other epochs than the present one, a weak tag being none of them, and
    MalformedHeader where it names nothing: whoever writes it wants to be protected. Nothing may wait between this and
    the decision."""
    headers = request.scope["headers"]
    if not any(name == b"if-match" for name, _ in headers):
        return
    given = media.header(headers, b"if-match").strip()
    if given == "*":
        return
    tags = TAG.findall(given)
    if not tags or {part.strip() for part in TAG.sub("", given).split(",")} != {""} or len(tags) > given.count(",") + 1:
        raise errors.MalformedHeader('expected `"EPOCH"` as the ETag says it, in quotes, or `*`', path="If-Match")
    if etag(control) not in tags:
        raise errors.EpochChanged("somebody decided, or something was cut over, since; look again", path="If-Match")


def etag(control: Control) -> str:
    """The epoch as an entity tag."""
    return f'"{control.epoch}"'


def decided(document: Document, control: Control, status: int = 200) -> Response:
    """A document that somebody may decide by, or that says what was decided: with the epoch as its ETag."""
    reply = answer(document, status)
    reply.headers["etag"] = etag(control)
    return reply


async def body(request: Request, kind: type[T]) -> T:
    """A JSON body as a struct. Raises MalformedBody, or InvalidRequest with the field's path."""
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        raise InvalidRequest(message, path=place.rstrip("`") or "$") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.MalformedBody(f"the body is not JSON: {error}") from error


def number(request: Request, name: str, most: float, otherwise: float = 0) -> float:
    """A number of the query from 0 to `most`; `otherwise` where it is not given. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequest(f"expected a number from 0 to {most:g}", path=f"query {name}")
    return value
