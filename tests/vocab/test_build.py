from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import Rejected
from app.vocab.build import _match, residual_kmeans


def unique(codes: np.ndarray) -> bool:
    return len(np.unique(codes, axis=0)) == len(codes)


def test_every_item_gets_an_sid_of_its_own() -> None:
    points = np.random.default_rng(1).normal(size=(3000, 16)).astype(np.float32)
    codes = residual_kmeans(points, (16, 16, 16), seed=3)
    assert codes.shape == (3000, 3)
    assert codes.dtype == np.int32
    assert codes.min() >= 0
    assert codes.max() < 16
    assert unique(codes)


def test_equal_seeds_give_equal_codes_and_others_do_not() -> None:
    points = np.random.default_rng(1).normal(size=(500, 8)).astype(np.float32)
    first = residual_kmeans(points, (8, 8, 16), seed=0)
    assert np.array_equal(first, residual_kmeans(points, (8, 8, 16), seed=0))
    assert not np.array_equal(first, residual_kmeans(points, (8, 8, 16), seed=1))


def test_the_codes_describe_the_embedding() -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(8, 8)).astype(np.float32) * 20
    group = np.arange(800) % 8
    points = centres[group] + random.normal(size=(800, 8)).astype(np.float32)
    codes = residual_kmeans(points, (16, 16, 32), seed=0)
    for code in np.unique(codes[:, 0]):
        assert len(np.unique(group[codes[:, 0] == code])) == 1, "one first code holds two far clusters"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_succeeds_whenever_the_items_fit(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    room = int(np.prod(sizes))
    items = data.draw(st.integers(0, room))
    spread = data.draw(st.sampled_from([0.0, 1.0]))  # 0: all embeddings equal, the worst case for capacity
    points = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(items, 3)) * spread
    codes = residual_kmeans(points, sizes, seed=0)
    assert codes.shape == (items, len(sizes))
    assert unique(codes)
    assert (codes < np.array(sizes)).all()


def test_a_full_vocabulary_uses_every_sid() -> None:
    codes = residual_kmeans(np.random.default_rng(0).normal(size=(64, 4)), (4, 4, 4))
    assert len(np.unique(codes, axis=0)) == 64


@pytest.mark.parametrize(
    ("points", "sizes", "code", "location"),
    [
        (np.zeros((9, 2)), (2, 4), "too_many_items", None),
        (np.zeros(3), (2, 4), "embeddings_shape", None),
        (np.array([["a"]]), (2,), "embeddings_shape", None),
        (np.array([[0.0], [np.nan]]), (2, 4), "embeddings_not_finite", "row 1"),
        (np.array([[1e300]]), (2, 4), "embeddings_not_finite", "row 0"),
        (np.zeros((1, 2)), (), "sizes", None),
    ],
)
def test_refusals(points: np.ndarray, sizes: tuple[int, ...], code: str, location: str | None) -> None:
    with pytest.raises(Rejected) as caught:
        residual_kmeans(points, sizes)
    assert (caught.value.code, caught.value.location) == (code, location)


@given(data=st.data(), room=st.integers(1, 3), codes=st.integers(1, 5))
def test_full_codes_turn_away_the_farther_items_as_taking_the_nearest_pairs_first_does(
    data: st.DataObject, room: int, codes: int
) -> None:
    rows = data.draw(st.integers(1, room * codes))
    pairs = data.draw(st.permutations(range(rows * codes)))
    distance = np.array(pairs, np.float32).reshape(rows, codes)
    taken: dict[int, int] = {}
    for place in np.argsort(distance, axis=None).tolist():
        row, code = divmod(place, codes)
        if row not in taken and sum(other == code for other in taken.values()) < room:
            taken[row] = code
    assert _match(distance.copy(), room).tolist() == [taken[row] for row in range(rows)]
