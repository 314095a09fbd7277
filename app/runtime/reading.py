"""Versions from the disk into memory: every byte is read once, and hashed while it is read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch

from app.config import Deployment
from app.core import Contract
from app.engine.engine import Engine
from app.engine.families.base import ModelFiles
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.tokens import read_json
from app.engine.weights import load as load_weights
from app.engine.weights import open_version, read_entries, resolve_precision
from app.errors import Rejected, unreadable
from app.runtime.contracts import Contracts
from app.runtime.memory import EXHAUSTED, check_fits, check_vocab_fits
from app.vocab import artifact
from app.vocab.manifest import Manifest, verify
from app.vocab.vocab import Vocab

NOT_OF_BYTES: Final = frozenset({
    "bad_family", "disk_error", "export_failed", "no_memory", "no_slot", "unsupported_precision"
})  # fmt: skip
"""Refusals that say nothing about a version's content."""


class Weights(NamedTuple):
    """A weights version in memory, under the contract that the overlay makes with it. digest: of the bytes read."""

    engine: Engine
    contract: Contract
    digest: str = ""


def read_weights(
    directory: Path,
    deployment: Deployment,
    device: torch.device,
    contracts: Contracts,
    slots: Slots | None = None,
    between: Callable[[], None] = lambda: None,
) -> Weights:
    """A weights version as the overlay wants it, in a slot. Raises Rejected.

    Bytes that are not the manifest's are refused as such, whatever else was found in them. between: called between
    pieces of work
    """
    manifest = verify(directory, "weights", lambda name: not _is_streamed(name), between)
    sha256 = {name: entry.sha256 for name, entry in manifest.files.items() if _is_streamed(name)}
    kind, precision = family(deployment.family), deployment.precision
    try:
        with nothing_unexpected():
            wanted = resolve_precision(precision, device)
            # memory first, or what is refused for its names would be hashed, whatever its size; then names and shapes:
            # a contract may take many seconds, and newer versions would wait for that of weights that nobody can load
            beside, free = _beside(manifest), (slots.free_bytes, slots.new_bytes) if slots else (0, 0)
            opened = open_version(
                directory, kind, deployment.sid, deployment.limits, wanted, slots=slots, beside=beside, between=between,
                room=lambda: check_fits(directory, deployment, device, *free),
            )  # fmt: skip
            between()
            contract = contracts.of(kind, opened.files, deployment, wanted, beside)
            between()
            engine = load_weights(
                directory, kind, deployment.sid, deployment.limits,
                precision=precision, device=device, slots=slots, sha256=sha256, opened=opened, between=between,
                checked=lambda: _check_unchanged(directory, manifest),
            )  # fmt: skip
    except Rejected as error:
        contracts.doubt()
        if error.code not in NOT_OF_BYTES:
            verify(directory, "weights", between=between)
        raise
    return Weights(engine, contract, manifest.digest)


def _beside(manifest: Manifest) -> frozenset[tuple[str, str]]:
    """The digests of what lies beside the tensors, by name."""
    return frozenset((name, entry.sha256) for name, entry in manifest.files.items() if not _is_streamed(name))


def again(known: Weights, directory: Path, deployment: Deployment, contracts: Contracts) -> Weights:
    """Weights in memory under another overlay, which asks for the same limits and precision. Raises Rejected.

    directory: where they came from; it must still say what they are
    """
    manifest = verify(directory, "weights", lambda name: not _is_streamed(name))
    contract = contracts.of(family(deployment.family), model_files(directory), deployment, known.engine.dtype)
    if (contract.weights, contract.config) != (known.contract.weights, known.contract.config):
        raise Rejected("changed_on_disk", "what is on the disk is not what was loaded")
    _check_unchanged(directory, manifest)
    return Weights(known.engine, contract, manifest.digest)


def _check_unchanged(directory: Path, manifest: Manifest) -> None:
    """What lies beside the tensors was hashed first and read by name afterwards: it must be the same still."""
    if verify(directory, "weights", lambda name: not _is_streamed(name)) != manifest:
        raise Rejected("changed_on_disk", "the version has changed while it was read")


def model_files(directory: Path) -> ModelFiles:
    """What lies beside the tensors of a weights version; their headers are read. Raises Rejected."""
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    return ModelFiles(config, directory, {name: entry.shape for name, entry in read_entries(directory).items()})


def read_vocab(directory: Path, sizes: Sequence[int], between: Callable[[], None] = lambda: None) -> Vocab:
    """A vocab version, with the files beside its table checked, too. Raises Rejected. between: as in `read_weights`"""
    with nothing_unexpected():
        verify(directory, "vocab", lambda name: name != artifact.FILE, between)
        return artifact.load_vocab(directory, sizes, between)


@contextmanager
def nothing_unexpected() -> Iterator[None]:
    """What no check of ours, or of a family's, has thought of is wrong with a version, too: it is refused, with the
    line of code that tripped over it, and others get their turn. What the machine lacks is no version's fault, and may
    pass."""
    try:
        yield
    except Rejected:
        raise
    except OSError as error:
        raise unreadable(error, "unreadable", Path(str(error.filename)).name if error.filename else None) from None
    except EXHAUSTED as error:
        raise Rejected("no_memory", f"there was none left while it was read: {error}") from None
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        message = f"nobody expected this: {type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
        raise Rejected("unexpected", message) from error


def read_fitting_vocab(
    directory: Path, deployment: Deployment, device: torch.device, between: Callable[[], None] = lambda: None
) -> Vocab:
    """The same, where there is room for it and for what the overlay declares of it. Raises Rejected."""
    check_vocab_fits(directory, deployment, device)
    return read_vocab(directory, deployment.sid.sizes, between)


def _is_streamed(name: str) -> bool:
    """Whether the engine reads a file, and hashes it then."""
    return name.endswith(".safetensors") and "/" not in name
