"""Take-downs: items that must not come back from the next admission on. takedowns/<version>/items.txt, an id a line.

They are an exclude set that every request has, with the same prefix exhaustion, so nothing is rebuilt and no batch is
split. The newest version replaces the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from app.config import read_small
from app.errors import Rejected
from app.runtime import state_dir
from app.runtime.status import now_iso
from app.vocab.items import MAX_ID
from app.vocab.manifest import Manifest, read_file, read_manifest
from app.vocab.vocab import Numbers64, Vocab

FILE: Final = "items.txt"
MAX_ITEMS: Final = 1_000_000
KEPT: Final = "takedowns.json"


@dataclass(frozen=True, slots=True)
class Takedowns:
    """One version's ids, byte for byte. version "" = nothing is taken down."""

    version: str = ""
    digest: str = ""
    since: str = ""
    ids: tuple[str, ...] = ()

    def items(self, vocab: Vocab) -> Numbers64:
        """The item numbers of those that a vocab knows, ascending. Ids that it does not know are nobody's fault."""
        if not self.ids:
            return np.empty(0, np.int64)
        found = vocab.find(self.ids)
        return np.unique(found[found >= 0])


NOTHING: Final = Takedowns()


def load_takedowns(directory: Path) -> tuple[Takedowns, Manifest]:
    """Read a version. Raises Rejected: what manifests raise, text that is not UTF-8, ids that no item can have."""
    manifest = read_manifest(directory, "takedowns")
    if FILE not in manifest.files:
        raise Rejected("file_missing", "a takedowns version holds this file", location=FILE)
    ids = read_ids(read_file(directory, FILE, manifest.files[FILE]), FILE)
    return Takedowns(manifest.version, manifest.digest, now_iso(), tuple(ids)), manifest


def read_ids(data: bytes | memoryview, place: str) -> list[str]:
    """The ids of a list's text, an id a line. Raises Rejected with the place: text that is not UTF-8, ids that no item
    can have, too many."""
    try:
        lines = str(data, "utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise Rejected("not_utf8", f"byte {error.start} is not UTF-8", location=place) from error
    ids = [line.removesuffix("\r") for line in lines]
    ids = ids[:-1] if ids[-1] == "" else ids
    for number, item in enumerate(ids, 1):
        if not 1 <= len(item.encode()) <= MAX_ID:
            raise Rejected("bad_id", f"an id has 1 to {MAX_ID} bytes", location=f"{place}: line {number}")
    if len(ids) > MAX_ITEMS:
        raise Rejected("too_many", f"{len(ids)} ids; at most {MAX_ITEMS} are possible", location=place)
    return ids


def keep(state: Path, takedowns: Takedowns) -> None:
    """Write down what is in force, among the server's own files: a start over a version that was damaged meanwhile
    brings nothing back. Raises OSError."""
    state_dir.write(state / KEPT, msgspec.json.encode(takedowns))


def kept(state: Path) -> Takedowns:
    """What was in force last; NOTHING where that is not known."""
    try:
        return msgspec.json.decode(read_small(state / KEPT, -1, state), type=Takedowns)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOTHING
