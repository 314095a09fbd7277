"""What the admin application sees of the runtime beside its front door."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

Document = dict[str, object]
"""JSON-ready data."""


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

    def kill(self, add: Iterable[str], remove: Iterable[str]) -> Document:
        """Kill and revive policies and experiments from the next admission on; {"killed": [{"name", "by"}]}.

        Raises InvalidRequest for the default policy and for what cannot be a name, OSError where it cannot be kept.
        """
