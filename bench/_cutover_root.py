"""The deployment root of `bench cutover`: weights of a gigabyte and a million items, in three contents each.

Contents are told apart by what they answer: the last norm of weights content n is scaled by SCALES[n], which moves
every score and stretches their differences; an item is called by its SID behind the letter of its vocab's content, and
but for the COMMON items, which histories name ("i" and the SID), no two contents have an item at the same SID: an item
map finds nothing under what another vocab's trie has allowed.
Versions are hard links to the same files with a manifest of their own, so one appears in milliseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from app.config import Limits, SidConfig
from app.engine.families.base import ModelFiles
from app.engine.registry import family
from app.vocab.artifact import save_vocab
from app.vocab.items import Strings, Table
from app.vocab.manifest import FileEntry, Kind, read_manifest, version_key
from app.vocab.publish import Draft, commit, draft
from bench._cutover_names import EVERYWHERE, LETTERS, item_name

SPECIAL = 3
"""Token ids in front of the SID tokens."""
SCALES = (0.5, 1.0, 2.0)
COMMON = 1000
"""Items that every content has, under the same id."""
BLOCK = 16 << 20
HEAVY: tuple[Kind, ...] = ("weights", "vocab")
KEPT = 4
"""Versions of a kind that stay on the disk, at least."""
APART_GB = 0.1
"""Contents of so much weights are made beside each other."""
ELSEWHERE = ("device", "threads", "front_ends")
"""Of a setting, what says nothing about the contents."""
QUEUE = 8192
"""Requests that may wait: everybody is answered, however long that takes, and counts."""


@dataclass(frozen=True)
class Setting:
    """What serves. gigabytes: the least that a weights version holds; the table of input tokens is padded up to it."""

    gigabytes: float = 1.0
    items: int = 1_000_000
    sizes: tuple[int, ...] = (1024, 1024, 1024)
    history: int = 32
    width: int = 64
    batch: int = 16
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    device: str = "auto"
    threads: int = 0
    front_ends: int = 0

    @property
    def config(self) -> dict[str, object]:
        """The model's config.json."""
        return {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": self.vocabulary,
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position_embeddings": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "attention_bias": False,
        }  # fmt: skip

    @property
    def token_base(self) -> tuple[int, ...]:
        """The token id of code 0 of each step."""
        return tuple(SPECIAL + sum(self.sizes[:t]) for t in range(len(self.sizes)))

    @property
    def vocabulary(self) -> int:
        """Tokens, so that the file has its size."""
        own = (self.heads + 2 * self.kv_heads + self.heads) * self.head_dim * self.hidden + 3 * self.ffn * self.hidden
        left = self.gigabytes * 1e9 / 4 - self.layers * own
        return max(SPECIAL + sum(self.sizes), int(left / self.hidden) + 1)


SMALL = Setting(sizes=(256, 256, 256), width=32)
LARGE = Setting(
    width=256, batch=32, layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, gigabytes=1.8,
    front_ends=1,
)  # fmt: skip
"""Qwen3-0.6B's shape; HTTP beside the process that launches."""
TOY = Setting(
    gigabytes=0.002, items=5000, sizes=(64, 64, 64), history=4, width=8, batch=4, layers=1, hidden=16, heads=2,
    kv_heads=1, head_dim=8, ffn=32,
)  # fmt: skip
SETTINGS = {"cpu": SMALL, "h200": LARGE, "toy": TOY}


POLICY = """widebeam: 1
steps:
  all: {{normalize: step}}
widths: {widths}
"""
"""Over the step's codes: the padded table of tokens is memory, and no work."""


def make_root(work: Path, setting: Setting) -> Path:
    """The root with its store of contents, made once a working directory: 3 x `gigabytes` of disk. A store that is
    copied, or linked, to another working directory with its setting.json is not made again."""
    root, store, mark = work / "root", work / "store", work / "setting.json"
    text = json.dumps({name: value for name, value in asdict(setting).items() if name not in ELSEWHERE})
    if mark.exists() and mark.read_text("utf-8") != text:
        raise SystemExit(f"{work} holds another setting: give another --work")
    widths = [setting.width] * len(setting.sizes)
    (root / "policies").mkdir(parents=True, exist_ok=True)
    (root / "policies" / "base.yaml").write_text(POLICY.format(widths=widths))
    rows = setting.width * setting.batch
    (root / "deployment.toml").write_text(
        f'family = "qwen3"\ndevice = "{setting.device}"\n[sid]\nsizes = {list(setting.sizes)}\n'
        f"token_base = {list(setting.token_base)}\n[limits]\nwidths = {widths}\nrows = {rows}\n"
        f"batch = {setting.batch}\ncontext = {setting.history * len(setting.sizes)}\nk = {setting.width}\n"
        f"queue = {QUEUE}\n[server]\n"
        f'port = 0\nadmin_port = 0\nadmin_auth = "none"\nthreads = {setting.threads}\n'
        f"front_ends = {setting.front_ends}\ndrain_delay_s = 0.05\n"
    )
    if not mark.exists():
        shutil.rmtree(store, ignore_errors=True)
        _make_all(store, setting)
        mark.write_text(text)
    return root


def _make_all(store: Path, setting: Setting) -> None:
    """Every content of both kinds, large ones in processes of their own."""
    contents = [(make, n) for n in range(len(LETTERS)) for make in (_make_weights, _make_vocab)]
    if setting.gigabytes < APART_GB:
        for make, n in contents:
            make(store, setting, n)
        return
    workers = min(len(os.sched_getaffinity(0)), len(contents))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for made in [pool.submit(make, store, setting, n) for make, n in contents]:
            made.result()


