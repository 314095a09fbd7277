"""The admin routes of live updates: policies and the kill switch."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from app.api import errors, media, openapi
from app.errors import InvalidRequest
from app.runtime.control import Control, Document

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


BODIES: Final = (PolicyText, Kill)


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
        return answer(control.kill(asked.kill, asked.revive))

    def add(path: str, handler: Any, method: str, name: str, kind: type | None = None) -> None:
        described = openapi.operation(name, tag="admin", answers={200: dict}, errors=REFUSED)
        if kind is not None:
            schema = {"schema": {"$ref": openapi.REF.format(name=kind.__name__)}}
            described["openapi_extra"] = {"requestBody": {"required": True, "content": {media.JSON: schema}}}
        router.add_api_route(path, handler, methods=[method], **described)

    add("/policies", policies, "GET", "policies")
    add("/policies:reload", reload, "POST", "policies_reload")
    add("/policies:check", check, "POST", "policies_check", PolicyText)
    add("/kill", kill, "POST", "kill", Kill)
    return router


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
