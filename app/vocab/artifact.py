"""A vocabulary on the disk: vocab/<version>/ with MANIFEST.json and items.safetensors.

sid          [n, L] int32        the SIDs in item order
id.text      [bytes] uint8       the ids end to end, id.start [n + 1] their bounds
attr.K.value [n] float32         attribute number K where it is numeric, attr.K.present [n] bool
attr.K.code  [n] int32           attribute number K where it is text: place in attr.K.text / attr.K.start, -1 = absent
metadata     {"format": 1, "sizes": [C_1..C_L], "attributes": [names in order of K]}
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from app.errors import Rejected, counted
from app.vocab.arrays import from_bytes, to_bytes
from app.vocab.findings import some, within
from app.vocab.items import MAX_ID, Column, Ids, Numbers, Strings, Table, Texts
from app.vocab.manifest import CHUNK, Kind, read_file, read_manifest
from app.vocab.publish import Published, check_free, commit, draft
from app.vocab.trie import check_codes
from app.vocab.vocab import Vocab, duplicates, make_vocab

FILE = "items.safetensors"
T = TypeVar("T")


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON in the header of items.safetensors."""

    format: Literal[1]
    sizes: tuple[int, ...]
    attributes: tuple[str, ...]


def save_vocab(
    table: Table,
    sizes: Sequence[int],
    root: Path,
    version: str,
    *,
    made_by: str,
    requires: Mapping[Kind, list[str]] | None = None,
) -> Published:
    """Publish a table in item order (`vocab.arrange`) as ROOT/vocab/<version>. Raises Rejected("version_exists")."""
    check_free(root, "vocab", version)
    metadata = Metadata(1, tuple(sizes), tuple(table.columns))
    arrays: dict[str, npt.NDArray[Any]] = {"sid": table.codes, "id.text": table.ids.text, "id.start": table.ids.start}
    for number, column in enumerate(table.columns.values()):
        name = f"attr.{number}"
        if isinstance(column, Numbers):
            arrays |= {f"{name}.value": column.values, f"{name}.present": column.present}
        else:
            words = column.words
            arrays |= {f"{name}.code": column.codes, f"{name}.text": words.text, f"{name}.start": words.start}
    with draft(root, "vocab") as made:
        made.write(FILE, to_bytes(arrays, msgspec.json.encode(metadata).decode()))
        return commit(made, "vocab", version, made_by, requires or {})


def load_vocab(directory: Path, sizes: Sequence[int], between: Callable[[], None] = lambda: None) -> Vocab:
    """Read ROOT/vocab/<version>, verifying every byte while it is read once.

    sizes  C_1..C_L of the deployment · between: called between pieces of work
    Raises Rejected (location = file, and array or row in it; a finding a row, the first twenty of a kind): whatever
    `read_manifest` refuses, digests that do not match, arrays that do not fit together, other sizes, codes out of
    range, items out of SID order, ids given twice.
    """
    return _open(directory, tuple(sizes), between)


def open_vocab(directory: Path) -> Vocab:
    """The same for whatever sizes the version was made for."""
    return _open(directory, None, lambda: None)


def _open(directory: Path, sizes: tuple[int, ...] | None, between: Callable[[], None]) -> Vocab:
    manifest = read_manifest(directory, "vocab")
    if FILE not in manifest.files:
        raise Rejected("file_missing", "a vocab version holds this file", location=FILE)
    arrays, text = from_bytes(read_file(directory, FILE, manifest.files[FILE], between), FILE)
    try:
        metadata = msgspec.json.decode(text, type=Metadata)
    except msgspec.DecodeError as error:
        raise Rejected("metadata_invalid", f"the metadata is wrong: {error}", location=FILE) from error
    if sizes is not None and metadata.sizes != sizes:
        message = f"made for sizes {list(metadata.sizes)}, the deployment has {list(sizes)}"
        raise Rejected("sizes_differ", message, location=FILE)
    try:
        table = _table(arrays, metadata, between)
        between()
        return make_vocab(table, metadata.sizes, version=manifest.version, digest=manifest.digest, between=between)
    except Rejected as error:
        raise Rejected.together(within(FILE, error)) from error


