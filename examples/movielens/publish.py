"""Part 3 of train.py: the best seed becomes the demo of the deployment root."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from examples.movielens import artifacts
from examples.movielens.data import Split
from examples.movielens.served import widebeam

VERSION = "v1"
CATALOGUE = "movielens.jsonl.gz"
USERS, SHORTEST, LONGEST = 3, 25, 60


def publish(split: Split, out: Path, root: Path) -> None:
    """Write the catalogue, deployment.toml (where there is none), vocab/v1, weights/v1 and users.json into `root`.

    Existing versions are not overwritten: remove `vocab/v1` and `weights/v1` first.
    """
    catalogue = root / "data" / "ml-latest-small" / CATALOGUE
    plain = out / "catalogue.jsonl"
    artifacts.write_catalogue(split, np.load(out / "sids.npy"), plain)
    catalogue.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    best = out / f"seed-{best_seed(out)}"
    if not (root / "deployment.toml").exists():
        artifacts.write_deployment(artifacts.load_config(best), root / "deployment.toml")
    widebeam("vocab", "import", "--format", "jsonl", catalogue, "--root", root, "--version", VERSION)
    widebeam("weights", "publish", best, "--root", root, "--version", VERSION)
    artifacts.write_users(split, typical(split), root / "examples" / "movielens" / "users.json")


def best_seed(out: Path) -> int:
    """The seed with the largest NDCG@10 on validation at W = 200, of the chosen settings."""
    log = json.loads((out / "validation.json").read_text())
    prefix = f"{log['chosen']}, seed "
    score = {int(name.removeprefix(prefix)): row["W=200"] for name, row in log.items() if name.startswith(prefix)}
    return max(score, key=lambda seed: (score[seed]["ndcg@10"], -seed))


def typical(split: Split) -> list[int]:
    """The first users with a history that fits a terminal; nothing is known of how well the model does for them."""
    fitting = [user for user, items in enumerate(split.sequences) if SHORTEST <= len(items) - 1 <= LONGEST]
    return fitting[:USERS]
