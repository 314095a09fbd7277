"""Part 2 of train.py: the test item, once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench._report import commit
from examples.movielens import baselines, settings
from examples.movielens.artifacts import load_config, write_catalogue
from examples.movielens.data import Split
from examples.movielens.evaluate import bootstrap, interval, metrics, ranks, scorer_lists
from examples.movielens.served import Served

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
PerUser = Mapping[str, Floats]
"""Metric name -> [users]."""

CPU = torch.device("cpu")


def evaluate(split: Split, out: Path, results: Path, seeds: int) -> None:
    """Baselines from scratch, SASRec from its saved lists, every seed's model through the runtime; writes `results`."""
    histories, held_out = split.cases("test")
    items = len(split.films)
    plain = baselines.item_knn(split.train, items, settings.PLAIN_KNN, CPU)
    knn = baselines.item_knn(split.train, items, settings.KNN, CPU)
    rows: dict[str, list[PerUser]] = {}
    for name, scorer in (
        ("most popular", baselines.popularity(split.train, items, CPU)),
        ("Markov item-kNN, untuned", plain),
        ("Markov item-kNN", knn),
    ):
        rows[name] = [metrics(ranks(scorer_lists(scorer, histories, 50, CPU), held_out))]
    rows["SASRec"] = [metrics(ranks(list(np.load(out / f"sasrec-{s}.npy")), held_out)) for s in range(seeds)]
    for seed in track(range(seeds), "models through `widebeam recommend`", console=Console(stderr=True)):
        for width, lists in served_lists(split, out, seed, histories).items():
            rows.setdefault(f"onerec, W={width}", []).append(metrics(ranks(lists, held_out)))
    document = {
        "data": "MovieLens ml-latest-small, 5-core, leave-one-out, history masked, full catalogue",
        "users": len(held_out),
        "items": items,
        "seeds": seeds,
        "host": f"{os.cpu_count()} CPU cores, torch {torch.__version__}",
        "commit": commit(),
        "validation": json.loads((out / "validation.json").read_text()),
        "test": {name: summary(per_seed) for name, per_seed in rows.items()},
        "against item-kNN": {
            name: against(per_seed, rows["Markov item-kNN"][0])
            for name, per_seed in rows.items()
            if name.startswith(("onerec", "SASRec"))
        },
        "against untuned item-kNN": {
            name: against(per_seed, rows["Markov item-kNN, untuned"][0])
            for name, per_seed in rows.items()
            if name.startswith(("onerec", "SASRec"))
        },
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(document, indent=1) + "\n")
    show(document)


def served_lists(split: Split, out: Path, seed: int, histories: Sequence[Ints]) -> dict[int, list[Ints]]:
    """The lists of one seed's model by width, from the runtime."""
    with tempfile.TemporaryDirectory() as directory:
        catalogue = Path(directory, "catalogue.jsonl")
        write_catalogue(split, np.load(out / "sids.npy"), catalogue)
        weights = out / f"seed-{seed}"
        recommend = Served(Path(directory, "root"), split, settings.WIDTHS, load_config(weights))
        recommend.install(weights, catalogue)
        return {width: recommend(histories, 50, width) for width in settings.WIDTHS}


def summary(per_seed: Sequence[PerUser]) -> dict[str, dict[str, float]]:
    """Mean and half a 95 % interval by metric: over seeds, or for one deterministic method over users."""
    found = {}
    for name in per_seed[0]:
        if len(per_seed) > 1:
            mean, half = interval([float(users[name].mean()) for users in per_seed])
        else:
            users = per_seed[0][name]
            mean, half = float(users.mean()), float(1.96 * users.std(ddof=1) / np.sqrt(len(users)))
        found[name] = {"mean": round(mean, 4), "half": round(half, 4)}
    return found


def against(per_seed: Sequence[PerUser], theirs: PerUser) -> dict[str, dict[str, float]]:
    """Paired bootstrap over users, a user's value being the mean over seeds."""
    return {
        name: {key: round(value, 4) for key, value in bootstrap(np.mean([s[name] for s in per_seed], 0), own).items()}
        for name, own in theirs.items()
    }


def show(document: Mapping[str, object]) -> None:
    """The table of the README on the terminal."""
    test = document["test"]
    assert isinstance(test, dict)
    table = Table("", *next(iter(test.values())))
    for name, row in test.items():
        table.add_row(name, *(f"{cell['mean']:.4f} ± {cell['half']:.4f}" for cell in row.values()))
    Console().print(table)
