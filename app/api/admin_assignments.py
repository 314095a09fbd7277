"""GET /admin/v1/assignments/{experiment}: why one unit gets what it gets."""

from __future__ import annotations

import math
from typing import Final

from fastapi import APIRouter, Request, Response

from app.api import errors, media, openapi
from app.errors import InvalidRequest
from app.runtime.front import Front

CTX: Final = "ctx."
USER: Final = "user."


def routes(front: Front) -> APIRouter:
    """The route, without its prefix."""
    router = APIRouter()

    async def assignment(request: Request) -> Response:
        """The arm of one unit, and every number that leads to it; nothing is counted or recorded.

        `unit` is the user id, or whatever the experiment's layer hashes; `ctx.NAME` and `user.NAME` say what else the
        request would.
        """
        name = request.path_params["experiment"]
        unit, ctx, user = _asked(request)
        found = front.assignment(name, unit, ctx, user)
        if found is None:
            raise errors.NotFound(f"there is no experiment `{name}`")
        return Response(media.ENCODE[media.JSON](found), 200, {"cache-control": "no-store"}, media.JSON)

    text = {"type": "string"}
    parameters: list[openapi.Schema] = [
        {"name": "experiment", "in": "path", "required": True, "schema": text},
        {"name": "unit", "in": "query", "required": True, "schema": {**text, "minLength": 1, "maxLength": 512}},
    ]
    described = openapi.operation(
        "assignment", tag="admin", answers={200: dict}, errors=(401, 403, 404, 422, 503), parameters=parameters
    )
    router.add_api_route("/assignments/{experiment}", assignment, **described)
    return router


def _asked(request: Request) -> tuple[str, dict[str, str], dict[str, float]]:
    """Unit, ctx and user of the query. Raises InvalidRequest for anything else."""
    unit, ctx, user = "", dict[str, str](), dict[str, float]()
    seen: set[str] = set()
    for key, value in request.query_params.multi_items():
        path = f"query {key[:64]}"
        if key in seen:
            raise InvalidRequest("given twice", path=path)
        seen.add(key)
        if key == "unit":
            unit = value
        elif key.startswith(CTX):
            ctx[key.removeprefix(CTX)] = value
        elif key.startswith(USER):
            user[key.removeprefix(USER)] = _number(value, path)
        else:
            raise InvalidRequest("expected `unit`, `ctx.NAME` or `user.NAME`", path=path)
    if not 1 <= len(unit.encode()) <= 512:
        raise InvalidRequest("expected 1 to 512 bytes", path="query unit")
    return unit, ctx, user


def _number(text: str, path: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequest("expected a finite number", path=path)
    return value
