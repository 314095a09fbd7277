"""What a contract says about memory, against what is allocated on a CPU."""

from __future__ import annotations

import json
import weakref
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.engine.families.base import ModelFiles
from app.engine.functions import Function, TensorFact
from app.engine.registry import family
from app.ops.selection import select_top
from app.runtime.contract import make_parts
from app.runtime.workspace import selection_bytes, workspace
from tests import support

SIZES = (6, 5, 4)
ALL_CODES = "widebeam: 1\nsteps:\n  all:\n    mask: not seen\n"
TIGHT = {"widths": (6, 30, 12), "batch": 8, "rows": 200}  # 8 x 30 rows would be more than there are
LOOSE = {"widths": (6, 30, 12), "batch": 4, "rows": 300}


def functions(dtype="float32"):
    """What an export of a onerec says about its logits."""
    facts = [(TensorFact("logits", dtype, ("rows", codes)),) for codes in SIZES]
    steps = [Function(f"step {t}", exported=True, outputs=outputs) for t, outputs in enumerate(facts, 1)]
    return (Function("encode", exported=True), *steps)


@pytest.mark.parametrize(("limits", "groups"), [(TIGHT, 1), (TIGHT, 2), (LOOSE, 1)])
def test_arena_and_logits_are_what_a_full_batch_allocates(limits, groups, monkeypatch):
    deployment = support.deployment_of(SIZES, **limits)
    engine = support.onerec_engine(SIZES, deployment.limits, self_groups=groups)
    vocab = support.catalogue(support.random_sids(SIZES, 40), SIZES)
    snapshot = support.snapshot_of(engine, vocab, deployment, {"p": ALL_CODES})
    says = workspace(engine.state_specs(), functions(), deployment.limits, SIZES)
    arena = engine.new_arena(deployment.limits)
    assert says["arena_bytes"] == sum(x.nbytes for x in arena.values())
    scope = {spec.name: spec.scope for spec in engine.state_specs()}
    assert says["request_bytes"] == sum(x[0].nbytes for name, x in arena.items() if scope[name] == "request")
    assert says["row_slot_bytes"] == sum(x[0, 0].nbytes for name, x in arena.items() if scope[name] == "row")
    made, step = [], engine.step

    def watched(*given):
        output = step(*given)
        made.append(output.logits.nbytes)
        return output

    monkeypatch.setattr(engine, "step", watched)
    jobs, rows = [], 0
    while len(jobs) < limits["batch"]:
        job = support.job_of(snapshot, deployment, ("i1",), policy="p", k=4)
        rows += max(job.planned)
        if rows > limits["rows"]:
            break
        jobs.append(job)
    support.run_batch(jobs)
    if limits is LOOSE:
        assert says["logits_bytes"] == max(made)
    else:  # no whole request more fits
        assert says["logits_bytes"] - 4 * 30 * max(SIZES) < max(made) <= says["logits_bytes"]


class Held(TorchDispatchMode):
    """peak: the most bytes that were held at once of what operators made; `given` was there before."""

    def __init__(self, *given):
        super().__init__()
        self.peak, self._now, self._known = 0, 0, {one.untyped_storage()._cdata for one in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._known:
                storage = one.untyped_storage()
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key, size):
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize(
    ("rows", "codes", "keep"),
    [
        ([64] * 8, 256, 64),
        ([64] * 7 + [63], 256, 64),
        ([128] * 7 + [127], 512, 250),
        ([128] * 8, 512, 512),
        ([1] * 8, 512, 512),
        ([64] * 8, 64, 512),
    ],
)
def test_selection_takes_no_more_than_the_contract_says_and_not_much_less(rows, codes, keep):
    rank, code = torch.randn(sum(rows), codes), torch.arange(codes).expand(sum(rows), codes)
    rank[:, 0] = 9.0  # the best of every row are equal, so their order takes keys: the most that it can take
    order = torch.cat([torch.arange(width) for width in rows])
    with Held(rank, code, order) as held:
        select_top(rank, code, order, codes, [0, *accumulate(rows)], [keep] * len(rows))
    says = selection_bytes(sum(rows), keep * len(rows), codes, keep)
    assert 0.75 * says < held.peak <= says


def test_what_nobody_knows_is_not_made_up():
    deployment = support.deployment_of(SIZES)
    states = support.onerec_engine(SIZES, deployment.limits).state_specs()
    half = workspace(states, functions("bfloat16"), deployment.limits, SIZES)
    whole = workspace(states, functions(), deployment.limits, SIZES)
    assert whole["logits_bytes"] == 2 * half["logits_bytes"]
    assert workspace(states, functions()[:-1], deployment.limits, SIZES)["logits_bytes"] is None
    assert workspace(states, (), deployment.limits, SIZES)["logits_bytes"] is None


@pytest.mark.parametrize(("groups", "row"), [(1, 2 * 2 * 1 * 8 * 4), (2, 2 * (2 + 2 * 2) * 8 * 4)])
def test_a_contract_says_what_of_a_row_slot_later_steps_read_where_that_is_not_all(groups, row):
    deployment = support.deployment_of(SIZES)
    config = support.onerec_config(SIZES, self_groups=groups)
    model = family("onerec").build(ModelFiles(config, Path(), {}), deployment.sid, deployment.limits, torch.float32)
    parts = json.loads(msgspec.json.encode(make_parts(model, config, deployment, "float32", (), ())))
    assert parts["workspace"]["row_slot_bytes"] == row
    said = {state["name"]: state.get("first") for state in parts["states"]}
    names = ["k.0", "v.0", "k.1", "v.1"] if groups == 1 else ["qkv.0", "qkv.1"]
    assert said == {"cross_length": None, "cross_k.0": None, **dict.fromkeys(names, 2 if groups == 2 else None)}


def test_a_contract_names_the_three_tables_of_columns():
    deployment = support.deployment_of(SIZES)
    declared = {"attributes": {"fresh": {"of": "year", "as": "max"}}, "lists": {"ads": {"of": "is_ad"}}}
    deployment = msgspec.convert(msgspec.to_builtins(deployment) | declared, type(deployment))
    config = support.onerec_config(SIZES)
    model = family("onerec").build(ModelFiles(config, Path(), {}), deployment.sid, deployment.limits, torch.float32)
    parts = json.loads(msgspec.json.encode(make_parts(model, config, deployment, "float32", (), ())))
    assert {name: list(columns) for name, columns in parts["columns"].items()} == {
        "attributes": ["fresh"], "priors": [], "lists": ["ads"],
    }  # fmt: skip
