"""What the server says of itself: the document of GET /admin/v1/status (api.md)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from app.errors import Rejected


def now_iso() -> str:
    """Wall-clock time for people: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def utc_seconds() -> float:
    """Wall-clock time as unix seconds: for moments that people write down, never for durations."""
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is not in service: a stable code, a sentence, and where. others: what else was found there."""

    code: str
    message: str
    location: str | None = None
    others: tuple[Reason, ...] = ()

    @classmethod
    def of(cls, error: Rejected, version: str) -> Reason:
        """Of a version that was refused, `kind/name`: places as they are called from the root."""
        place = version + (f"/{error.location}" if error.location else "")
        return cls(error.code, error.message, place, tuple(cls.of(one, version) for one in error.others))

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        return f"{self.code}: {place}{self.message}"

    def document(self) -> dict[str, object]:
        """As `artifacts[].reason` shows it."""
        shown: dict[str, object] = {"code": self.code, "message": self.message}
        if self.location:
            shown["location"] = self.location
        if self.others:
            shown["others"] = [one.document() for one in self.others]
        return shown


def unfinished(kind: str, version: str) -> Reason:
    """Why a version without a manifest is `incomplete`."""
    message = "there is none yet: it is still being written, or was not made by a command that publishes"
    return Reason("manifest_missing", message, f"{kind}/{version}/MANIFEST.json")


SUPERSEDED: Final = Reason("superseded", "there is a newer version: this one is loaded where it is asked for")
"""Why a version that nobody has looked at stays `discovered`."""


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
