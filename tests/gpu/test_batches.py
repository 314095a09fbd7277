"""Batches of mixed requests through the step loop on a GPU: both transitions, against a CPU."""

from __future__ import annotations

import io

import msgspec
import pytest
import torch

from app.config import parse
from app.ops.attention import launch
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from tests import support
from tests.gpu.alike import POLICIES, PRECISIONS, USERS, K, assert_alike, root_of


def batch(root, device, transition):
    """The answers to every user under every policy, in one batch, by (user, policy)."""
    deployment = msgspec.structs.replace(parse((root / "deployment.toml").read_text()), device=device)
    loaded = load_root(root, deployment, make_log(io.BytesIO()))
    assert loaded.reasons == () and loaded.snapshot is not None
    snapshot = loaded.snapshot
    asked = [(user, policy) for user in USERS for policy in POLICIES]
    jobs = [
        support.job_of(
            snapshot, deployment, user["history"][: 5 + 9 * n], policy=policy, k=K, exclude=user["history"][:n]
        )
        for n, (user, policy) in enumerate(asked)
    ]
    ranked = support.run_batch(jobs, transition)
    return {
        (user["id"], policy): [
            (snapshot.vocab.id(item), float(score)) for item, score in zip(one.items, one.scores, strict=True)
        ]
        for (user, policy), one in zip(asked, ranked, strict=True)
    }


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return batch(root_of(tmp_path_factory.mktemp("cpu"), "float32"), "cpu", "ancestry")


@pytest.mark.parametrize("transition", ["ancestry", "compaction"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_batch_on_a_gpu_answers_as_on_a_cpu(precision, transition, on_cpu, tmp_path, monkeypatch):
    launches = []
    right = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *x, **how: launches.append(how["compact"]) or right(*x, **how))
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_alike(batch(root_of(tmp_path, precision), "cuda", transition), on_cpu, precision)
    assert set(launches) == (set() if precision == "float32" else {transition == "compaction"})
