"""What `api` sees of the runtime: admit a request, ask for the status, drain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.core import Outcome, Request


class Ticket(Protocol):
    """An admitted request."""

    async def outcome(self) -> Outcome:
        """Wait for the answer. Raises Expired at the deadline (to the millisecond, whatever the engine is doing),
        Cancelled after `cancel`, ModelOutput, Fault."""

    def cancel(self) -> None:
        """The client left: the request's rows leave the batch at the next step boundary. Idempotent."""


class Front(Protocol):
    """The runtime's front door. All methods are called on the event loop and never block it."""

    def admit(self, request: Request) -> Ticket:
        """Pin the snapshot and the policy, prepare the context, queue. Raises InvalidRequest (path), Refused."""

    def reasons(self) -> tuple[str, ...]:
        """Why the server is not ready, as stable codes with details ("no_weights", "draining", ...); () = ready."""

    def status(self) -> dict[str, object]:
        """The document of `GET /admin/v1/status` (api.md), as JSON-ready data."""

    def assignment(
        self, experiment: str, unit: str, ctx: Mapping[str, str], user: Mapping[str, float]
    ) -> dict[str, object] | None:
        """Why a unit gets what it gets from an experiment (`policies.assignment.explain`); None for an unknown one.
        Raises NotReady."""

    def begin_drain(self) -> None:
        """Readiness drops; admission refuses with Draining; what is queued or running finishes."""

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False when `timeout_s` passed first."""
