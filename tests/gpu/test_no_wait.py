"""Whatever policy and model, a batch is launched without a wait for the GPU, and answers as it does otherwise."""

from __future__ import annotations

import io
import time

import msgspec
import pytest
import torch

from app.config import parse
from app.errors import WidebeamError
from app.ops import cuda
from app.policies import groups, quota
from app.runtime import engine_artifact
from app.runtime.job import Batch
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.steps import StepLoop
from tests import support
from tests.gpu.alike import REPOSITORY, USERS, K, root_of
from tests.gpu.test_graphs import launched_without_a_wait, token_batches

COOKBOOK = REPOSITORY / "docs" / "policies" / "cookbook"
RECIPES = [path.stem for path in sorted(COOKBOOK.glob("*.yaml")) if "head." not in path.read_text()]
"""Those that the demo's model can serve: it has no outputs but logits."""
HEAD = "widebeam: 1\nextends: unseen\nsteps:\n  last:\n    "
OWN = {
    "code": "quota: ['cap(token[3], max=8)']",
    "codes": "quota: ['cap(token[3], max=1)']",
    "every_code": "mask: not seen\n    quota: ['cap(token[3], max=1)']",
    "prefix": "quota: ['cap(prefix[2], max=2)', 'cap(token[1], max=24)']",
    "category": "quota: ['cap(attr.category, max=9)']",
    "flag": "quota: ['cap(attr.cold, max=1)']",
    "floors": "quota: ['floor(attr.cold, min=20)', 'floor(boosted.old, min=20)', 'cap(parent, max=2)']",
    "pruned": "prune:\n      - within_parent(2)\n    quota: ['cap(token[3], max=4)']",
}
BY_KERNEL = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHIPPED = ("base", "narrow", "unseen", "rising", "rewatch")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The demo's root with all of them, on a GPU; batches without a wait are prepared as a server prepares them."""
    root = root_of(tmp_path_factory.mktemp("root"), "bfloat16")
    for name in RECIPES:
        (root / "policies" / f"{name}.yaml").write_text((COOKBOOK / f"{name}.yaml").read_text())
    for name, text in OWN.items():
        (root / "policies" / f"{name}.yaml").write_text(HEAD + text + "\n")
    deployment = msgspec.structs.replace(parse((root / "deployment.toml").read_text()), device="cuda")
    loaded = load_root(root, deployment, make_log(io.BytesIO()))
    assert loaded.reasons == () and loaded.snapshot is not None
    loop = StepLoop(time.monotonic, Metrics())
    loop.prepare(loaded.snapshot)
    return deployment, loaded.snapshot, loop


def asked(world, name):
    """The policy beside another, whose rows lie between its own."""
    deployment, snapshot, _ = world
    assert snapshot.plan(name) is not None, f"{name} is not served"
    return [
        support.job_of(
            snapshot, deployment, user["history"][: 5 + 9 * n], policy=policy, k=K, request_id=f"{n} {at}",
            exclude=user["history"][:n],
        )
        for n, user in enumerate(USERS)
        for at, policy in enumerate((name, "base"))
    ]  # fmt: skip


def answers(snapshot, served):
    for end in served:
        assert not isinstance(end.result, WidebeamError), end.result.__cause__
    return {
        end.job.request.request_id: (snapshot.vocab.ids(end.result.items), end.result.scores.tolist()) for end in served
    }


def check(world, name):
    _, snapshot, loop = world
    jobs = asked(world, name)
    expected = answers(snapshot, loop.serve(Batch(tuple(jobs))))
    assert len(expected) == len(jobs)
    assert answers(snapshot, launched_without_a_wait(loop, jobs)) == expected


@pytest.mark.parametrize("name", [*SHIPPED, *RECIPES, *OWN])
def test_a_batch_is_launched_without_a_wait_by_its_program(world, name):
    check(world, name)


@pytest.mark.parametrize("line", [0, 10**9])
@pytest.mark.parametrize("name", OWN)
def test_whichever_way_a_quota_takes(world, name, line, monkeypatch):
    _, snapshot, loop = world
    jobs = asked(world, name)
    expected = answers(snapshot, loop.serve(Batch(tuple(jobs))))
    monkeypatch.setattr(quota, "LINE", line)
    monkeypatch.setattr(quota, "LOOK", 1)
    monkeypatch.setattr(groups, "MOST_PREFIXES", 1)
    assert answers(snapshot, launched_without_a_wait(loop, jobs)) == expected


@pytest.mark.parametrize("name", ["rewatch", "v10_min_p", "v37_stochastic", "v38_noisy_ranks"])
def test_a_batch_is_launched_without_a_wait_by_the_kernels(world, name):
    _, snapshot, _ = world
    device = torch.device("cuda:0")
    plans = (snapshot.plan(name),)
    cuda.ready(engine_artifact.of_plans(snapshot.contract, cuda.architecture(device), plans), device)
    check(world, name)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3", {}), ("qwen3_5", {}), ("qwen3_5", BY_KERNEL)], ids=["qwen3", "qwen3_5", "kernel"]
)
def test_prompts_are_launched_without_a_wait(kind, changes, captured, tmp_path):
    """changes: heads as the replay's kernel takes them; others' replay is torch's operators."""
    snapshot, batches = token_batches(kind, tmp_path, torch.device("cuda"), **changes)
    loop = StepLoop(time.monotonic, Metrics(), **({} if captured else {"recorder": lambda _: None}))
    assert loop.prepare(snapshot).refused is None
    for batch in batches:
        expected = [end.result.items.tolist() for end in loop.serve(batch)]
        assert [end.result.items.tolist() for end in launched_without_a_wait(loop, batch.jobs)] == expected
