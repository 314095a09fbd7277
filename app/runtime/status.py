"""What the server says of itself: the document of GET /admin/v1/status (api.md)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


def now_iso() -> str:
    """Wall-clock time for people: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is not in service: a stable code, a sentence, and where."""

    code: str
    message: str
    location: str | None = None

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        return f"{self.code}: {place}{self.message}"

    def document(self) -> dict[str, object]:
        """As `artifacts[].reason` shows it."""
        shown: dict[str, object] = {"code": self.code, "message": self.message}
        return {**shown, "location": self.location} if self.location else shown


@dataclass(frozen=True, slots=True)
class ArtifactStatus:
    """One version on disk and what became of it; the states are those of docs/architecture.md."""

    kind: str
    version: str
    state: str
    at: str
    digest: str | None = None
    reason: Reason | None = None

    def document(self) -> dict[str, object]:
        """As `artifacts[]` shows it."""
        shown: dict[str, object] = {"kind": self.kind, "version": self.version, "state": self.state, "at": self.at}
        if self.digest is not None:
            shown["digest"] = self.digest
        if self.reason is not None:
            shown["reason"] = self.reason.document()
        return shown


@dataclass(frozen=True, slots=True)
class Cutover:
    """One change of the active snapshot. before, after: snapshot ids · hold_ms: admission to the first batch on it."""

    at: str
    before: str | None
    after: str
    cause: str
    hold_ms: float

    def document(self) -> dict[str, object]:
        """As `history[]` shows it."""
        return {"at": self.at, "from": self.before, "to": self.after, "cause": self.cause, "hold_ms": self.hold_ms}
