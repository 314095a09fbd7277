"""MANIFEST.json: what makes a directory a version, of whatever kind (weights, vocab, take-downs, compiled engines).

    {"format": 1, "kind": "vocab", "version": "v3", "made_by": "widebeam 0.1.0",
     "files": {"items.safetensors": {"size": 1234, "sha256": "<64 hex digits>"}}, "requires"?: {"weights": ["v7"]}}

It is written last, so a version without it is still being made. Every file of the directory is listed and matches its
size and digest; names stay inside the directory. `digest` identifies a version by content: two versions with the same
files have the same digest, whatever they are called.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from app.config import open_inside, read_json
from app.errors import Rejected, unreadable

FILE = "MANIFEST.json"
KINDS = ("weights", "vocab", "takedowns")
Kind = Literal["weights", "vocab", "takedowns"]
"""What a release is made of, each below ROOT/<kind>/."""
AnyKind = Literal["weights", "vocab", "takedowns", "engine"]
"""Those, and compiled engines, below ROOT/engines/."""
CHUNK = 1 << 20
PIECE = 16 << 20
"""Bytes that are hashed in one go: between two of them whoever hashes waits for the interpreter."""
MAX_MANIFEST = 16 << 20
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_UNFINISHED = (".partial", ".part", ".tmp", ".bak", ".old", ".swp")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and SHA-256 (lower-case hex) of one file."""

    size: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The contents of MANIFEST.json. `requires` names versions or digests of other kinds that this one goes with."""

    format: Literal[1]
    kind: AnyKind
    version: str
    made_by: Annotated[str, Meta(max_length=1024)]
    files: dict[str, FileEntry]
    requires: dict[Kind, list[str]] = {}

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the canonical list of files: "name NUL size NUL sha256 NEWLINE", sorted by name."""
        lines = (f"{name}\0{entry.size}\0{entry.sha256}\n" for name, entry in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class Found(NamedTuple):
    """A version's directory. `complete`: its manifest is in place (nothing has been checked yet)."""

    version: str
    directory: Path
    complete: bool


def is_version(name: str) -> bool:
    """Whether a directory name can be a version: safe characters, no dot in front, no mark of unfinished work."""
    return bool(_VERSION.fullmatch(name)) and not name.lower().endswith(_UNFINISHED)


@lru_cache(maxsize=1024)
def version_key(version: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """The order of versions: digits compare as numbers (v10 > v9), everything else as text; of equal ones (`10`, `010`)
    the larger text is the newer. Where a number meets text, the number is newer."""
    parts = re.findall(r"\d+|\D+", version)
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts), version


def home(root: Path, kind: AnyKind) -> Path:
    """Where the versions of a kind lie."""
    return root / ("engines" if kind == "engine" else kind)


def versions(root: Path, kind: AnyKind) -> tuple[Found, ...]:
    """The versions of a kind below a root, newest first. Strays (`.tmp-11`, `12.partial`, files) are not versions, and
    neither is what nobody can say the kind of (a link to itself)."""
    try:
        paths = [path for path in home(root, kind).iterdir() if is_version(path.name)]
    except OSError:
        return ()
    found = [Found(path.name, path, may_be_complete(path)) for path in paths if _tells(path.is_dir)]
    return tuple(sorted(found, key=lambda one: version_key(one.version), reverse=True))


def strays(root: Path, kind: AnyKind) -> tuple[str, ...]:
    """The names of what lies where the versions of a kind lie and will never be one: plain files, folders under other
    names. Not what is hidden or marked as unfinished; what is no text is escaped."""
    known = {found.version for found in versions(root, kind)}
    try:
        names = [path.name for path in home(root, kind).iterdir()]
    except OSError:
        return ()
    shown = (name for name in names if not name.startswith(".") and not name.lower().endswith(_UNFINISHED))
    return tuple(sorted(name.encode("utf-8", "backslashreplace").decode() for name in shown if name not in known))


def may_be_complete(directory: Path) -> bool:
    """Whether its manifest is there, or nobody may see: then whoever reads it says why."""
    try:
        return (directory / FILE).is_file()
    except PermissionError:
        return True
    except OSError:
        return False


def _tells(look: Callable[[], bool]) -> bool:
    """What a look at a path finds; False where it cannot be looked at."""
    try:
        return look()
    except OSError:
        return False


def read_manifest(directory: Path, kind: AnyKind) -> Manifest:
    """Read a manifest and check everything about it but the files' digests.

    Raises Rejected(location = the file): an unreadable or malformed manifest, another kind or version than expected,
    names that leave the directory, files that are missing, unlisted, of another size, or no regular files.
    """
    manifest = _decode(directory)
    if manifest.kind != kind:
        raise Rejected("manifest_kind", f"this is a {manifest.kind} version, expected {kind}", location=FILE)
    if manifest.version != directory.name:
        message = f"version {manifest.version!r} lies in a directory called {directory.name!r}"
        raise Rejected("manifest_version", message, location=FILE)
    for name in manifest.files:
        _check_name(name)
    for name, entry in sorted(manifest.files.items()):
        size = _regular(directory, name).st_size
        if size != entry.size:
            raise Rejected("file_size", f"{size} bytes, the manifest says {entry.size}", location=name)
    for name in _walk(directory):
        if name != FILE and name not in manifest.files:
            raise Rejected("file_unlisted", "not listed in the manifest", location=name)
    return manifest


def verify(
    directory: Path,
    kind: AnyKind,
    which: Callable[[str], bool] = lambda _: True,
    between: Callable[[], None] = lambda: None,
) -> Manifest:
    """`read_manifest`, and the digests of its files. Raises Rejected("file_digest") with the file.

    which    whether a file is looked at here; others are hashed by whoever reads them
    between  called before each `PIECE`: whoever has had enough raises there
    """
    manifest = read_manifest(directory, kind)
    for name, entry in sorted(manifest.files.items()):
        if not which(name):
            continue
        with _opened(directory, name) as descriptor:
            sha256 = _sha256(descriptor, min(entry.size, PIECE), between)
        _check_digest(name, entry, sha256)
    return manifest


def read_file(directory: Path, name: str, entry: FileEntry, between: Callable[[], None] = lambda: None) -> memoryview:
    """The bytes of one file, verified while they are read once: what is used is what was checked.

    The memory is the process's own; clearing, as a bytearray does, would hold the interpreter for a large one.
    between: called before each `CHUNK`

    Raises Rejected(location = the file) where they do not match the manifest.
    """
    view, digest, at = np.empty(entry.size, np.uint8).data, hashlib.sha256(), 0
    with _opened(directory, name) as descriptor:
        between()
        while at < entry.size and (count := os.readv(descriptor, [view[at : at + CHUNK]])):
            digest.update(view[at : at + count])
            at += count
            between()
        if at < entry.size or os.read(descriptor, 1):
            raise Rejected("file_size", f"not the {entry.size} bytes that the manifest says", location=name)
    _check_digest(name, entry, digest.hexdigest())
    return view


def encode(manifest: Manifest) -> bytes:
    """The text of MANIFEST.json."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def make_manifest(
    kind: AnyKind, version: str, files: Mapping[str, FileEntry], made_by: str, requires: Mapping[Kind, list[str]]
) -> Manifest:
    """A manifest for files that lie ready. Raises Rejected for a version or file name that cannot be used."""
    check_version(version)
    for name in files:
        _check_name(name)
    return Manifest(format=1, kind=kind, version=version, made_by=made_by, files=dict(files), requires=dict(requires))


def check_version(version: str) -> None:
    """Raise Rejected for a name that `is_version` does not take."""
    if not is_version(version):
        message = f"{version!r} cannot be a version: letters, digits and . _ + - are possible, 128 at most"
        raise Rejected("version_name", f"{message}, no dot in front, no ending such as .partial")


def _decode(directory: Path) -> Manifest:
    if directory.resolve().parent != directory.parent.resolve():
        raise Rejected("path_escape", "the version's directory is a link to somewhere else", location=directory.name)
    size = _regular(directory, FILE, missing="manifest_missing").st_size
    if size > MAX_MANIFEST:
        raise Rejected("manifest_invalid", f"{size} bytes are too many for a manifest", location=FILE)
    try:
        with _opened(directory, FILE) as descriptor:
            text = os.read(descriptor, MAX_MANIFEST)
        manifest = msgspec.json.decode(text, type=Manifest)
        read_json(text)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise Rejected("manifest_invalid", str(error) or "nested too deeply", location=FILE) from error
    return manifest


def _check_name(name: str) -> None:
    parts = name.split("/")
    unsafe = any(part in {"", ".", ".."} for part in parts) or "\\" in name or any(ord(char) < 32 for char in name)
    if unsafe or name == FILE or len(name.encode("utf-8", "surrogatepass")) > 1024:
        raise Rejected("file_name", f"{name!r} is no file name inside the version's directory", location=FILE)


def _sha256(descriptor: int, size: int, between: Callable[[], None]) -> str:
    """Of a file to its end, in memory of about `size` bytes."""
    memory, digest = np.empty(max(size, 1), np.uint8).data, hashlib.sha256()
    between()
    while count := os.readv(descriptor, [memory]):
        digest.update(memory[:count])
        between()
    return digest.hexdigest()


def _check_digest(name: str, entry: FileEntry, sha256: str) -> None:
    if sha256 != entry.sha256:
        message = f"SHA-256 is {sha256[:12]}..., the manifest says {entry.sha256[:12]}..."
        raise Rejected("file_digest", message, location=name)


def _regular(directory: Path, name: str, missing: str = "file_missing") -> os.stat_result:
    """The file's status, after it was shown to be a regular file inside the directory."""
    path = directory / name
    try:
        inside = path.resolve(strict=True).is_relative_to(directory.resolve())
        status = path.stat()
    except FileNotFoundError as error:
        raise Rejected(missing, "there is no such file", location=name) from error
    except OSError as error:
        raise unreadable(error, "file_unreadable", name) from error
    except RuntimeError as error:
        raise Rejected("file_unreadable", f"cannot be read: {error}", location=name) from error
    if not inside:
        raise Rejected("path_escape", "is a link out of the version's directory", location=name)
    if not stat.S_ISREG(status.st_mode):
        raise Rejected("file_unreadable", "is no regular file", location=name)
    return status


@contextmanager
def _opened(directory: Path, name: str) -> Iterator[int]:
    """A file descriptor for reading, closed at the end."""
    _regular(directory, name)
    try:
        descriptor = open_inside(directory / name, directory)
    except OSError as error:
        raise unreadable(error, "file_unreadable", name) from error
    try:
        yield descriptor
    except OSError as error:
        raise unreadable(error, "file_unreadable", name) from error
    finally:
        os.close(descriptor)


def _walk(directory: Path) -> Iterator[str]:
    """The names of everything below the directory that is no directory itself, links not followed."""
    for base, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]  # noqa: PTH114, PTH118  never raises
        for name in sorted(files + links):
            yield (Path(base) / name).relative_to(directory).as_posix()
