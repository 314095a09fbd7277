"""Policies whose expressions the kernels compute, through the step loop: the answers are those of their programs."""

from __future__ import annotations

import io

import msgspec
import pytest
import torch

from app.config import parse
from app.ops import cuda
from app.runtime import engine_artifact, selection
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from tests import support
from tests.gpu.alike import USERS, K, assert_alike, root_of

HEAD = "widebeam: 1\nextends: unseen\nsteps:\n  all:\n"
POLICIES = {
    "bent": "    rank: where(logp > -4, score, 2 * score) - width / 1000\n",
    "weighted": "    score: parent + 0.8 * logp\n",
    "likely": "    keep:\n      - min_p(0.01)\n",
    "popular": "    rank: score - 0.4 * prior.popularity\n",
    "some": "    keep:\n      - top_k(20)\n    rank: score - 0.1 * prior.popularity\n",
    "noisy": "    rank: score + 0.3 * gumbel - 0.1 * uniform\n",
    "drawn": "    normalize: valid\n    select: stochastic()\n",
    "every code": "    mask: not seen\n    rank: score - where(seen, 3, 0) + 0.1 * prob\n",
}


def answers(snapshot, deployment):
    names = [name.replace(" ", "_") for name in POLICIES]
    asked = [(user, name) for user in USERS for name in (*names, "rewatch")]
    jobs = [
        support.job_of(snapshot, deployment, user["history"][: 5 + 9 * n], policy=name, k=K)
        for n, (user, name) in enumerate(asked)
    ]
    return {
        (user["id"], name): [
            (snapshot.vocab.id(item), float(score)) for item, score in zip(one.items, one.scores, strict=True)
        ]
        for (user, name), one in zip(asked, support.run_batch(jobs), strict=True)
    }


@pytest.fixture
def root(tmp_path):
    directory = root_of(tmp_path, "bfloat16")
    for name, text in POLICIES.items():
        (directory / "policies" / f"{name.replace(' ', '_')}.yaml").write_text(HEAD + text)
    return directory


def test_answers_by_expressions_in_the_kernels_are_those_of_the_programs(root, monkeypatch):
    deployment = msgspec.structs.replace(parse((root / "deployment.toml").read_text()), device="cuda")
    loaded = load_root(root, deployment, make_log(io.BytesIO()))
    assert loaded.reasons == () and loaded.snapshot is not None
    snapshot, called = loaded.snapshot, []
    original = selection.select_ranked

    def counted(*given, **named):
        called.append(named["ranked"].definitions)
        return original(*given, **named)

    monkeypatch.setattr(selection, "select_ranked", counted)
    monkeypatch.setattr(cuda, "_MODULES", type(cuda._MODULES)())  # other tests of this process have compiled, too
    programs = answers(snapshot, deployment)
    assert called == []  # nothing compiles while requests wait
    device = torch.device("cuda:0")
    plans = tuple(snapshot.policies.plans())
    cuda.ready(engine_artifact.of_plans(snapshot.contract, cuda.architecture(device), plans), device)
    before = cuda.compilations()
    assert_alike(answers(snapshot, deployment), programs, "bfloat16")
    assert len(set(called)) >= len(POLICIES)
    assert cuda.compilations() == before
