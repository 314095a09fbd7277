"""How fast, and in how much memory, a catalogue becomes a vocab and answers questions.

    python -m bench.vocab [--json FILE] [--quick] [--only NAME]

Each figure is measured in a process of its own (peak resident memory, above what the process held before), with two
threads. Targets: trie of 1.5 M SIDs under 1 s and 150 MB over the array, of 10 M under 6 s; `vocab import` of 1.5 M
JSON lines under 15 s and 400 MB in all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from app.config import Attribute, Deployment, Items, Prior, SidConfig
from app.vocab.aggregates import side_data
from app.vocab.artifact import load_vocab, save_vocab
from app.vocab.build import residual_kmeans
from app.vocab.items import Columns, Numbers, Strings, Table, Texts
from app.vocab.recent import Recent
from app.vocab.trie import build_trie
from app.vocab.vocab import Vocab, arrange, make_vocab
from bench._report import commit, cpu_model

THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
SIZES = (8192, 8192, 8192)
Row = dict[str, object]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sids(items: int) -> np.ndarray:
    """Skewed codes, as catalogues have them: a few prefixes hold many items, and some items share an SID."""
    random = np.random.default_rng(0)
    skew = (random.random((items, 3)) ** (1.5, 1.2, 1.0) * SIZES).astype(np.int32)
    return np.minimum(skew, 8191)


def trie(items: int) -> Row:
    codes = sids(items)
    before, start, cpu = peak_mb(), time.perf_counter(), time.process_time()
    built, _, leaf_items = build_trie(codes, SIZES)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "items": items, "seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3),
        "mb_over_the_array": round(peak_mb() - before), "sids": len(leaf_items) - 1, "prefixes": built.prefixes,
    }  # fmt: skip


def vocab_of(items: int, columns: Columns | None = None) -> tuple[Vocab, float, float]:
    text = np.frombuffer(b"".join(b"%010d" % (i * 7) for i in range(items)), np.uint8)
    table = Table(Strings(text, np.arange(0, len(text) + 1, 10)), sids(items), columns or {})
    start = time.perf_counter()
    ordered = arrange(table, SIZES)
    arranged = time.perf_counter()
    vocab = make_vocab(ordered, SIZES)
    return vocab, arranged - start, time.perf_counter() - arranged


def median_us(call: Callable[[int], object], times: int = 300) -> float:
    """Median over calls with other arguments each time, so that caches help no more than in a server."""
    taken = []
    for i in range(times):
        start = time.perf_counter()
        call(i)
        taken.append(time.perf_counter() - start)
    return round(1e6 * sorted(taken)[times // 2], 1)


def look_ups(items: int) -> Row:
    vocab, arranged, made = vocab_of(items)
    random = np.random.default_rng(1)
    sets = [random.integers(0, items, 100) for _ in range(300)]
    names = [vocab.ids(one) for one in sets]
    nodes = [random.integers(0, vocab.trie.nodes, 512) for _ in range(300)]
    codes = [random.integers(0, 8192, 512) for _ in range(300)]
    return {
        "items": items,
        "arrange_s": round(arranged, 2),
        "trie_and_id_hashes_s": round(made, 2),
        "find_100_us": median_us(lambda i: vocab.find(names[i])),
        "sids_100_us": median_us(lambda i: vocab.sids(sets[i])),
        "ids_100_us": median_us(lambda i: vocab.ids(sets[i])),
        "dead_100_us": median_us(lambda i: vocab.dead(sets[i])),
        "dead_same_100_us": median_us(lambda _: vocab.dead(sets[0])),
        "step_512_us": median_us(lambda i: vocab.step(nodes[i], codes[i])),
        "items_below_512_us": median_us(lambda i: vocab.items_below(nodes[i])),
        **{f"{key}_{ids}_us": us for ids in (32, 100, 511) for key, us in recently(vocab, ids, random).items()},
    }


def recently(vocab: Vocab, ids: int, random: np.random.Generator) -> Row:
    """A history of so many ids by what was asked for lately: all of them, or none of them until now."""
    names = [vocab.ids(random.integers(0, len(vocab), ids)) for _ in range(300)]
    new = median_us(lambda i: Recent(vocab.names.find).find(names[i]))
    known = Recent(vocab.names.find)
    for one in names[:100]:
        known.find(one)
    return {"new": new, "known": median_us(lambda i: known.find(names[i % 100]))}


def import_jsonl(items: int) -> Row:
    """The whole command, as `widebeam vocab import` runs it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "deployment.toml").write_text(f'family = "onerec"\n[sid]\nsizes = {list(SIZES)}\n')
        with (root / "items.jsonl").open("w") as stream:
            # in parts: a child's peak counts from its parent's size at the start
            for i, (a, b, c) in enumerate(sid.tolist() for part in np.array_split(sids(items), 100) for sid in part):
                attrs = f'{{"genre": "genre {i % 50}", "year": {1950 + i % 70}}}'
                stream.write(f'{{"id": "{100000000 + 7 * i}", "sid": [{a}, {b}, {c}], "attrs": {attrs}}}\n')
        command = [sys.executable, "-m", "app", "vocab", "import", "--format", "jsonl", "items.jsonl", "--root", "."]
        environment = {**os.environ, **THREADS, "PYTHONPATH": str(Path(__file__).parent.parent)}
        start = time.perf_counter()
        subprocess.run([*command, "--json"], cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        megabytes = (root / "items.jsonl").stat().st_size / 1e6
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "items": items, "file_mb": round(megabytes), "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2), "peak_mb": round(used.ru_maxrss / 1024),
    }  # fmt: skip


