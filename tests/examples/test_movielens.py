"""The MovieLens example: the split, sampled histories, the loss against enumeration, and the shipped artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from app.engine.families.onerec_config import parse
from app.engine.families.onerec_reference import OneRecReference
from app.vocab.artifact import open_vocab
from examples.movielens.baselines import KnnSettings, item_knn, pad
from examples.movielens.data import load
from examples.movielens.evaluate import MISSED, bootstrap, metrics, model_lists, ranks, tree_scores
from examples.movielens.publish import typical
from examples.movielens.student import Catalogue, StudentSettings, teacher_loss
from examples.movielens.teacher import Examples, HistorySampler, TeacherSettings, sample, teacher

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SIZES = (3, 4, 2)


@pytest.fixture(scope="module")
def split():
    return load(ROOT / "data" / "ml-latest-small")


def tiny() -> tuple[OneRecReference, Catalogue]:
    config = parse(
        {
            "family": "onerec", "sizes": list(SIZES), "d_model": 16, "layers": 2, "heads": 2, "head_dim": 8,
            "cross_groups": 2, "self_groups": 1, "ffn": 24, "history": {"short": 3, "long": 2, "pool": 2, "prefix": 2},
        }
    )  # fmt: skip
    model = OneRecReference(config).eval()
    model.reset_parameters(torch.Generator().manual_seed(0))
    sids = np.array([(a, b, c) for a in range(3) for b in range(4) for c in range(2)], np.int32)
    sids = np.random.default_rng(0).permutation(sids)[:17]
    return model, Catalogue(sids, SIZES, CPU)


def test_the_split_is_the_five_core_with_the_last_items_held_out(split) -> None:
    assert len(split.users) == 671
    assert len(split.films) == 3496
    assert sum(map(len, split.sequences)) == 90072
    histories, held_out = split.cases("test")
    for train, history, item in zip(split.train, histories, held_out, strict=True):
        assert len(history) == len(train) + 1
        assert item not in history
        assert len(np.unique(history)) == len(history)


def test_ties_in_time_are_put_in_another_order_by_another_seed(split) -> None:
    other = load(ROOT / "data" / "ml-latest-small", seed=1)
    same = [np.array_equal(a, b) for a, b in zip(split.sequences, other.sequences, strict=True)]
    assert not all(same)
    assert all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(split.sequences, other.sequences, strict=True))


def test_item_knn_counts_what_followed_with_decay() -> None:
    train = [np.array([0, 1, 2]), np.array([0, 1, 3])]
    score = item_knn(train, 4, KnnSettings(1, 1.0, 0.0, 0.0, 0.0, 2, 0.5), CPU)
    # history 0, 1: item 1 was followed by 2 and 3 once each; item 0 (half weight) by 1 twice
    assert score(pad([np.array([0, 1])], 5)).tolist() == [[0.0, 1.0, 1.0, 1.0]]


def test_sampled_histories_are_prefixes_and_the_following_item_follows() -> None:
    train = [np.arange(10), np.arange(100, 130)]
    torch.manual_seed(0)
    drawn = HistorySampler(train, 12, CPU).draw(200, dropped=0.0, mixed=0.0)
    for history, following in zip(drawn.histories.numpy(), drawn.following.tolist(), strict=True):
        items = history[history >= 0]
        assert len(items)
        assert (np.diff(items) == -1).all()
        assert following == (-1 if items[0] in {9, 129} else items[0] + 1)


def test_draws_have_the_probabilities_of_the_rows() -> None:
    torch.manual_seed(0)
    weight = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 2.0]])
    drawn = sample(weight.cumsum(1), 20_000)
    share = torch.stack([(drawn == item).float().mean(1) for item in range(3)], 1)
    torch.testing.assert_close(share, weight / weight.sum(1, keepdim=True), atol=0.02, rtol=0)


def test_the_loss_is_the_cross_entropy_over_all_items_in_expectation() -> None:
    model, catalogue = tiny()
    torch.manual_seed(0)
    histories = pad([np.array([1, 4]), np.array([7, 2, 9, 3, 11])], 7)
    target = torch.softmax(3 * torch.randn(2, 17), 1)
    examples = Examples(histories, torch.tensor([5, -1]))
    _, _, log_items = tree_scores(model, catalogue, histories)
    with torch.no_grad():
        taught = teacher_loss(model, catalogue, examples, target, StudentSettings(sids=40_000, truth=0.0))
        real = teacher_loss(model, catalogue, examples, target, StudentSettings(sids=1, truth=1.0))
    assert taught.item() == pytest.approx(-(target * log_items).sum(1).mean().item(), abs=0.02)
    assert real.item() == pytest.approx(-log_items[0, 5].item(), abs=1e-5)


def test_a_wide_search_ranks_all_items_and_never_one_of_the_history() -> None:
    model, catalogue = tiny()
    histories = [np.array([1, 4]), np.array([7, 2, 9, 3, 11])]
    scores = tree_scores(model, catalogue, pad(histories, 5))[2].numpy()
    lists = model_lists(model, catalogue, histories, 17, (2, 100))
    for history, own, narrow, score in zip(histories, lists[100], lists[2], scores, strict=True):
        free = np.setdiff1d(np.arange(17), history)
        assert own.tolist() == free[np.argsort(-score[free])].tolist()
        assert len(narrow) <= 2
        assert not set(narrow.tolist()) & set(history.tolist())


def test_the_teacher_gives_films_of_the_history_nothing_when_told_so() -> None:
    knn = item_knn([np.arange(6)], 6, KnnSettings(2, 1.0, 1.0, 0.0, 0.0, 6, 0.9), CPU)
    histories = pad([np.array([0, 1, 2])], 4)
    hidden, shown = (teacher(knn, None, TeacherSettings(0.0, 1.0, 1.0, h))(histories)[0] for h in (True, False))
    assert hidden[:3].tolist() == [0, 0, 0]
    assert (shown > 0).all()
    assert shown.sum().item() == pytest.approx(1, abs=1e-5)


def test_metrics_by_hand_and_the_bootstrap_of_a_constant() -> None:
    places = ranks([np.array([4, 2, 9]), np.array([1]), np.arange(40)], np.array([2, 5, 30]))
    assert places.tolist() == [1, MISSED, 30]
    found = metrics(places)
    assert found["recall@10"].tolist() == [1, 0, 0]
    assert found["recall@50"].tolist() == [1, 0, 1]
    assert found["ndcg@10"] == pytest.approx([1 / np.log2(3), 0, 0])
    assert bootstrap(np.ones(5), np.zeros(5), draws=10) == {"difference": 1, "low": 1, "high": 1, "p": 0}


def test_the_shipped_catalogue_and_users_are_those_of_the_data(split) -> None:
    vocab = open_vocab(ROOT / "vocab" / "v1")
    ids = vocab.ids(range(len(vocab)))
    assert set(ids) == {film.id for film in split.films}
    assert len({tuple(sid) for sid in vocab.sids(range(len(vocab))).tolist()}) == len(ids)
    users = json.loads((ROOT / "examples" / "movielens" / "users.json").read_text())
    for user, row in zip(users, typical(split), strict=True):
        *watched, last = (split.films[item] for item in split.sequences[row])
        assert user["id"] == str(split.users[row])
        assert user["history"] == [film.id for film in watched]
        assert user["held_out"] == last.id
    weights = ROOT / "weights" / "v1" / "model.safetensors"
    assert weights.stat().st_size <= 16 * 2**20
