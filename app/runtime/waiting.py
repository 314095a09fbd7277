"""Why versions serve, or are not on their way: what the listing says of those that wait, that nobody needs now, that
have gone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from app.errors import Rejected
from app.runtime.desired import PIN, Ask, Chosen, Option, choose
from app.runtime.ledger import Ledger
from app.runtime.preparing import Want
from app.runtime.residents import Resident
from app.runtime.states import State
from app.runtime.status import SUPERSEDED, Reason
from app.runtime.survey import Survey
from app.vocab.manifest import Kind

CHANGED: Final = "changed_on_disk"
"""Of versions in memory whose files are not good, or gone."""
NOT_LOOKED_AT = frozenset({State.DISCOVERED, State.WAITING})
KINDS: tuple[Kind, ...] = ("weights", "vocab")


def cause(seen: Survey, want: Want, serving: Resident | None) -> str:
    """Why a set is wanted, as the history says it."""
    if want.is_about_overlay(serving):
        return "deployment"
    if not seen.ask:
        return "newest"
    return "pin" if seen.asked_by == f"state/{PIN}" else "release"


def note_chosen(ledger: Ledger, chosen: Chosen) -> None:
    """Newer versions than the chosen ones wait. Older ones that nobody has looked at were overtaken: nothing happens to
    them until somebody asks for them, or what is newer turns out bad."""
    for (kind, version), why in chosen.waiting.items():
        if ledger.state(kind, version) in NOT_LOOKED_AT:
            ledger.move(kind, version, State.WAITING, reason=Reason("requires", why))
    for kind, version in chosen.superseded:
        if ledger.state(kind, version) in NOT_LOOKED_AT:
            ledger.move(kind, version, State.DISCOVERED, reason=SUPERSEDED)


def note_no_slot(ledger: Ledger, version: str, why: str) -> None:
    """Weights wait until a slot is free; requests never do."""
    if ledger.state("weights", version) in NOT_LOOKED_AT:
        ledger.move("weights", version, State.WAITING, reason=Reason("no_slot", why))


def note_gone(ledger: Ledger, serving: Resident | None, seen: Survey) -> None:
    """What serves and is not on the disk any more: the next start would not have it."""
    for kind, version in zip(KINDS, serving.versions if serving else (), strict=False):
        there = any(one.version == version for one in seen.candidates[kind])
        if not there and ledger.state(kind, version) is State.ACTIVE:
            message = "what is in memory serves on; on the disk: the version is gone"
            ledger.move(kind, version, State.ACTIVE, reason=Reason(CHANGED, message, f"{kind}/{version}"))


def together(
    weights: Sequence[Option], vocab: Sequence[Option], apart: Collection[tuple[str, str]], ask: Ask
) -> Rejected | None:
    """Why none of these can serve together; None where some can, or where there are none of a kind, or where only one
    is asked for and what goes with it may still come. apart: as for `choose`."""
    chosen = choose(weights, vocab, apart)
    if not weights or not vocab or chosen.weights is not None:
        return None
    if len(ask) < len(KINDS) and choose(weights, vocab).weights is None:
        return None
    message = "; ".join(f"{kind} {version} {why}" for (kind, version), why in chosen.waiting.items())
    return Rejected("requires", message, location=f"weights/{weights[0].version}")


def unmet(ledger: Ledger, seen: Survey) -> Rejected:
    """Why the versions that are asked for cannot serve."""
    for kind in KINDS:
        version = seen.ask.get(kind)
        if version is None:
            continue
        state, reason = ledger.state(kind, version), ledger.reason(kind, version)
        if state is None:
            return Rejected("no_such_version", f"{kind} {version!r} is not there", location=seen.asked_by)
        if reason is not None and reason != SUPERSEDED:
            return Rejected(reason.code, reason.message, location=reason.location)
    return Rejected("requires", "the versions that are asked for do not go together", location=seen.asked_by)
