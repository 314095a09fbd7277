"""Which versions are wanted: the pin, else release.json, else the newest that agree with each other (api.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from app.config import read_json, read_small
from app.errors import Rejected, unreadable
from app.vocab.manifest import Found, Kind, Manifest, is_version, versions

MAX_FILE = 1 << 20
SHOWN = 8
"""Versions that a message names: a manifest may require any number, and what it says stays in the events."""
RELEASE = "release.json"
PIN = "pin.json"
Ask = Mapping[Kind, str]


class Wish(NamedTuple):
    """The versions of a kind to try, best first. `asked_by` names the file that asks for exactly one, or is None."""

    found: tuple[Found, ...]
    asked_by: str | None


def wishes(root: Path, state_dir: Path, kind: Kind) -> Wish:
    """What to load of a kind at a start.

    Raises Rejected for a pin or release.json that cannot be read, and for an asked version that is not there.
    """
    complete = tuple(found for found in versions(root, kind) if found.complete)
    for file, place in places(root, state_dir):
        version = asked(file, place).get(kind)
        if version is not None:
            chosen = tuple(found for found in complete if found.version == version)
            if not chosen:
                raise Rejected("no_such_version", f"{kind} {version!r} is not there, or not complete", location=place)
            return Wish(chosen, place)
    return Wish(complete, None)


def places(root: Path, state_dir: Path) -> tuple[tuple[Path, str], ...]:
    """The files that may ask for versions, the strongest first, with the names that messages use."""
    return (state_dir / PIN, f"state/{PIN}"), (root / RELEASE, RELEASE)


def asked(file: Path, place: str) -> dict[Kind, str]:
    """What a pin or release.json asks for; {} where there is none. Raises Rejected where it cannot be understood."""
    try:
        text = read_small(file, MAX_FILE + 1, file.parent)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(error, "unreadable", place) from error
    if len(text) > MAX_FILE:
        raise Rejected("too_large", f"more than {MAX_FILE} bytes", location=place)
    try:
        found = msgspec.json.decode(text, type=dict[Kind, str])
        read_json(text)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise Rejected("bad_json", str(error) or "nested too deeply", location=place) from error
    bad = next((version for version in found.values() if not is_version(version)), None)
    if bad is not None:
        raise Rejected("version_name", f"{bad[:128]!r} cannot be a version", location=place)
    return found


# ---- choosing among what is there ----------------------------------------------------------------------------------


class Option(NamedTuple):
    """A version that could serve: on the disk with a readable manifest, or in memory."""

    version: str
    digest: str
    requires: Mapping[Kind, Sequence[str]]

    @classmethod
    def of(cls, manifest: Manifest) -> Option:
        """What a manifest says."""
        return cls(manifest.version, manifest.digest, manifest.requires)

    def takes(self, kind: Kind, other: Option) -> bool:
        """Whether this version may go together with another one of that kind."""
        wanted = self.requires.get(kind)
        return wanted is None or other.version in wanted or other.digest in wanted


class Usable(Protocol):
    """A version on the disk, as `survey.Candidate`."""

    @property
    def manifest(self) -> Manifest | None:
        """None where it cannot be used."""


def usable(found: Iterable[Usable], ask: str | None, rejected: Collection[str]) -> tuple[Option, ...]:
    """The versions of a kind that may be tried, in the order given; only the one that is asked for, if one is."""
    manifests = [one.manifest for one in found if one.manifest is not None]
    return tuple(Option.of(one) for one in manifests if one.version not in rejected and ask in {None, one.version})


class Chosen(NamedTuple):
    """The newest weights and vocab that agree, or none; what newer versions wait for, by (kind, version); superseded:
    older ones."""

    weights: Option | None
    vocab: Option | None
    waiting: Mapping[tuple[Kind, str], str]
    superseded: tuple[tuple[Kind, str], ...] = ()


def choose(weights: Sequence[Option], vocab: Sequence[Option], apart: Collection[tuple[str, str]] = ()) -> Chosen:
    """The newest weights for which there is a vocab, with the newest vocab that goes with them.

    weights, vocab: usable versions, newest first · apart: pairs of digests that were tried and do not go together
    """
    for one in weights:
        for other in vocab:
            if _agree(one, other) and (one.digest, other.digest) not in apart:
                older: list[tuple[Kind, str]] = [("weights", old.version) for old in weights[weights.index(one) + 1 :]]
                older += [("vocab", old.version) for old in vocab[vocab.index(other) + 1 :]]
                return Chosen(one, other, _waiting(weights, vocab, one, other), tuple(older))
    return Chosen(None, None, _waiting(weights, vocab, None, None))


def _agree(one: Option, other: Option) -> bool:
    return one.takes("vocab", other) and other.takes("weights", one)


def _waiting(
    weights: Sequence[Option], vocab: Sequence[Option], one: Option | None, other: Option | None
) -> dict[tuple[Kind, str], str]:
    """Versions that are newer than the chosen ones, and what keeps them."""
    waiting: dict[tuple[Kind, str], str] = {}
    for option in weights[: weights.index(one) if one else None]:
        waiting["weights", option.version] = _why(option, "vocab")
    for option in vocab[: vocab.index(other) if other else None]:
        waiting["vocab", option.version] = _why(option, "weights")
    return waiting


def _why(option: Option, kind: Kind) -> str:
    wanted = option.requires.get(kind)
    if wanted and len(wanted) > SHOWN:
        return f"requires {kind} {', '.join(wanted[:SHOWN])} or one of {len(wanted) - SHOWN} more"
    return f"requires {kind} {', '.join(wanted)}" if wanted else f"no {kind} that is there goes with it"
