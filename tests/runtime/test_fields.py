from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config import RequestFields, UserField
from app.core import HistoryIds, Request
from app.errors import InvalidRequest
from app.policies.compile import compile_policy
from app.policies.plan import Asks, Condition
from app.policies.source import Source
from app.runtime.admission import Admission
from app.runtime.contract import make_parts
from app.runtime.fields import FieldTable, fields_of, final_fields, made_up
from app.runtime.snapshot import Snapshot
from tests import support

SIZES = (4, 5, 6)
DECLARED = RequestFields(
    user={"age": UserField(default=3.0, low=0.0, high=10.0), "taste": UserField()},
    ctx={"country": ("BR", "MX"), "device": ()},
)
HEAD = "widebeam: 1\nwidths: [3, 5, 8]\nsteps:\n  all:\n    normalize: valid\n"
POLICIES = {
    "age": HEAD + "    rank: score + 0.3 * user.age * sibling\n",
    "country": HEAD + '    rank: score + where(ctx.country in ["BR", "MX"], 0.5 * sibling, 0 * sibling)\n',
    "not_br": HEAD + '    rank: score + where(ctx.country != "BR", 0.5 * sibling, 0 * sibling)\n',
    "logits": HEAD + "    logits: logit / (1 + user.age)\n",
    "listed": 'widebeam: 1\nfinal:\n  mask: position > user.age or ctx.device == "tv"\n  score: score - user.age\n',
    "masked": HEAD + '    mask: trie and (ctx.device == "tv" or not seen) and user.age < 9\n',
    "taste": HEAD + "    rank: score + user.taste * sibling\n",
}


def world() -> tuple[Snapshot, object]:
    deployment = msgspec.structs.replace(support.deployment_of(SIZES), request=DECLARED)
    engine = support.onerec_engine(SIZES, deployment.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 60), SIZES)
    return support.snapshot_of(engine, vocab, deployment, POLICIES), deployment


def plainly(text: str) -> list[object]:
    """The same search under a policy with the values written in the place of the fields."""
    deployment = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, deployment.limits)
    snapshot = support.snapshot_of(
        engine, support.catalogue(support.random_sids(SIZES, 60), SIZES), deployment, {"plain": text}
    )
    [ranked] = support.run_batch([support.job_of(snapshot, deployment, ("i3",), k=40, policy="plain")])
    return [ranked.items.tolist(), ranked.scores.tolist()]


def request(**fields) -> Request:
    return Request(request_id="r", context=HistoryIds(()), k=5, **fields)


ASKS = Asks(("age", "taste"), {'ctx.country == "BR"': Condition("country", frozenset({"BR"}), different=False)})


def test_a_request_brings_its_values_and_what_is_missing_has_its_declared_default():
    got = fields_of(request(user={"taste": 0.5}, ctx={"country": "BR"}), "p", ASKS, DECLARED)
    assert got == {"user.age": 3.0, "user.taste": 0.5, 'ctx.country == "BR"': 1.0}
    got = fields_of(request(user={"taste": 0.5, "age": 7}), "p", ASKS, DECLARED)
    assert got == {"user.age": 7, "user.taste": 0.5, 'ctx.country == "BR"': 0.0}


@pytest.mark.parametrize(
    ("user", "path", "words"),
    [
        ({}, "$.user.taste", "policy `p` reads it, and it has no default"),
        ({"taste": float("nan")}, "$.user.taste", "taste is nan"),
        ({"taste": float("inf")}, "$.user.taste", "taste is inf"),
        ({"taste": 1e31}, "$.user.taste", "taste is 1e+31"),
        ({"taste": 0.0, "age": 10.5}, "$.user.age", "age is 10.5; 0 to 10 are possible"),
        ({"taste": 0.0, "age": -1}, "$.user.age", "age is -1; 0 to 10 are possible"),
    ],
)
def test_a_number_that_is_missing_or_impossible_is_refused_with_its_path(user, path, words):
    with pytest.raises(InvalidRequest) as refused:
        fields_of(request(user=user), "p", ASKS, DECLARED)
    assert refused.value.path == path
    assert words in refused.value.message


def test_what_no_policy_reads_is_not_looked_at():
    assert fields_of(request(user={"age": 99, "taste": float("nan")}), "p", Asks(), DECLARED) == {}
    snapshot, deployment = world()
    support.job_of(snapshot, deployment, policy="age")  # `taste` is missing, and only the policy `taste` reads it
    with pytest.raises(InvalidRequest, match="policy `taste` reads it"):
        support.job_of(snapshot, deployment, policy="taste")


@given(st.sampled_from([None, "BR", "MX", "", "br"]), st.booleans())
def test_an_absent_text_equals_nothing_and_each_condition_is_true_or_its_negation_is(country, different):
    ctx = {} if country is None else {"country": country}
    among = Condition("country", frozenset({"BR", "MX"}), different=different)
    assert among.holds(ctx) is ((country in ("BR", "MX")) != different)
    assert among.holds(ctx) is not among._replace(different=not different).holds(ctx)


def test_made_up_values_are_within_what_is_declared():
    declared = RequestFields(user={"a": UserField(low=2.0), "b": UserField(high=-1.0), "c": UserField(default=5.0)})
    assert made_up(Asks(("a", "b", "c")), declared) == {"user.a": 2.0, "user.b": -1.0, "user.c": 5.0}


