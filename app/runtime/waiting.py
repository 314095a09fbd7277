"""Why versions are not on their way: what the listing says of those that wait, and of those that nobody needs now."""

from __future__ import annotations

from app.errors import Rejected
from app.runtime.desired import Chosen
from app.runtime.ledger import Ledger
from app.runtime.states import State
from app.runtime.status import SUPERSEDED, Reason
from app.runtime.survey import Survey
from app.vocab.manifest import Kind

NOT_LOOKED_AT = frozenset({State.DISCOVERED, State.WAITING})
KINDS: tuple[Kind, ...] = ("weights", "vocab")


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
