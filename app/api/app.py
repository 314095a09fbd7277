"""Routes to handlers: the public application and the admin application, ready for a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import admin_assignments, admin_events, admin_live, aliases, errors, health, openapi, wire
from app.api.admin import AdminAuth, SameOrigin, Tokens
from app.api.admin import routes as admin_routes
from app.api.health import Readiness
from app.api.middleware import BodyGuard, Edge
from app.api.pages import Console
from app.api.recommend import ARM_HEADER, PATH, TIMEOUT_HEADERS, Recommend
from app.config import Deployment
from app.runtime.control import Control
from app.runtime.front import Counts, Door, Front
from app.runtime.logs import Log
from app.runtime.metrics import Metrics

REFUSALS: Final = (400, 406, 408, 413, 415, 422, 429, 503, 504)
EXAMPLES: Final = {
    "history": {
        "summary": "Ten items for a user who watched three",
        "value": {"user_id": "u-7", "context": {"history": ["296", "318", "593"]}, "k": 10},
    },
    "excluded": {
        "summary": "Items that must not come back, and a deadline",
        "value": {
            "context": {"history": ["296", "318"]},
            "k": 5,
            "exclude": ["593"],
            "user": {"age": 31},
            "deadline_ms": 200,
        },
    },
}


def public(
    front: Front,
    deployment: Deployment,
    metrics: Metrics,
    log: Log,
    readiness: Readiness,
    clock: Callable[[], float] = time.monotonic,
    control: Control | None = None,
) -> ASGIApp:
    """The public application: POST /v1/recommend, health, metrics, versions under other servers' names,
    /openapi.json. control: as in `admin`."""
    app = _fastapi("Widebeam", "Recommendations by generative models with wide beams.", "/openapi.json")
    recommend = Recommend(front, deployment, metrics, clock)
    described = openapi.operation(
        "recommend",
        tag="recommend",
        body=recommend.body,
        answers={200: wire.Answer},
        errors=REFUSALS,
        examples=EXAMPLES,
        parameters=_parameters(),
    )
    app.add_api_route(PATH, recommend.post, methods=["POST"], **described)
    app.include_router(health.routes(readiness, metrics))
    models = aliases.Models(deployment.server.model_name, deployment.family, control or front, readiness)
    app.include_router(aliases.routes(models))
    openapi.install(app, (recommend.body, wire.Answer, wire.Live, wire.Ready))
    return _wrap(Hot(recommend, app), deployment, log, readiness, clock)


def recommendations(
    door: Door,
    deployment: Deployment,
    counts: Counts,
    log: Log,
    readiness: Readiness,
    clock: Callable[[], float] = time.monotonic,
) -> ASGIApp:
    """POST /v1/recommend of the public application, for a process that speaks HTTP for another one."""
    return _wrap(Recommend(door, deployment, counts, clock), deployment, log, readiness, clock)


class Hot:
    """Takes the hot route past FastAPI's layers, which cost as much as everything else that is done for a request.
    FastAPI has it, too: for its document, and for methods that it has not."""

    def __init__(self, recommend: Recommend, app: ASGIApp) -> None:
        self._recommend, self._app = recommend, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        hot = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
        await (self._recommend if hot else self._app)(scope, receive, send)


def admin(
    front: Front,
    deployment: Deployment,
    metrics: Metrics,
    log: Log,
    readiness: Readiness,
    tokens: Tokens | None,
    clock: Callable[[], float] = time.monotonic,
    control: Control | None = None,
) -> ASGIApp:
    """The admin application: everything under /admin/v1, and the console.

    tokens None = no authentication (loopback only: `server`); control None = nothing changes while this server runs
    """
    app = _fastapi("Widebeam admin", "Status and control of one server.", "/admin/v1/openapi.json")
    app.include_router(admin_routes(control or front, readiness, metrics), prefix="/admin/v1")
    if control is not None:
        app.include_router(admin_live.routes(control), prefix="/admin/v1")
        app.include_router(admin_events.routes(control, readiness), prefix="/admin/v1")
    app.include_router(admin_assignments.routes(front), prefix="/admin/v1")
    scheme = {"token": {"type": "http", "scheme": "bearer"}}
    openapi.install(app, admin_live.BODIES if control else (), security=None if tokens is None else scheme)
    guarded: ASGIApp = SameOrigin(app) if tokens is None else AdminAuth(app, tokens)
    return _wrap(Console(guarded), deployment, log, readiness, clock)


def _fastapi(title: str, description: str, document: str) -> FastAPI:
    return FastAPI(
        title=title,
        description=description,
        version=version("widebeam"),
        openapi_url=document,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(errors.CAUGHT, errors.handle),
    )


def _wrap(app: ASGIApp, deployment: Deployment, log: Log, readiness: Readiness, clock: Callable[[], float]) -> ASGIApp:
    server = deployment.server
    return Edge(BodyGuard(app, server.max_body, server.read_timeout_s), readiness, log, clock)


def _parameters() -> list[openapi.Schema]:
    budget = {"type": "integer", "minimum": 1, "maximum": wire.MAX_DEADLINE_MS}
    about = "Time budget in milliseconds; the smallest of the body's and the headers' counts"
    return [
        {"name": name.decode(), "in": "header", "required": False, "description": about, "schema": budget}
        for name in TIMEOUT_HEADERS
    ] + [
        {
            "name": ARM_HEADER.decode(),
            "in": "header",
            "required": False,
            "description": "EXPERIMENT=ARM[,EXPERIMENT=ARM]: serve these arms; only where the deployment allows it",
            "schema": {"type": "string"},
        },
        {
            "name": "x-request-id",
            "in": "header",
            "required": False,
            "description": "1 to 128 of A-Z a-z 0-9 . _ : / + = @ -, echoed; anything else is replaced",
            "schema": {"type": "string"},
        },
    ]