def test_rows_get_the_values_of_their_request():
    table = FieldTable([{"user.a": 1.5}, {}, {"user.a": -2.0, 'ctx.x == "y"': 1.0}], torch.device("cpu"))
    columns = table.columns({"user.a", 'ctx.x == "y"', "head.q", "request"}, torch.tensor([2, 0, 1, 2]))
    assert columns["user.a"].tolist() == [-2.0, 1.5, 0.0, -2.0]
    assert columns['ctx.x == "y"'].tolist() == [True, False, False, True]
    assert columns.keys() == {"user.a", 'ctx.x == "y"'}
    assert final_fields({"user.a": 0.1}, {"user.a", "item.x"})["user.a"] == np.float32(0.1)


@pytest.mark.parametrize(
    ("policy", "fields", "text"),
    [
        ("age", {"user": {"age": 7}}, HEAD + "    rank: score + 0.3 * 7 * sibling\n"),
        ("age", {}, HEAD + "    rank: score + 0.3 * 3 * sibling\n"),
        ("country", {"ctx": {"country": "MX"}}, HEAD + "    rank: score + 0.5 * sibling\n"),
        ("country", {"ctx": {"country": "DE"}}, HEAD + "    rank: score + 0 * sibling\n"),
        ("country", {}, HEAD + "    rank: score + 0 * sibling\n"),
        ("not_br", {}, HEAD + "    rank: score + 0.5 * sibling\n"),
        ("not_br", {"ctx": {"country": "BR"}}, HEAD + "    rank: score + 0 * sibling\n"),
        ("logits", {"user": {"age": 1}}, HEAD + "    logits: logit / (1 + 1)\n"),
        ("masked", {}, HEAD + "    mask: trie and not seen\n"),
        ("masked", {"ctx": {"device": "tv"}}, HEAD + "    mask: trie\n"),
        ("masked", {"user": {"age": 9}}, HEAD + "    mask: trie and seen and not seen\n"),
        ("listed", {"user": {"age": 2}}, "widebeam: 1\nfinal: {mask: position > 2, score: score - 2}\n"),
        ("listed", {"user": {"age": 2}, "ctx": {"device": "tv"}}, "widebeam: 1\nfinal: {score: score - 2}\n"),
    ],
)
def test_a_policy_that_reads_fields_is_the_policy_with_their_values_written(policy, fields, text):
    snapshot, deployment = world()
    [ranked] = support.run_batch([support.job_of(snapshot, deployment, ("i3",), k=40, policy=policy, **fields)])
    assert [ranked.items.tolist(), ranked.scores.tolist()] == plainly(text)


def test_each_request_of_a_batch_has_its_own_values():
    snapshot, deployment = world()
    asked = [
        {"policy": "age", "user": {"age": 0}},
        {"policy": "country", "ctx": {"country": "BR"}},
        {"policy": "age", "user": {"age": 9}},
        {"policy": "base"},
        {"policy": "listed", "user": {"age": 4}},
        {"policy": "age"},
    ]
    jobs = [support.job_of(snapshot, deployment, ("i3",), k=40, **one) for one in asked]
    alone = [support.run_batch([job])[0].items.tolist() for job in jobs]
    assert [ranked.items.tolist() for ranked in support.run_batch(jobs)] == alone
    assert len({tuple(items) for items in alone}) == len(alone)  # and the values matter


def test_names_that_are_not_declared_and_values_that_are_not_are_errors_with_a_suggestion():
    snapshot, _ = world()
    text = 'widebeam: 1\nsteps:\n  all:\n    rank: score + user.agee\n    mask: trie and ctx.country == "BX"\n'
    text += '  2:\n    mask: ctx.device == "anything" and ctx.devic == "tv"\n'
    plan, found = compile_policy("p", {"p": Source("p.yaml", text.encode())}, snapshot.contract)
    assert plan is None
    assert [(one.rule.code, one.span.line, one.span.col, one.help) for one in found] == [
        ("T002", 4, 24, "did you mean `age`?"),
        ("T002", 5, 35, "values: `BR`, `MX`"),
        ("T002", 7, 44, "did you mean `device`?"),
    ]
    two = "widebeam: 1\nsteps: {all: {mask: ctx.country == ctx.device}}\n"
    _, found = compile_policy("p", {"p": Source("p.yaml", two.encode())}, snapshot.contract)
    assert [one.rule.code for one in found] == ["T011"]


def test_declared_fields_are_part_of_the_contract_and_a_deployment_without_keeps_its_id():
    bare = support.deployment_of(SIZES)
    engine = support.onerec_engine(SIZES, bare.limits)
    vocab = support.catalogue(support.random_sids(SIZES, 60), SIZES)
    ids = {
        support.snapshot_of(engine, vocab, msgspec.structs.replace(bare, request=one)).contract.id
        for one in (
            RequestFields(),
            DECLARED,
            RequestFields(ctx={"country": ()}),
            RequestFields(ctx={"country": ("BR",)}),
        )
    }
    assert len(ids) == 4
    assert "request" not in make_parts(engine, {}, bare, "float32", (), ())


def test_an_admission_refuses_only_what_the_policy_of_the_request_reads():
    snapshot, deployment = world()
    admission = Admission(deployment)
    asked = request(policy="age", user={"age": 99})
    with pytest.raises(InvalidRequest, match="age is 99"):
        admission.admit(asked, admission.choose(asked, snapshot), snapshot)