def _table(arrays: dict[str, npt.NDArray[Any]], metadata: Metadata, between: Callable[[], None]) -> Table:
    """The table that arrays hold. Raises Rejected with what is wrong with any of them."""
    codes = _take(arrays, "sid", "i4", 2)
    items = len(codes)
    found: list[Rejected] = []
    _note(found, lambda: check_codes(codes, metadata.sizes))
    ids = _note(found, lambda: _strings(arrays, "id", longest=MAX_ID, between=between))
    if ids is not None and len(ids) != items:
        found.append(_bad(f"{counted(len(ids), 'id')} for {counted(items, 'SID')}", "id.start"))
    columns: dict[str, Column] = {}
    for k, name in enumerate(metadata.attributes):
        column = _note(found, partial(_column, arrays, f"attr.{k}", items, between))
        if column is not None:
            columns[name] = column
    if not found and (arrays or len(columns) != len(metadata.attributes)):
        found.append(_bad("arrays or attributes that nothing explains", ", ".join(sorted(arrays)) or "metadata"))
    if found and ids is not None:
        found += duplicates(Ids.build(ids))
    if found or ids is None:
        raise Rejected.together(found)
    return Table(ids, codes, columns)


def _note(found: list[Rejected], call: Callable[[], T]) -> T | None:
    """What a call gives; None where it is refused, and what it says is added."""
    try:
        return call()
    except Rejected as error:
        found += [error, *error.others]
        error.others = ()
        return None


def _column(arrays: dict[str, npt.NDArray[Any]], name: str, items: int, between: Callable[[], None]) -> Column:
    if f"{name}.value" in arrays:
        numbers = Numbers(_take(arrays, f"{name}.value", "f4", 1), _take(arrays, f"{name}.present", "?", 1))
        if len(numbers.values) != items or len(numbers.present) != items or not np.isfinite(numbers.values).all():
            raise _bad(f"not {items} finite numbers", name)
        return numbers
    texts = Texts(_take(arrays, f"{name}.code", "i4", 1), _strings(arrays, name, longest=None, between=between))
    codes = texts.codes
    if len(codes) != items or codes.min(initial=0) < -1 or codes.max(initial=-1) >= len(texts.words):
        raise _bad(f"not {items} places in {len(texts.words)} texts", name)
    return texts


def _strings(
    arrays: dict[str, npt.NDArray[Any]], name: str, *, longest: int | None, between: Callable[[], None]
) -> Strings:
    """Texts whose bounds ascend over the whole buffer and that are UTF-8; ids have 1 to `longest` bytes."""
    text = _take(arrays, f"{name}.text", "u1", 1)
    start = arrays.get(f"{name}.start")
    start = _take(arrays, f"{name}.start", "i4" if start is not None and start.itemsize == 4 else "i8", 1)
    length = np.diff(start)
    if not len(start) or start[0] != 0 or start[-1] != len(text) or length.min(initial=0) < 0:
        raise _bad("bounds do not cover the text", f"{name}.start")
    if longest is not None and len(length) and (length.min() < 1 or length.max() > longest):
        wrong = np.flatnonzero((length < 1) | (length > longest))
        raise Rejected.together(
            some(wrong, lambda row: _bad(f"an id has 1 to {longest} bytes", f"{name}.start: row {row}"))
        )
    strings = Strings(text, start)
    begins_inside = (text[start[:-1][length > 0]] & 0xC0) == 0x80
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(text), CHUNK):
            between()
            decoder.decode(text[begin : begin + CHUNK].data, final=begin + CHUNK >= len(text))
    except UnicodeDecodeError as error:
        raise _bad(f"not UTF-8 ({error.reason})", f"{name}.text") from error
    if begins_inside.any():
        raise _bad("a bound lies inside a character", f"{name}.start")
    return strings


def _take(arrays: dict[str, npt.NDArray[Any]], name: str, dtype: str, dims: int) -> npt.NDArray[Any]:
    array = arrays.pop(name, None)
    if array is None or array.dtype != np.dtype(dtype) or array.ndim != dims:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise _bad(f"expected {np.dtype(dtype)} with {dims} dimensions, it is {found}", name)
    return array


def _bad(message: str, name: str) -> Rejected:
    return Rejected("arrays_invalid", message, location=name)
