"""Every way for weights to be wrong, as a version that is dropped into a live root, and what it is refused with."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from app.vocab.manifest import FileEntry
from app.vocab.publish import commit, draft
from tests import support

SIZES = (4, 5, 6)
CONFIG = support.onerec_config(SIZES)
GOOD = support.onerec_weights(CONFIG, -1)  # content that no good version has: what is in memory is not read again
LAST = next(name for name in reversed(GOOD) if GOOD[name].dim() == 2 and len(set(GOOD[name].shape)) == 2)
Make = Callable[[Path, str], None]


def publish(
    root: Path, version: str, files: Mapping[str, bytes], spoil: Callable[[Path], object] = lambda _: None
) -> None:
    """A version with a manifest of these bytes. spoil: what happens to the weights' file before anybody sees it."""
    with draft(root, "weights") as made:
        for name, data in files.items():
            made.write(name, [data])
        spoil(made.directory / "model.safetensors")
        commit(made, "weights", version, "tests", {})


def holding(config: Mapping[str, object], data: bytes) -> dict[str, bytes]:
    return {"config.json": json.dumps(config).encode(), "model.safetensors": data}


def tensors(change: Callable[[dict], object]) -> Make:
    """The good tensors but for a change, published as they are."""

    def make(root: Path, version: str) -> None:
        changed = dict(GOOD)
        change(changed)
        publish(root, version, holding(CONFIG, support.save(changed)))

    return make


def data(change: Callable[[bytes], bytes], *, after: bool) -> Make:
    """The good file but for its bytes. after: not as the manifest says."""

    def make(root: Path, version: str) -> None:
        good = support.save(GOOD)
        if after:
            publish(root, version, holding(CONFIG, good), lambda file: file.write_bytes(change(good)))
        else:
            publish(root, version, holding(CONFIG, change(good)))

    return make


def one_value(value: float) -> Callable[[dict], None]:
    def change(found: dict) -> None:
        found[LAST] = found[LAST].clone()
        found[LAST][-1, -1] = value

    return change


def flipped(found: bytes) -> bytes:
    return found[:-5] + bytes([found[-5] ^ 1]) + found[-4:]


def pickles_only(root: Path, version: str) -> None:
    publish(root, version, {"config.json": json.dumps(CONFIG).encode(), "model.pt": pickle.dumps([1])})


def other_codes(root: Path, version: str) -> None:
    config = support.onerec_config((16, 5, 6))
    publish(root, version, holding(config, support.save(support.onerec_weights(config, -1))))


def outside(root: Path, version: str) -> None:
    elsewhere = root.parent / "elsewhere.safetensors"

    def spoil(file: Path) -> None:
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)

    publish(root, version, holding(CONFIG, support.save(GOOD)), spoil)


def unreadable(root: Path, version: str) -> None:
    publish(root, version, holding(CONFIG, support.save(GOOD)), lambda file: file.chmod(0))


def another_name(root: Path, version: str) -> None:
    aside = root.parent / "aside"
    publish(aside, version, holding(CONFIG, support.save(GOOD)))
    manifest = aside / "weights" / version / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace(f'"{version}"', '"../v1"'))
    manifest.parent.rename(root / "weights" / version)


def too_large(root: Path, version: str) -> None:
    """A terabyte that no disk holds: a hole behind a header."""
    config, size = support.onerec_config(SIZES), 1 << 40
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with draft(root, "weights") as made:
        made.write("config.json", [json.dumps(config).encode()])
        file = made.directory / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, 8 + len(header) + size)
        made.files["model.safetensors"] = FileEntry(8 + len(header) + size, "0" * 64)
        commit(made, "weights", version, "tests", {})


BAD: Mapping[str, tuple[str, Make]] = {
    "0 bytes": ("truncated", data(lambda _: b"", after=False)),
    "8 bytes": ("truncated", data(lambda found: found[:8], after=False)),
    "half": ("truncated", data(lambda found: found[: len(found) // 2], after=False)),
    "one byte less": ("truncated", data(lambda found: found[:-1], after=False)),
    "three bytes more": ("bad_safetensors", data(lambda found: found + b"abc", after=False)),
    "cut on the disk": ("file_size", data(lambda found: found[: len(found) // 2], after=True)),
    "one bit flipped": ("file_digest", data(flipped, after=True)),
    "one NaN": ("not_finite", tensors(one_value(float("nan")))),
    "one +inf": ("not_finite", tensors(one_value(float("inf")))),
    "missing": ("missing_tensors", tensors(lambda found: found.pop(LAST))),
    "renamed": ("missing_tensors", tensors(lambda found: found.update({"another": found.pop(LAST)}))),
    "extra": ("unknown_tensors", tensors(lambda found: found.update({"nobody.asked": torch.ones(1)}))),
    "shape": ("bad_shape", tensors(lambda found: found.update({LAST: found[LAST][:1].clone()}))),
    "dtype": ("bad_dtype", tensors(lambda found: found.update({LAST: found[LAST].to(torch.int32)}))),
    "transposed": ("bad_shape", tensors(lambda found: found.update({LAST: found[LAST].t().contiguous()}))),
    "pickle renamed": ("bad_safetensors", data(lambda _: pickle.dumps([1, 2, 3] * 50), after=False)),
    "header of 2**40": ("bad_safetensors", data(lambda _: (1 << 40).to_bytes(8, "little") + b"{}", after=False)),
    "pickles only": ("no_weights", pickles_only),
    "other codes": ("", other_codes),
    "link out of the folder": ("path_escape", outside),
    "named ../v1": ("manifest_version", another_name),
    "larger than memory": ("no_memory", too_large),
    **({"mode 000": ("file_unreadable", unreadable)} if os.geteuid() else {}),  # root reads everything
}
"""Name -> (code; "" = whatever it is, the same each time; how it is made)."""
