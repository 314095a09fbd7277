"""What the admin application sees of the runtime beside its front door."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

Document = dict[str, object]
"""JSON-ready data."""
Kind = Literal["weights", "vocab", "takedowns"]


class Control(Protocol):
    """Live updates, looked at and steered by an operator. Called on the event loop; nothing blocks it."""

    def status(self) -> Document:
        """The document of `GET /admin/v1/status`."""

    def policies(self) -> Document:
        """The policies in force and what is wrong with their files. Raises NotReady before the first read."""

    async def reload_policies(self) -> Document:
        """Read and compile the policy folder now; the same document. Its `last_attempt_ok` says how it went."""

    async def check_policy(self, name: str, text: str) -> Document:
        """{"ok", "policy_id", "diagnostics"} of a text; nothing is installed. Raises NotReady."""

    async def explain_policy(self, name: str) -> Document | None:
        """What a policy that serves does at each step; None where there is none. Raises NotReady."""

    async def kill(self, add: Iterable[str], remove: Iterable[str]) -> Document:
        """Kill and revive policies and experiments from the next admission on; {"killed": [{"name", "by"}]}.

        Raises InvalidRequest for the default policy and for what cannot be a name, OSError where it cannot be kept.
        """

    def snapshots(self) -> Document:
        """{"snapshots": those in memory, the active one first, "desired": what is asked for}."""

    async def select(self, snapshot_id: str, cause: str) -> Document:
        """Pin a snapshot in memory and admit on it at once; {"snapshot", "state", "pin"}. Idempotent.

        Raises InvalidRequest where it is not in memory, Rejected where the policies in force cannot serve with it,
        OSError where the pin cannot be kept.
        """

    async def ask(self, versions: dict[Kind, str], wait_s: float) -> Document:
        """Pin versions that may have to be loaded first, and wait for what becomes of them, as `select`; state
        "pending" where that takes longer. Raises InvalidRequest, Rejected with the gate's reason, OSError."""

    def unpin(self, snapshot_id: str | None = None) -> Document:
        """Follow release.json, or the newest versions, again; {"pin"}. Idempotent.

        snapshot_id: only where just that one is pinned; raises InvalidRequest where it is not in memory.
        """

    @property
    def epoch(self) -> str:
        """Another one after every change of the active snapshot and every operator's decision; never the same one
        twice, not even by another process."""

    def events(self, after: int) -> list[Document]:
        """The newest events with a number above `after`, oldest first."""

    async def told(self, after: int) -> None:
        """Wait until there is an event with a number above `after`."""

    @property
    def boot(self) -> str:
        """Names this process: events are numbered anew by the next one."""

    def drain(self) -> Document:
        """Refuse new requests, finish what is queued or running, stay alive. Idempotent."""
