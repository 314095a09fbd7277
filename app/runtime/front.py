"""What `api` sees of the runtime: admit a request, ask for the status, drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from app.core import Outcome, Request
from app.errors import WidebeamError


class Handle(Protocol):
    """An admitted request that can be given up."""

    def cancel(self) -> None:
        """The client left: the request's rows leave the batch at the next step boundary. Idempotent."""


class Ticket(Handle, Protocol):
    """An admitted request."""

    async def outcome(self) -> Outcome:
        """Wait for the answer. Raises Expired at the deadline (to the millisecond, whatever the engine is doing),
        Cancelled after `cancel`, ModelOutput, Fault. A wait that is cancelled gives the request up, as `cancel`."""


class Counts(Protocol):
    """What whoever speaks HTTP counts."""

    def request_done(self, outcome: str, policy: str | None, seconds: float) -> None:
        """Count a request; see `metrics.Metrics.request_done`."""

    def shed(self, code: str) -> None:
        """Count a request that was refused."""

    def lag(self, seconds: float) -> None:
        """Note how late the event loop woke up."""


class Door(Protocol):
    """Where requests are admitted: by the runtime of this process, or of another one."""

    def admit(self, request: Request) -> Ticket:
        """Pin the snapshot and the policy, prepare the context, queue. Raises InvalidRequest (path), Refused; of
        another process, its ticket does."""


class Front(Door, Protocol):
    """The runtime's front door. All methods are called on the event loop and never block it."""

    def hand_in(self, request: Request, tell: Callable[[Outcome | WidebeamError], None]) -> Handle:
        """`admit` for somebody who keeps the deadline and is told, later on the event loop, what became of the request;
        not after `cancel`, and not where the request leaves the queue because its deadline has passed."""

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
