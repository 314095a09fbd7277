"""The contract files of a root, ROOT/contracts/<id>.json: found, checked, and made where there is none (RecoGEM 3.1).

A root that cannot be written to keeps its files elsewhere: in `contracts/` of the state directory, read just the same.

A file holds every part of a contract, its id (made from the parts), and `made_for`: the digest of what an export
depends on. What a family declares is made anew at every load and costs nothing; what its functions do is taken from a
file that was made for the very same family, code, config and limits, and exported in another process where there is
none. So an edit of limits that no function reads needs no export, and a stale file is never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch

from app.config import Deployment
from app.core import Contract
from app.engine import facts
from app.engine.apart import export_apart
from app.engine.families.base import Family, ModelFiles
from app.engine.fp8 import carrier, precision_name
from app.engine.functions import Function, check_stored
from app.errors import Rejected
from app.runtime import state_dir
from app.runtime.contract import BESIDE, Parts, contract_id, contract_of, make_parts
from app.runtime.logs import Log

FOLDER: Final = "contracts"
OWN: Final = f"state/{FOLDER}"
"""How places name the folder below the state directory, wherever that is."""
MOST_FILES: Final = 64
"""Files of a folder that are looked at, the newest first."""


class Stored(NamedTuple):
    """A contract file that says what it is. parts: without `BESIDE`."""

    file: Path
    id: str
    made_for: str
    functions: tuple[Function, ...]
    parts: Mapping[str, object]


class Made(NamedTuple):
    """file: where the contract is stored, None where it is not · exported: whether its functions were traced now ·
    found: what is wrong with files beside it."""

    contract: Contract
    functions: tuple[Function, ...]
    document: Mapping[str, object]
    file: Path | None
    exported: bool
    found: tuple[Rejected, ...]


class Contracts:
    """The contracts of one root. Files are read and written in the thread that asks."""

    def __init__(self, root: Path, log: Log | None = None) -> None:
        self._root, self._log = root, log

    def of(self, kind: type[Family], files: ModelFiles, deployment: Deployment, dtype: torch.dtype) -> Contract:
        """The contract of a model behind an overlay; where none is stored it is made, which takes seconds, and stored.

        Raises Rejected as `Family.build`, and "export_failed", "bad_family".
        """
        return self.make(kind, files, deployment, dtype).contract

    def make(
        self,
        kind: type[Family],
        files: ModelFiles,
        deployment: Deployment,
        dtype: torch.dtype,
        *,
        anew: bool = False,
        store: bool = True,
    ) -> Made:
        """`of`, with how it came about.

        dtype: of `resolve_precision` · anew: export whatever is stored · store: write what is not stored
        """
        carried = carrier(dtype)
        model = facts.build(kind, files, deployment.sid, deployment.limits, carried)
        key = facts.made_for(model, deployment.family, deployment.sid, carried)
        stored, found = self.stored(deployment)
        for problem in found:
            self._say("contract_refused", problem)
        known = None if anew else self._known(stored, key, model.family, deployment)
        functions = known.functions if known else export_apart(kind, files, deployment.sid, deployment.limits, carried)
        name = precision_name(dtype)
        weights = facts.weight_facts(model.family, dtype)
        parts = make_parts(model.family, model.config, deployment, name, weights, functions)
        contract = contract_of(parts, model.family, deployment, name)
        same = next((one for one in stored if (one.id, one.made_for) == (contract.id, key)), None)
        document = _document(contract.id, key, parts)
        file = same.file if same else self._store(contract.id, document, deployment) if store else None
        return Made(contract, functions, document, file, known is None, found)

    def stored(self, deployment: Deployment) -> tuple[tuple[Stored, ...], tuple[Rejected, ...]]:
        """Every usable file, those of the root first and the newest first, and what is wrong with the others."""
        good, bad = list[Stored](), list[Rejected]()
        for folder, place in self._folders(deployment):
            for file in _files(folder):
                try:
                    good.append(read(file, place))
                except Rejected as error:
                    bad.append(error)
        return tuple(good), tuple(bad)

    def _known(self, stored: Sequence[Stored], key: str, family: Family, deployment: Deployment) -> Stored | None:
        """The file whose functions are taken instead of an export. A file says itself what it was made for, and makes
        its id of what it says: whether that can be true is looked at."""
        for one in stored:
            if one.made_for == key:
                try:
                    check_stored(family, one.functions, deployment.sid.sizes)
                except Rejected as error:
                    place = f"{one.file.parent.name}/{one.file.name}"
                    self._say("contract_refused", Rejected("contract_tampered", error.message, location=place))
                else:
                    return one
        return None

    def _folders(self, deployment: Deployment) -> tuple[tuple[Path, str], ...]:
        """Where files are looked for, and stored in the first that can be written to; with the names of places."""
        return (self._root / FOLDER, FOLDER), (self._root / deployment.server.state_dir / FOLDER, OWN)

    def _store(self, new_id: str, document: Mapping[str, object], deployment: Deployment) -> Path | None:
        """Write a contract file; having nowhere to write it is no reason not to serve."""
        why: OSError | None = None
        for folder, place in self._folders(deployment):
            file = folder / f"{new_id}.json"
            try:
                state_dir.write(file, encode(document))
                file.chmod(0o644)
            except OSError as error:
                why = why or error
                continue
            if self._log is not None:
                self._log.info("contract_stored", contract=new_id, file=f"{place}/{file.name}")
            return file
        message = f"cannot be written, here or in the state directory: {why.strerror if why else ''}"
        self._say("contract_not_stored", Rejected("contract_not_stored", message, location=f"{FOLDER}/{new_id}.json"))
        return None

    def _say(self, event: str, problem: Rejected) -> None:
        if self._log is not None:
            self._log.error(event, code=problem.code, message=problem.message, location=problem.location)


def read(file: Path, folder: str = FOLDER) -> Stored:
    """A contract file. Raises Rejected with its place: unreadable, no contract, or not what its id says.

    folder: how places name its folder
    """
    place = f"{folder}/{file.name}"
    data = None if file.is_symlink() else state_dir.read(file)
    if data is None:
        raise Rejected("contract_unreadable", "cannot be read, or is no regular file of at most 4 MiB", location=place)
    try:
        document = msgspec.json.decode(data)
        functions = msgspec.convert(document["functions"], tuple[Function, ...])
        written, made_for = str(document["id"]), str(document["made_for"])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, RecursionError) as error:
        raise Rejected("contract_unreadable", f"is no contract: {error}", location=place) from error
    parts = {name: value for name, value in document.items() if name not in BESIDE}
    own = contract_id(parts)
    if not own == written == file.stem:
        message = f"says it is {written}, but what it holds makes {own}: it was edited, or is not whole"
        raise Rejected("contract_tampered", message, location=place)
    return Stored(file, written, made_for, functions, parts)


def encode(document: Mapping[str, object]) -> bytes:
    """As a file holds it: one line a part, so that two contracts can be compared."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n"


def _document(new_id: str, made_for: str, parts: Parts) -> dict[str, object]:
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(parts))
    made_by = f"widebeam {version('widebeam')}, torch {torch.__version__}"
    return {"format": 1, "id": new_id, "made_by": made_by, "made_for": made_for, **plain}


def _files(folder: Path) -> list[Path]:
    """The contract files of a folder, the newest first."""
    try:
        files = [one for one in folder.iterdir() if one.suffix == ".json" and not one.name.startswith(".")]
        files.sort(key=lambda one: (-one.lstat().st_mtime_ns, one.name))
    except OSError:
        return []
    return files[:MOST_FILES]
