"""Side data against an oracle that knows no trie: dictionaries from prefixes to the items that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import Attribute, Deployment, Items, Prior, parse
from app.errors import Rejected
from app.vocab.aggregates import SideData, side_data
from app.vocab.items import Numbers, Strings, Table, Texts
from app.vocab.vocab import Vocab, arrange, make_vocab

SIZES = (3, 3, 4)
GENRES = ("drama", "crime", "war")
PLAIN = parse(f'family = "onerec"\n[sid]\nsizes = {list(SIZES)}\n')

Item = tuple[tuple[int, ...], float | None, str | None]
"""SID, number, text."""


def declared(**tables: object) -> Deployment:
    return msgspec.structs.replace(PLAIN, **tables)


def vocab_of(items: Sequence[Item], sizes: tuple[int, ...] = SIZES) -> Vocab:
    numbers = np.array([0 if number is None else number for _, number, _ in items], np.float32)
    present = np.array([number is not None for _, number, _ in items], bool)
    texts = np.array([-1 if text is None else GENRES.index(text) for _, _, text in items], np.int32)
    columns = {
        "number": Numbers(numbers, present),
        "genre": Texts(texts, Strings.of([genre.encode() for genre in GENRES])),
    }
    names = Strings.of([f"i{at}".encode() for at in range(len(items))])
    codes = np.array([sid for sid, _, _ in items], np.int32).reshape(len(items), len(sizes))
    return make_vocab(arrange(Table(names, codes, columns), sizes), sizes)


def by_prefix(vocab: Vocab, items: Sequence[Item]) -> Mapping[int, list[Item]]:
    """The items below each node, by their prefixes alone."""
    found = {}
    for sid, _, _ in items:
        node = 0
        for depth in range(len(sid) + 1):
            found[node] = [item for item in items if item[0][:depth] == sid[:depth]]
            if depth < len(sid):
                node = int(vocab.step([node], [sid[depth]])[0])
    return found


def column(side: SideData, key: str) -> list[object]:
    return side.columns[key].nodes.tolist()


items_of = st.lists(
    st.tuples(
        st.tuples(*(st.integers(0, size - 1) for size in SIZES)),
        st.none() | st.integers(-5, 50).map(float),
        st.none() | st.sampled_from(GENRES),
    ),
    min_size=1,
    max_size=30,
)

ATTRIBUTES = {
    "most": Attribute(of="number", as_="max", default=2),
    "least": Attribute(of="number", as_="min", default=2),
    "mean": Attribute(of="number", as_="mean", default=2),
    "sum": Attribute(of="number", as_="sum", default=2),
    "rated": Attribute(of="number", as_="share"),
    "good": Attribute(of="number", as_="any", least=10, most=20),
    "crime": Attribute(of="genre", as_="share", is_="crime"),
    "dark": Attribute(of="genre", as_="any", is_=("crime", "war", "nowhere")),
    "known": Attribute(of="genre", as_="any"),
    "genre": Attribute(of="genre", as_="same"),
}


@settings(max_examples=150)
@given(items_of)
def test_each_aggregate_is_that_of_the_items_below(items):
    vocab = vocab_of(items)
    lists = {"dark": Items(of="genre", is_=("crime", "war"))}
    side = side_data(vocab, declared(attributes=ATTRIBUTES, lists=lists))
    for node, below in by_prefix(vocab, items).items():
        numbers = [2.0 if number is None else number for _, number, _ in below]
        genres = [text for _, _, text in below]
        dark = [text in ("crime", "war") for text in genres]
        want = {
            "attr.most": max(numbers),
            "attr.least": min(numbers),
            "attr.mean": np.float32(math.fsum(numbers) / len(numbers)),
            "attr.sum": sum(numbers),
            "attr.rated": np.float32(sum(number not in (None, 0) for _, number, _ in below) / len(below)),
            "attr.good": any(number is not None and 10 <= number <= 20 for _, number, _ in below),
            "attr.crime": np.float32(genres.count("crime") / len(below)),
            "attr.dark": any(dark),
            "attr.known": any(text is not None for text in genres),
            "attr.genre": GENRES.index(genres[0]) if len(set(genres)) == 1 and genres[0] else -1,
            "blocked.dark": all(dark),
            "boosted.dark": any(dark),
        }
        assert {key: column(side, key)[node] for key in want} == want


@settings(max_examples=100)
@given(items_of, st.sampled_from(["prefix", "edge"]))
def test_a_prior_is_the_log_of_a_share_and_never_below_its_floor(items, per):
    items = [(sid, None if number is None else max(number, 0), text) for sid, number, text in items]
    items.append(((0, 0, 0), 1.0, None))
    vocab = vocab_of(items)
    side = side_data(vocab, declared(priors={"popularity": Prior(of="number", per=per)}))
    below = by_prefix(vocab, items)
    weight = {node: sum(number or 0 for _, number, _ in found) for node, found in below.items()}
    for node in below:
        whole = weight[int(vocab.parent[node])] if per == "edge" else weight[0]
        share = weight[node] / whole if whole else 0
        want = math.log(max(share, 1 / (10 * len(items))))
        assert column(side, "prior.popularity")[node] == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert column(side, "prior.popularity")[-1] == pytest.approx(-math.log(10 * len(items)))


@settings(max_examples=50)
@given(items_of)
def test_without_a_default_items_that_have_none_are_left_out(items):
    items = [(sid, 4.0 if number is None and sid[2] % 2 else number, text) for sid, number, text in items]
    vocab = vocab_of(items)
    given_ = declared(attributes={"mean": Attribute(of="number", as_="mean")})
    below = by_prefix(vocab, items)
    if any(all(number is None for _, number, _ in found) for found in below.values()):
        with pytest.raises(Rejected, match="say what then"):
            side_data(vocab, given_)
        return
    side = side_data(vocab, given_)
    for node, found in below.items():
        numbers = [number for _, number, _ in found if number is not None]
        assert column(side, "attr.mean")[node] == np.float32(math.fsum(numbers) / len(numbers))


def test_what_a_prefix_outside_the_catalogue_has():
    vocab = vocab_of([((0, 0, 0), 3.0, "war"), ((1, 0, 0), 1.0, "war")])
    lists = {"war": Items(of="genre", is_="war")}
    side = side_data(vocab, declared(attributes=ATTRIBUTES, lists=lists))
    assert math.isnan(column(side, "attr.most")[-1])
    assert math.isnan(column(side, "attr.rated")[-1])
    assert [column(side, key)[-1] for key in ("attr.good", "attr.genre", "blocked.war", "boosted.war")] == [
        False, -1, False, False,
    ]  # fmt: skip


def test_whole_numbers_are_summed_without_an_error():
    items = [((at % 3, at % 2, at % 4), 16_777_216.0 if at % 2 else 1.0, None) for at in range(24)]
    side = side_data(vocab_of(items), declared(attributes={"sum": Attribute(of="number", as_="sum")}))
    assert column(side, "attr.sum")[0] == np.float32(sum(int(number) for _, number, _ in items))


def test_a_catalogue_without_items_has_no_prefixes_to_say_anything_of():
    lists = {"war": Items(of="genre", is_="war")}
    given_ = declared(attributes=ATTRIBUTES, priors={"p": Prior(of="number")}, lists=lists)
    side = side_data(vocab_of([]), given_)
    assert {len(one.nodes) for one in side.columns.values()} == {2}
    assert side.columns["attr.most"].low == -math.inf


@pytest.mark.parametrize(
    ("tables", "code", "words"),
    [
        ({"attributes": {"x": Attribute(of="numbr", as_="max")}}, "no_such_attribute", "did you mean `number`?"),
        ({"attributes": {"x": Attribute(of="stock", as_="any")}}, "no_such_attribute", "it has genre, number"),
        ({"attributes": {"x": Attribute(of="genre", as_="mean")}}, "attribute_type", "`genre` is a text; mean is of"),
        ({"attributes": {"x": Attribute(of="number", as_="same")}}, "attribute_type", "`number` is a number; same is"),
        ({"attributes": {"x": Attribute(of="genre", as_="any", least=1)}}, "attribute_type", "`least` and `most` are"),
        ({"attributes": {"x": Attribute(of="number", as_="any", is_="1")}}, "attribute_type", "`is` is for texts"),
        ({"attributes": {"x": Attribute(of="number", as_="max")}}, "attribute_absent", "item 'i1' has no `number`"),
        ({"priors": {"x": Prior(of="genre")}}, "attribute_type", "`genre` is a text; prior is of numbers"),
        ({"priors": {"x": Prior(of="number")}}, "attribute_range", "item 'i0' has a `number` below 0"),
        ({"lists": {"x": Items(of="ads")}}, "no_such_attribute", "the catalogue has no attribute `ads`"),
    ],
)
def test_what_the_catalogue_cannot_give_is_refused_with_its_place(tables, code, words):
    vocab = vocab_of([((0, 0, 0), -1.0, "war"), ((0, 0, 1), None, None)])
    with pytest.raises(Rejected) as refused:
        side_data(vocab, declared(**tables))
    assert refused.value.code == code
    assert words in refused.value.message
    assert refused.value.location == f"deployment.toml: {next(iter(tables))}.x"


def test_everything_that_is_wrong_is_said_at_once():
    given_ = declared(
        attributes={"a": Attribute(of="nope", as_="max"), "b": Attribute(of="genre", as_="sum")},
        lists={"c": Items(of="genre", least=1)},
    )
    with pytest.raises(Rejected) as refused:
        side_data(vocab_of([((0, 0, 0), 1.0, "war")]), given_)
    places = [one.location for one in (refused.value, *refused.value.others)]
    assert places == [f"deployment.toml: {place}" for place in ("attributes.a", "attributes.b", "lists.c")]


def test_weights_that_are_all_zero_and_sums_that_no_float32_holds_are_refused():
    with pytest.raises(Rejected, match="nothing to have a share of"):
        side_data(vocab_of([((0, 0, 0), 0.0, None)]), declared(priors={"p": Prior(of="number")}))
    huge = [((0, 0, at), 3e38, None) for at in range(2)]
    with pytest.raises(Rejected, match="beyond what a float32 holds"):
        side_data(vocab_of(huge), declared(attributes={"s": Attribute(of="number", as_="sum")}))
