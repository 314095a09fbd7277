"""The contract files of a root, ROOT/contracts/<id>.json: found, checked, and made where there is none (RecoGEM 3.1).

A root that cannot be written to keeps its files elsewhere: in `contracts/` of the state directory, read just the same.

A file holds every part of a contract, its id (made from the parts), and `made_for`: the digest of what an export
depends on. What a family declares is made anew at every load and costs nothing; what its functions do is taken from a
file that was made for the very same family, code, config and limits, and exported in another process where there is
none. So an edit of limits that no function reads needs no export, and a stale file is never used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch

from app.config import Deployment, leads_out
from app.core import Contract
from app.engine import facts
from app.engine.apart import export_apart
from app.engine.families.base import Family, ModelFiles
from app.engine.fp8 import carrier, precision_name
from app.engine.functions import Function, check_stored
from app.errors import LeadsOut, Rejected, unreadable
from app.runtime import state_dir
from app.runtime.contract import BESIDE, Parts, contract_id, contract_of, make_parts
from app.runtime.logs import Log

FOLDER: Final = "contracts"
OWN: Final = f"state/{FOLDER}"
"""How places name the folder below the state directory, wherever that is."""
MOST_FILES: Final = 64
"""Files of a folder that are looked at, the newest first."""
MOST_BYTES: Final = 64 << 20
"""Bytes of a folder that are read when a contract is looked for."""
LARGE: Final = 256 << 10
"""Bytes of a file that is taken apart only where it mentions what is looked for. Contracts of the project's own
families have some 30 KiB."""
MOST_MADE: Final = 16
"""Contracts that are known and not stored."""


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


class _Last(NamedTuple):
    """The contract that was asked for last, and its file as it was then."""

    asked: tuple[object, ...]
    contract: Contract
    file: Path
    status: tuple[int, ...] | None

    def answers(self, asked: tuple[object, ...]) -> bool:
        """Whether the same is asked for, and the file has not been touched."""
        return asked == self.asked and self.status is not None and _status(self.file) == self.status


class Contracts:
    """The contracts of one root. Files are read and written in the thread that asks, one at a time.

    Those that `of` has made are in memory until somebody serves under them, and only then on the disk (`keep`): what
    is refused leaves nothing there, and is not exported again when it is tried again.
    """

    def __init__(self, root: Path, log: Log | None = None) -> None:
        self._root, self._log = root, log
        self._made: dict[str, tuple[Made, Deployment]] = {}
        self._unkept: dict[str, Rejected] = {}
        self._last: _Last | None = None

    def of(
        self,
        kind: type[Family],
        files: ModelFiles,
        deployment: Deployment,
        dtype: torch.dtype,
        beside: frozenset[tuple[str, str]] | None = None,
    ) -> Contract:
        """The contract of a model behind an overlay; where none is stored it is made, which takes seconds.

        beside: digests of every file but the tensors. With them, a refit of what was asked for last is known to be
        behind the same contract: making it anew holds the interpreter, and with it the batches, for a tenth of a second

        Raises Rejected as `Family.build`, and "export_failed", "bad_family".
        """
        asked = (kind, dtype, deployment, beside, files.shapes)
        if beside is not None and self._last is not None and self._last.answers(asked):
            return self._last.contract
        made = self.make(kind, files, deployment, dtype, store=False)
        self._made.pop(made.contract.id, None)
        if made.file is None:
            self._made[made.contract.id] = made, deployment
            if len(self._made) > MOST_MADE:
                del self._made[next(iter(self._made))]
        elif beside is not None:
            self._last = _Last(asked, made.contract, made.file, _status(made.file))
        return made.contract

    def doubt(self) -> None:
        """What was asked for last was refused: perhaps it was made of other files than `beside` said."""
        self._last = None

    def waits(self, contract_id: str) -> bool:
        """Whether a contract of `of` is not on the disk."""
        return contract_id in self._made

    def keep(self, contract_id: str) -> bool:
        """Store a contract of `of` under which requests are served; whether it is on the disk now. Having nowhere to
        write it is no reason not to serve: `unkept` says so, and the next call tries again."""
        if contract_id not in self._made:
            return True
        made, deployment = self._made[contract_id]
        if self._store(contract_id, made.document, deployment) is None:
            return False
        del self._made[contract_id]
        return True

    @property
    def unkept(self) -> tuple[Rejected, ...]:
        """What could not be written, and where."""
        return tuple(self._unkept.values())

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
        """A contract with how it came about.

        dtype: of `resolve_precision` · anew: export whatever is stored · store: write what is not stored
        """
        carried = carrier(dtype)
        model = facts.build(kind, files, deployment.sid, deployment.limits, carried)
        key = facts.made_for(model, deployment.family, deployment.sid, carried)
        found: dict[str | None, Rejected] = {}
        known = None if anew else self._functions(key, model.family, deployment, found)
        functions = known or export_apart(kind, files, deployment.sid, deployment.limits, carried)
        name = precision_name(dtype)
        weights = facts.weight_facts(model.family, dtype)
        parts = make_parts(model.family, model.config, deployment, name, weights, functions)
        contract = contract_of(parts, model.family, deployment, name)
        document = _document(contract.id, key, parts)
        file = self._stored(contract.id, key, deployment, found)
        if file is None and store:
            file = self._store(contract.id, document, deployment)
        for problem in found.values():
            self._say("contract_refused", problem)
        return Made(contract, functions, document, file, known is None, tuple(found.values()))

    def _functions(
        self, key: str, family: Family, deployment: Deployment, found: dict[str | None, Rejected]
    ) -> tuple[Function, ...] | None:
        """The functions that were exported for a key; None where nobody knows them. found: takes what is wrong with
        files that were looked at, by place."""
        for made, _ in self._made.values():
            if made.document["made_for"] == key:
                return made.functions
        for folder, place in self._folders(deployment):
            if leads_out(folder, folder.parent):
                found[place] = unreadable(LeadsOut(), "unreadable", place)
                continue
            for one in _made_for(key, folder, place, found):
                try:  # a file says itself what it was made for: whether that can be true is looked at
                    check_stored(family, one.functions, deployment.sid.sizes)
                except Rejected as error:
                    where = f"{place}/{one.file.name}"
                    found[where] = Rejected("contract_tampered", error.message, location=where)
                else:
                    return one.functions
        return None

    def _stored(
        self, contract_id: str, key: str, deployment: Deployment, found: dict[str | None, Rejected]
    ) -> Path | None:
        """The file of a contract, where it is whole and was made for a key."""
        for folder, place in self._folders(deployment):
            file = folder / f"{contract_id}.json"
            try:
                if not leads_out(folder, folder.parent) and file.exists() and read(file, place).made_for == key:
                    return file
            except Rejected as error:
                found[error.location] = error
        return None

    def _folders(self, deployment: Deployment) -> tuple[tuple[Path, str], ...]:
        """Where files are looked for, and stored in the first that can be written to; with the names of places."""
        return (self._root / FOLDER, FOLDER), (self._root / deployment.server.state_dir / FOLDER, OWN)

    def _store(self, new_id: str, document: Mapping[str, object], deployment: Deployment) -> Path | None:
        """Write a contract file; having nowhere to write it is no reason not to serve."""
        why = ""
        for folder, place in self._folders(deployment):
            file = folder / f"{new_id}.json"
            try:
                if leads_out(folder, folder.parent):
                    raise LeadsOut
                state_dir.write(file, encode(document))
                file.chmod(0o644)
            except OSError as error:
                why = why or str(error.strerror)
                continue
            self._unkept.pop(new_id, None)
            if self._log is not None:
                self._log.info("contract_stored", contract=new_id, file=f"{place}/{file.name}")
            return file
        message = f"cannot be written, here or in the state directory: {why}"
        problem = Rejected("contract_not_stored", message, location=f"{FOLDER}/{new_id}.json")
        if new_id not in self._unkept:
            self._say("contract_not_stored", problem)
        self._unkept = {one: why for one, why in self._unkept.items() if one in self._made} | {new_id: problem}
        return None

    def _say(self, event: str, problem: Rejected) -> None:
        if self._log is not None:
            self._log.error(event, code=problem.code, message=problem.message, location=problem.location)


def read(file: Path, folder: str = FOLDER) -> Stored:
    """A contract file. Raises Rejected with its place: unreadable, no contract, or not what its id says.

    folder: how places name its folder
    """
    place = f"{folder}/{file.name}"
    return _parsed(file, _bytes(file, place), place)


def _made_for(key: str, folder: Path, place: str, found: dict[str | None, Rejected]) -> Iterator[Stored]:
    """The files of a folder that say they were made for a key, the newest first. So much is read of a folder and no
    more, whatever lies there; and a large file that does not even mention the key is not taken apart."""
    left = MOST_BYTES
    for file in _files(folder):
        where = f"{place}/{file.name}"
        try:
            data = _bytes(file, where)
            left -= len(data)
            if left < 0:
                return
            if len(data) > LARGE and key.encode() not in data:
                continue
            one = _parsed(file, data, where)
        except Rejected as error:
            found[where] = error
        else:
            if one.made_for == key:
                yield one


def _bytes(file: Path, place: str) -> bytes:
    data = state_dir.read(file, file.parent.parent)
    if data is None:
        raise Rejected("contract_unreadable", "cannot be read, or is no regular file of at most 4 MiB", location=place)
    return data


def _parsed(file: Path, data: bytes, place: str) -> Stored:
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


def _status(file: Path) -> tuple[int, ...] | None:
    """What tells a file from the one that was there before; None where there is none."""
    try:
        found = file.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _files(folder: Path) -> list[Path]:
    """The contract files of a folder, the newest first."""
    try:
        files = [one for one in folder.iterdir() if one.suffix == ".json" and not one.name.startswith(".")]
        files.sort(key=lambda one: (-one.lstat().st_mtime_ns, one.name))
    except OSError:
        return []
    return files[:MOST_FILES]
