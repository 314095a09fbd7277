"""An edited deployment.toml: what of it can change while the server runs, and what needs a restart."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from app.config import Deployment, Unread, decode, parse
from app.errors import BadDeployment, Rejected

LIVE: Final = ("limits", "precision", "request", "attributes", "priors", "lists")
"""Parts of the overlay that make a new contract, which is prepared and cut over to like new weights."""


class Overlay(NamedTuple):
    """deployment: what to prepare for · restart: fields whose new values count from the next start · problem: why the
    file cannot be used; then what ran goes on."""

    deployment: Deployment
    restart: tuple[str, ...] = ()
    problem: Rejected | None = None

    def document(self, serving: Deployment | None) -> dict[str, object]:
        """As the status shows it. serving: what new requests are served under, None where nothing serves yet; until
        that is this overlay, which has to be loaded, warmed up and cut over to, its state is `preparing`."""
        if self.problem is not None:
            problem = {"code": self.problem.code, "message": self.problem.message, "location": self.problem.location}
            return {"state": "rejected", "reason": problem}
        if serving != self.deployment:
            return {"state": "preparing", "restart": list(self.restart)}
        return {"state": "needs restart" if self.restart else "in force", "restart": list(self.restart)}


def overlay(
    text: bytes | Unread, began: bytes | Unread, running: Deployment, before: Deployment | None = None
) -> Overlay:
    """What an overlay's text asks of a server that was started with another one.

    text, began: the file now and at the start · running: the deployment of the start ·
    before: what the last text that could be read asked for; it goes on where this one cannot be used
    """
    try:
        new, old = parse(decode(text)), parse(decode(began))
    except BadDeployment as error:
        if text == began:
            return Overlay(running)
        return Overlay(before or running, (), Rejected(error.code, error.message, location=error.path))
    restart = tuple(name for name in _different(new, old) if name.partition(".")[0] not in LIVE)
    return Overlay(msgspec.structs.replace(running, **{name: getattr(new, name) for name in LIVE}), restart)


def _different(new: Deployment, old: Deployment) -> list[str]:
    """The fields whose values differ, sections field by field."""
    found: list[str] = []
    for name in Deployment.__struct_fields__:
        one, other = getattr(new, name), getattr(old, name)
        if one == other:
            continue
        if isinstance(one, msgspec.Struct) and isinstance(other, msgspec.Struct):
            fields = one.__struct_fields__
            found += [f"{name}.{field}" for field in fields if getattr(one, field) != getattr(other, field)]
        else:
            found.append(name)
    return found
