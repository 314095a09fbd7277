from __future__ import annotations

import msgspec
import numpy as np

from app.config import Attribute, Items, Prior
from app.policies.compile import compile_policy
from app.policies.facts import Column
from app.policies.source import Source
from app.runtime.columns import MAX_LABELS, catalogue_of, item_columns
from app.runtime.contract import make_contract
from app.runtime.snapshot import ArtifactRef, DeviceTrie, Snapshot
from app.vocab.aggregates import side_data
from app.vocab.items import Numbers, Strings, Table, Texts
from app.vocab.vocab import make_vocab
from tests import support

SIZES = (4, 5, 6)
N = 40


def vocab():
    codes = np.arange(N, dtype=np.int32) % 3
    codes[7] = -1
    present = np.arange(N) % 5 != 0
    columns = {
        "studio": Texts(codes, Strings.of([b"a", b"b", "ü".encode()])),
        "stock": Numbers((np.arange(N) % 4).astype(np.float32), present),
        "title": Texts(np.arange(N, dtype=np.int32), Strings.of([f"t{at}".encode() for at in range(MAX_LABELS + 1)])),
        "bad name": Numbers(np.zeros(N, np.float32), present),
    }
    names = Strings.of([f"i{at}".encode() for at in range(N)])
    return make_vocab(Table(names, support.random_sids(SIZES, N), columns), SIZES, version="v1", digest="v1")


def snapshot(final: str):
    deployment, made = support.deployment_of(SIZES), vocab()
    engine = support.onerec_engine(SIZES, deployment.limits)
    contract = make_contract(engine, {}, deployment, "float32")
    text = f"widebeam: 1\n{final}"
    plan, found = compile_policy("base", {"base": Source("base.yaml", text.encode())}, contract, catalogue_of(made))
    if plan is None:
        return found
    ref = ArtifactRef("v1", "w" * 8, "now")
    trie = DeviceTrie.of(made, engine.device)
    return deployment, Snapshot("s1", contract, engine, ref, made, ref, trie, support.Policies({"base": plan}))


def served(final: str):
    deployment, snap = snapshot(final)
    (ranked,) = support.run_batch([support.job_of(snap, deployment, ("i3",), k=N)])
    return snap.vocab, ranked


def test_attributes_are_declared_by_the_names_that_expressions_can_spell():
    columns = {one.name: one for one in catalogue_of(vocab()).columns}
    assert sorted(columns) == ["stock", "studio", "title"]
    assert columns["studio"].labels == ("a", "b", "ü")
    assert columns["title"].labels == ()
    assert columns["stock"].form == "number"


def test_what_is_declared_of_prefixes_is_readable_of_items_unless_they_have_it_themselves():
    made = vocab()
    tables = {
        "stock": Attribute(of="stock", as_="max", default=9),
        "plenty": Attribute(of="stock", as_="any", least=2),
        "house": Attribute(of="studio", as_="same", from_=2),
    }
    deployment = support.deployment_of(SIZES)
    deployment = msgspec.structs.replace(
        deployment, attributes=tables, priors={"p": Prior(of="stock")}, lists={"a": Items(of="studio", is_="a")}
    )
    side = side_data(made, deployment)
    columns = {one.key: one for one in catalogue_of(made, side).columns}
    assert {key for key in columns if key.startswith("item.")} == {
        "item.stock", "item.studio", "item.title", "item.plenty", "item.house",
    }  # fmt: skip
    assert columns["attr.house"] == Column(
        "attr", "house", "text", first=2, labels=("a", "b", "ü"), aggregate="same",
        about="`studio` of all items below, unknown where they differ",
    )  # fmt: skip
    assert (columns["attr.stock"].low, columns["attr.stock"].high) == (0, 9)
    assert columns["prior.p"].high < 0
    assert [columns[key].form for key in ("item.plenty", "blocked.a", "boosted.a")] == ["condition"] * 3
    assert columns["attr.plenty"].about == "whether an item below is one of 16 items by `stock`"
    uses = {"item.stock", "item.plenty", "item.house", "blocked.a", "user.age", "item.id"}
    got = item_columns(made, uses, np.array([5, 7, 3]), side)
    assert np.isnan(got["item.stock"][0])  # the items' own, not the declared one with its default
    assert got["item.plenty"].tolist() == [False, True, True]
    assert got["item.house"].tolist() == [2, -1, 0]
    assert got["blocked.a"].tolist() == [False, False, True]
    assert set(got) == uses - {"user.age", "item.id"}


def test_absent_numbers_are_nan_and_absent_texts_are_no_label():
    made = vocab()
    got = item_columns(made, {"item.stock", "item.studio", "seen"}, np.array([5, 7]))
    assert np.isnan(got["item.stock"][0]) and got["item.stock"][1] == 3
    assert got["item.studio"].tolist() == [2, -1]


def test_a_mask_of_the_list_drops_items_and_absent_values_fit_no_comparison():
    made, ranked = served("final: {mask: 'item.stock > 1'}\n")
    stock = item_columns(made, {"item.stock"}, ranked.items)["item.stock"]
    assert len(ranked.items) == sum(at % 5 != 0 and at % 4 > 1 for at in range(N))
    assert (stock > 1).all()


def test_quotas_and_scores_of_the_list_read_the_items():
    made, ranked = served(
        'final:\n  score: score + where(item.studio == "ü", 100, 0)\n  quota:\n    - cap(item.studio, max=4)\n'
    )
    studio = item_columns(made, {"item.studio"}, ranked.items)["item.studio"]
    assert studio[:4].tolist() == [2] * 4
    assert sorted(np.bincount(studio + 1).tolist()) == [1, 4, 4, 4]
    assert (ranked.scores[:4] > 50).all()
    assert (np.diff(ranked.scores) <= 0).all()


def test_unknown_attributes_and_values_are_refused():
    assert [one.rule.code for one in snapshot("final: {mask: 'item.price > 1'}\n").errors] == ["T002"]
    assert [one.rule.code for one in snapshot("final: {mask: 'item.studio == \"c\"'}\n").errors] == ["T002"]
    assert [one.rule.code for one in snapshot("final: {mask: 'item.title in [\"t1\"]'}\n").errors] == ["T002"]
    assert not isinstance(snapshot("final: {dedupe: item.title}\n"), type(snapshot("final: {mask: 'item.x > 1'}\n")))