def load(items: int) -> Row:
    """What a server does: read, verify, build the trie and the look-up of ids."""
    with tempfile.TemporaryDirectory() as folder:
        vocab, *_ = vocab_of(items)
        table = Table(vocab.names.strings, vocab.codes, {})
        directory = save_vocab(table, SIZES, Path(folder), "v1", made_by="bench").directory
        start = time.perf_counter()
        load_vocab(directory, SIZES)
        return {"items": items, "seconds": round(time.perf_counter() - start, 2)}


DECLARED = {
    "max": ("attributes", Attribute(of="year", as_="max", default=1900)),
    "mean": ("attributes", Attribute(of="year", as_="mean", default=1900)),
    "any": ("attributes", Attribute(of="year", as_="any", least=2010)),
    "share": ("attributes", Attribute(of="year", as_="share", least=2010)),
    "same": ("attributes", Attribute(of="genre", as_="same")),
    "prior": ("priors", Prior(of="year")),
    "list": ("lists", Items(of="genre", is_="genre 7")),
}


def side_data_of(items: int) -> Row:
    """What a deployment declares of prefixes: each column by itself, all together, and the bytes that they take."""
    random = np.random.default_rng(2)
    years = Numbers((1950 + random.integers(0, 70, items)).astype(np.float32), random.random(items) < 0.9)
    words = Strings.of([b"genre %d" % n for n in range(50)])
    genres = Texts(random.integers(-1, 50, items).astype(np.int32), words)
    vocab, *_ = vocab_of(items, {"year": years, "genre": genres})
    root = Deployment(family="onerec", sid=SidConfig(sizes=SIZES))
    row: Row = {"items": items, "prefixes": vocab.trie.nodes}
    every: dict[str, dict[str, object]] = {"attributes": {}, "priors": {}, "lists": {}}
    for name, (table, declared) in DECLARED.items():
        every[table][name] = declared
        start = time.perf_counter()
        side_data(vocab, msgspec.structs.replace(root, **{table: {name: declared}}))
        row[f"{name}_ms"] = round(1e3 * (time.perf_counter() - start), 1)
    start = time.perf_counter()
    made = side_data(vocab, msgspec.structs.replace(root, **every))
    seconds = time.perf_counter() - start
    on_device = sum(one.nodes.nbytes for one in made.columns.values())
    return {
        **row,
        "all_s": round(seconds, 3),
        "mb": round(made.nbytes / 1e6, 1),
        "device_mb": round(on_device / 1e6, 1),
    }


def build(items: int) -> Row:
    points = np.random.default_rng(0).normal(size=(items, 64)).astype(np.float32)
    start = time.perf_counter()
    codes = residual_kmeans(points, (64, 64, 64), 0)
    seconds = time.perf_counter() - start
    return {"items": items, "dim": 64, "seconds": round(seconds, 2), "unique": len(np.unique(codes, axis=0)) == items}


MEASUREMENTS: dict[str, tuple[Callable[[int], Row], tuple[int, ...]]] = {
    "trie": (trie, (1_500_000, 10_000_000)),
    "import_jsonl": (import_jsonl, (1_500_000,)),
    "load": (load, (1_500_000, 10_000_000)),
    "look_ups": (look_ups, (1_500_000, 10_000_000)),
    "side_data": (side_data_of, (1_500_000, 10_000_000)),
    "build": (build, (10_000, 100_000)),
}


def measure(name: str, items: int) -> Row:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "bench.vocab", "--one", name, str(items)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env={**os.environ, **THREADS}, check=True, capture_output=True, text=True)
    of = {"commit": commit(), "load_average": round(os.getloadavg()[0], 1)}
    return json.loads(done.stdout) | of


def machine() -> Row:
    """What results begin with."""
    return {
        "command": "python -m bench.vocab",
        "machine": {
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "vocab.json")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the items, to see that it runs")
    parser.add_argument("--only", choices=list(MEASUREMENTS), help="one of them; the others stay as they lie there")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "ITEMS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(MEASUREMENTS[given.one[0]][0](int(given.one[1]))))
        return
    results: Row = json.loads(given.json.read_text()) if given.only else machine()
    for name in [given.only] if given.only else list(MEASUREMENTS):
        rows = [measure(name, items // 100 if given.quick else items) for items in MEASUREMENTS[name][1]]
        results[name] = rows
        for row in rows:
            print(name, json.dumps(row), flush=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
