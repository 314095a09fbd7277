"""Is it alive, is it ready, and the metrics: what probes and scrapers ask."""

from __future__ import annotations

import asyncio
from typing import Protocol

from fastapi import APIRouter, Response

from app.api import media, openapi, wire
from app.runtime.metrics import CONTENT_TYPE, Metrics


class HasReasons(Protocol):
    """Whoever knows why this server is not ready."""

    def reasons(self) -> tuple[str, ...]:
        """See `front.Front`."""


class Readiness:
    """Whether new requests should come here: the runtime's reasons, and whether this process is on its way out.

    Readiness drops when `leave` is called, a while before anything is refused: balancers need time to look away.
    """

    def __init__(self, front: HasReasons) -> None:
        self._front = front
        self.left = asyncio.Event()

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self.left.is_set()

    def leave(self) -> None:
        """From now on not ready, every answer ends its connection, and what would go on for ever ends."""
        self.left.set()

    def reasons(self) -> tuple[str, ...]:
        """Why not ready; () = ready."""
        reasons = self._front.reasons()
        return ("draining", *reasons) if self.leaving and "draining" not in reasons else reasons


def _json(body: object, status: int = 200) -> Response:
    return Response(media.ENCODE[media.JSON](body), status, {"cache-control": "no-store"}, media.JSON)


def routes(readiness: Readiness, metrics: Metrics) -> APIRouter:
    """`/livez`, `/readyz`, their names in the Open Inference Protocol, and `/metrics`."""
    router = APIRouter()

    async def live() -> Response:
        """Whether the process answers. Says nothing about models."""
        return _json(wire.Live(True))

    async def ready() -> Response:
        """Whether recommendations can be served: 200, or 503 with the reasons."""
        reasons = readiness.reasons()
        return _json(wire.Ready(not reasons, reasons), 503 if reasons else 200)

    async def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    for path, name in (("/livez", "livez"), ("/v2/health/live", "v2_live")):
        router.add_api_route(path, live, **openapi.operation(name, tag="health", answers={200: wire.Live}))
    for path, name in (("/readyz", "readyz"), ("/v2/health/ready", "v2_ready")):
        answers = {200: wire.Ready, 503: wire.Ready}
        router.add_api_route(path, ready, **openapi.operation(name, tag="health", answers=answers))
    router.add_api_route("/metrics", scrape, **openapi.operation("metrics", tag="health", answers={200: "text/plain"}))
    return router
