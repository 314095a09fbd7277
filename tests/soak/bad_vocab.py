"""Every way for a catalogue to be wrong, as a version that is dropped into a live root, and what it is refused with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from app.vocab.arrays import from_bytes, to_bytes
from app.vocab.artifact import FILE, Metadata
from app.vocab.manifest import FileEntry
from app.vocab.publish import commit, draft
from tests import support

SIZES = (4, 5, 6)
SIDS = support.random_sids(SIZES, 40, seed=9).tolist()
ITEMS = [{"id": f"w{n}", "sid": sid, "attrs": {"price": n, "kind": f"k{n % 3}"}} for n, sid in enumerate(SIDS)]
Make = Callable[[Path, str], None]
Arrays = dict[str, np.ndarray]


def good(tmp: Path) -> tuple[bytes, Arrays, str]:
    """A catalogue: its file, and that as arrays and metadata that may be changed."""
    shutil.rmtree(tmp, ignore_errors=True)
    support.write_vocab(tmp, SIZES, ITEMS)
    data = (tmp / "vocab" / "v1" / FILE).read_bytes()
    arrays, text = from_bytes(bytearray(data), FILE)
    return data, {name: array.copy() for name, array in arrays.items()}, text


def publish(root: Path, version: str, pieces: list[bytes], spoil: Callable[[Path], object] = lambda _: None) -> None:
    """A version with a manifest of these bytes. spoil: what happens to the file before anybody sees it."""
    with draft(root, "vocab") as made:
        made.write(FILE, pieces)
        spoil(made.directory / FILE)
        commit(made, "vocab", version, "tests", {})


def arrays(change: Callable[[Arrays], object], meta: Callable[[str], str] = lambda text: text) -> Make:
    """The good catalogue but for a change, published as it is. meta: a change of its metadata"""

    def make(root: Path, version: str) -> None:
        _, found, text = good(root.parent / "words")
        change(found)
        publish(root, version, [bytes(piece) for piece in to_bytes(found, meta(text))])

    return make


def data(change: Callable[[bytes], bytes], *, after: bool) -> Make:
    """The good file but for its bytes. after: not as the manifest says."""

    def make(root: Path, version: str) -> None:
        whole = good(root.parent / "words")[0]
        if after:
            publish(root, version, [whole], lambda file: file.write_bytes(change(whole)))
        else:
            publish(root, version, [change(whole)])

    return make


def code(row: int, step: int, value: int) -> Callable[[Arrays], object]:
    return lambda found: found["sid"].__setitem__((row, step), value)


def reverse(found: Arrays) -> None:
    found["sid"][:] = found["sid"][::-1].copy()


def repeat(found: Arrays) -> None:
    found["id.text"][2:4] = found["id.text"][:2]


def one_id_more(found: Arrays) -> None:
    """More ids than SIDs."""
    found["id.text"] = np.concatenate([found["id.text"], np.frombuffer(b"more", np.uint8)])
    found["id.start"] = np.append(found["id.start"], len(found["id.text"])).astype(found["id.start"].dtype)


def too_long(found: Arrays) -> None:
    """The last id takes more bytes than an id may have."""
    found["id.text"] = np.concatenate([found["id.text"], np.full(600, ord("x"), np.uint8)])
    found["id.start"][-1] = len(found["id.text"])


def renamed(change: Callable[[Metadata], Mapping[str, object]]) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **change(json.loads(text))})


def other_sizes(root: Path, version: str) -> None:
    support.write_vocab(root, (16, 5, 6), ITEMS, version)


def no_file(root: Path, version: str) -> None:
    with draft(root, "vocab") as made:
        made.write("readme.txt", [b"nothing here"])
        commit(made, "vocab", version, "tests", {})


def outside(root: Path, version: str) -> None:
    elsewhere = root.parent / "elsewhere.items"

    def spoil(file: Path) -> None:
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)

    publish(root, version, [good(root.parent / "words")[0]], spoil)


def another_name(root: Path, version: str) -> None:
    aside = root.parent / "aside"
    publish(aside, version, [good(root.parent / "words")[0]])
    manifest = aside / "vocab" / version / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace(f'"{version}"', '"../v1"'))
    manifest.parent.rename(root / "vocab" / version)


def too_large(root: Path, version: str) -> None:
    """A terabyte that no disk holds."""
    with draft(root, "vocab") as made:
        (made.directory / FILE).write_bytes(good(root.parent / "words")[0])
        os.truncate(made.directory / FILE, 1 << 40)
        made.files[FILE] = FileEntry(1 << 40, "0" * 64)
        commit(made, "vocab", version, "tests", {})


BAD_VOCAB: Mapping[str, tuple[str, Make]] = {
    "a code out of range": ("code_out_of_range", arrays(code(-1, 2, 6))),
    "a code below 0": ("code_out_of_range", arrays(code(0, 0, -1))),
    "out of order": ("not_in_sid_order", arrays(reverse)),
    "an id twice": ("duplicate_id", arrays(repeat)),
    "an id too many": ("arrays_invalid", arrays(one_id_more)),
    "an id too long": ("arrays_invalid", arrays(too_long)),
    "an id of no text": ("arrays_invalid", arrays(lambda found: found["id.text"].__setitem__(0, 0xFF))),
    "bounds that fall": ("arrays_invalid", arrays(lambda found: found["id.start"].__setitem__(1, 9999))),
    "no SIDs": ("arrays_invalid", arrays(lambda found: found.pop("sid"))),
    "a column is missing": ("arrays_invalid", arrays(lambda found: found.pop("attr.1.value"))),
    "a column too many": ("arrays_invalid", arrays(lambda found: found.update(more=found["sid"]))),
    "a number that is none": ("arrays_invalid", arrays(lambda found: found["attr.1.value"].__setitem__(3, np.nan))),
    "a text that is none": ("arrays_invalid", arrays(lambda found: found["attr.0.code"].__setitem__(3, 3))),
    "another format": ("metadata_invalid", arrays(lambda _: None, renamed(lambda _: {"format": 2}))),
    "other sizes": ("sizes_differ", other_sizes),
    "0 bytes": ("", data(lambda _: b"", after=False)),
    "half": ("", data(lambda found: found[: len(found) // 2], after=False)),
    "three bytes more": ("", data(lambda found: found + b"abc", after=False)),
    "cut on the disk": ("file_size", data(lambda found: found[: len(found) // 2], after=True)),
    "one bit flipped": ("file_digest", data(lambda found: found[:-1] + bytes([found[-1] ^ 1]), after=True)),
    "no catalogue": ("file_missing", no_file),
    "link out of the folder": ("path_escape", outside),
    "named ../v1": ("manifest_version", another_name),
    "larger than memory": ("no_memory", too_large),
}
"""Name -> (code; "" = whatever it is, the same each time; how it is made)."""