def clean(work: Path) -> None:
    """Version v1 of both kinds, asked for, and nothing else; no state."""
    root = work / "root"
    for kind in HEAVY:
        for path in (root / kind).glob("v*-*"):
            shutil.rmtree(path)
        if not (root / kind / "v1").exists():
            publish(work, kind, 0, "v1")
    shutil.rmtree(root / "state", ignore_errors=True)
    shutil.rmtree(work / "trash", ignore_errors=True)
    ask_for(work, dict.fromkeys(HEAVY, "v1"))


def ask_for(work: Path, wanted: Mapping[Kind, str]) -> None:
    """Say which versions are to serve, all at once."""
    new = work / "root" / ".release.json"
    new.write_text(json.dumps(wanted))
    new.rename(work / "root" / "release.json")


def drop_old(work: Path, wanted: Collection[str]) -> None:
    """Remove all but the youngest versions, none of them wanted; each is gone at once, and no part of it is seen.

    They lie outside of the root until `clean`: were the links deleted, the times of the same files in younger versions
    would change, and the server would read and hash those again, beside the next update.
    """
    trash = work / "trash"
    trash.mkdir(exist_ok=True)
    for kind in HEAVY:
        found = sorted((work / "root" / kind).glob("v*"), key=lambda path: version_key(path.name))
        for path in found[:-KEPT]:
            if path.name not in wanted:
                path.rename(trash / f"{kind}-{path.name}")


def publish(work: Path, kind: Kind, content: int, version: str) -> None:
    """A version of a content: links and a manifest."""
    place = work / "store" / kind / LETTERS[content]
    files = read_manifest(place, kind).files
    with draft(work / "root", kind) as made:
        for name, entry in files.items():
            _link(made, place / name, name, entry)
        commit(made, kind, version, "bench", {})


def _link(made: Draft, source: Path, name: str, entry: FileEntry) -> None:
    os.link(source, made.directory / name)
    made.files[name] = entry


def _make_weights(store: Path, setting: Setting, content: int) -> None:
    limits = Limits(context=setting.history * len(setting.sizes), rows=setting.width * setting.batch)
    sid = SidConfig(sizes=setting.sizes, token_base=setting.token_base)
    model = family("qwen3").build(ModelFiles(setting.config, Path(), {}), sid, limits, torch.float32)
    shapes = {spec.name: spec.shape for spec in model.weight_specs()}
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        generator = np.random.default_rng(content + 1)  # every content has bytes of its own
        shared = np.random.default_rng(0)  # and the same model but for its scale
        for name, shape in shapes.items():
            yield from _tensor(name, shape, setting, content, shared, generator)

    with draft(store, "weights") as made:
        made.write("config.json", [json.dumps(setting.config).encode()])
        made.write("model.safetensors", pieces())
        commit(made, "weights", LETTERS[content], "bench", {})


def _tensor(
    name: str, shape: tuple[int, ...], setting: Setting, content: int, shared: np.random.Generator,
    generator: np.random.Generator,
) -> Iterator[bytes | memoryview]:  # fmt: skip
    """A tensor's bytes; generator: of what no other content has, shared: of what all of them have."""
    if name.endswith("norm.weight"):
        scale = SCALES[content] if name == "model.norm.weight" else 1.0
        yield np.full(shape, scale, np.float32).tobytes()
        return
    rows, columns = shape
    if name != "model.embed_tokens.weight":
        yield (shared.standard_normal(shape, np.float32) * columns**-0.5).data.cast("B")
        return
    used = SPECIAL + sum(setting.sizes)
    yield (0.2 * shared.standard_normal((used, columns), np.float32)).data.cast("B")
    block = generator.standard_normal(BLOCK // 4, np.float32).data.cast("B")
    left = (rows - used) * columns * 4
    while left > 0:
        yield block[: min(left, BLOCK)]
        left -= BLOCK


def _make_vocab(store: Path, setting: Setting, content: int) -> None:
    flat, common = catalogue(setting, content)
    sids = np.stack(np.unravel_index(flat, setting.sizes), axis=1).astype(np.int32)
    letters = np.where(common, EVERYWHERE, LETTERS[content])
    names = [item_name(letter, sid).encode() for letter, sid in zip(letters, sids.tolist(), strict=True)]
    save_vocab(Table(Strings.of(names), sids, {}), setting.sizes, store, LETTERS[content], made_by="bench")


def catalogue(setting: Setting, content: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Items of a content as places in all SIDs, in order [n], and which of them every content has [n]."""
    others = (
        len(LETTERS) * np.random.default_rng(5).integers(0, _total(setting) // len(LETTERS), setting.items) + content
    )
    flat = np.union1d(_common(setting), others)
    return flat, np.isin(flat, _common(setting))


def bodies(setting: Setting, count: int = 64) -> list[bytes]:
    """Requests that every content understands."""
    generator = np.random.default_rng(3)
    sids = np.stack(np.unravel_index(_common(setting), setting.sizes), axis=1).tolist()
    histories = generator.integers(0, len(sids), (count, setting.history)).tolist()
    k = min(20, setting.width)
    named = ([item_name(EVERYWHERE, sids[n]) for n in one] for one in histories)
    return [json.dumps({"context": {"history": one}, "k": k}).encode() for one in named]


def _common(setting: Setting) -> npt.NDArray[np.int64]:
    return np.unique(np.random.default_rng(6).integers(0, _total(setting), min(COMMON, setting.items // 2)))


def _total(setting: Setting) -> int:
    return int(np.prod(setting.sizes))
