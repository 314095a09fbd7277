"""Recipes that read what the demo declares, served by the demo's own model: what their lists hold, by what the
catalogue's file says of the films."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from app.cli.deployment import read_deployment
from app.policies.compile import compile_policy
from app.policies.source import Source
from app.runtime.columns import catalogue_of
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from tests import support

ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / "docs" / "policies" / "cookbook"
RECIPES = (
    "v22_catalogue",
    "v17_debias_popularity",
    "v18_fresh_boost",
    "v23_part_of_the_catalogue",
    "v24_exclude_seen",
    "v26_campaign",
    "v32_category_quota",
    "v33_cold_start",
    "v41_dedupe_by_genre",
    "v42_known_well_enough",
    "v43_final_score",
    "v46_genre_quota",
)


@pytest.fixture(scope="module")
def films() -> dict[str, dict]:
    """The catalogue's file, which no index was made of."""
    with gzip.open(ROOT / "data" / "ml-latest-small" / "movielens.jsonl.gz", "rt", encoding="utf-8") as file:
        return {film["id"]: film["attrs"] for film in map(json.loads, file)}


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> dict[str, list[str]]:
    """The list of one user under each recipe, all in one batch."""
    root = tmp_path_factory.mktemp("demo")  # a copy: a root is written to when it is loaded
    for name in ("weights", "vocab", "policies"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "deployment.toml", root)
    deployment = read_deployment(root)
    snapshot = load_root(root, deployment, make_log(io.BytesIO())).snapshot
    assert snapshot is not None
    catalogue = catalogue_of(snapshot.vocab, snapshot.side)
    plans = {}
    for name in RECIPES:
        text = (COOKBOOK / f"{name}.yaml").read_text()
        text = text if "widths" in text else f"{text}widths: [64, 256, 400]\n"  # below the demo's largest k
        source = Source(f"{name}.yaml", text.encode())
        plans[name], found = compile_policy(name, {name: source}, snapshot.contract, catalogue)
        assert plans[name] is not None, found.text()
    snapshot = snapshot.having(policies=support.Policies(plans, default="v22_catalogue"))
    history = USER["history"]
    jobs = [support.job_of(snapshot, deployment, history, policy=name, k=500) for name in RECIPES]
    return {name: snapshot.vocab.ids(one.items) for name, one in zip(RECIPES, support.run_batch(jobs), strict=True)}


USER = json.loads((ROOT / "examples" / "movielens" / "users.json").read_text())[0]


def mean_ratings(films, ids) -> float:
    return sum(films[one]["ratings"] for one in ids) / len(ids)


def test_a_prior_makes_room_for_films_that_few_have_rated(films, lists):
    assert mean_ratings(films, lists["v17_debias_popularity"]) < mean_ratings(films, lists["v22_catalogue"])


def test_a_boost_brings_more_fresh_films_and_a_mask_nothing_else(films, lists):
    def fresh(name: str) -> int:
        return sum(films[one]["year"] >= 2010 for one in lists[name])

    every = sum(film["year"] >= 2010 for film in films.values())
    assert fresh("v18_fresh_boost") > fresh("v22_catalogue")
    assert fresh("v23_part_of_the_catalogue") == len(lists["v23_part_of_the_catalogue"]) == every


def test_nothing_of_a_block_list_and_nothing_seen(films, lists):
    assert lists["v24_exclude_seen"]
    assert all(films[one]["year"] >= 1950 and one not in USER["history"] for one in lists["v24_exclude_seen"])
    assert not all(films[one]["year"] >= 1950 and one not in USER["history"] for one in lists["v22_catalogue"])


def test_floors_and_caps_hold(films, lists):
    assert sum(films[one]["year"] <= 1949 for one in lists["v26_campaign"]) >= 4
    assert max(Counter(films[one]["genre"] for one in lists["v32_category_quota"]).values()) <= 200
    assert sum(films[one]["ratings"] <= 5 for one in lists["v33_cold_start"]) >= 16
    genres = Counter(films[one]["genre"] for one in lists["v46_genre_quota"])
    assert (
        max(genres.values()) <= 10 < max(Counter(films[one]["genre"] for one in lists["v22_catalogue"][:50]).values())
    )


def test_the_list_reads_the_items(films, lists):
    assert max(Counter(films[one]["genre"] for one in lists["v41_dedupe_by_genre"]).values()) == 1
    assert min(films[one]["ratings"] for one in lists["v42_known_well_enough"]) >= 10
    plain, fresher = lists["v22_catalogue"], lists["v43_final_score"]
    place = {one: at for at, one in enumerate(plain)}
    moved = [(place[one], at, films[one]["year"] >= 2010) for at, one in enumerate(fresher) if one in place]
    assert all(after <= before for before, after, fresh in moved if fresh)
    assert any(after < before for before, after, fresh in moved if fresh)
