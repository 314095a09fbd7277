"""Servers on a GPU: with a compiled engine nothing is compiled, without one everything is, before the first request."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from app.cli.contract import contract_on_gpu
from app.errors import Rejected
from app.ops import cuda
from app.runtime import engine_artifact
from tests.gpu.alike import POLICIES, USERS, K, root_of
from tests.served.process import serving

COUNTER = "widebeam_kernel_compilations_total"
ASKED = (*POLICIES, "rewatch", "weighted")
"""The last two have kernels of their own."""


def widebeam(*arguments: object) -> dict:
    done = subprocess.run(  # noqa: PLW1510  the return code is looked at
        [sys.executable, "-m", "app", *map(str, arguments), "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked(server):
    """Answers under every policy, alone and many at once."""
    return [server.items(*user["history"], k=K, policy=policy) for user in USERS for policy in ASKED]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The demo, in bfloat16, with a policy more."""
    made = root_of(tmp_path_factory.mktemp("root"), "bfloat16")
    text = "widebeam: 1\nextends: base\nsteps:\n  all:\n    score: parent + 0.8 * logp\n"
    (made / "policies" / "weighted.yaml").write_text(text)
    return made


@pytest.fixture(scope="module")
def engine(root):
    found = widebeam("engine", "build", "--root", root)
    assert found["made"]
    assert set(found["policies"]) == {"rewatch", "weighted"}
    return found


def test_a_server_with_its_engine_compiles_nothing(root, engine):
    with serving(root, "--device", "cuda") as server:
        server.ready()
        asked(server)
        status = server.status()
        assert (status["engine"]["artifact"], status["engine"]["compilations"]) == (engine["engine"], 0)
        taken = {name: shown["from_artifacts"] for name, shown in status["engine"]["policies"].items()}
        assert taken == engine["policies"]
        assert server.metric(COUNTER) == 0
        [shown] = [one for one in status["artifacts"] if one["kind"] == "engine"]
        assert (shown["version"], shown["state"]) == (engine["engine"], "active")


def test_a_server_without_an_engine_compiles_before_it_is_ready_and_answers_the_same(root, engine, tmp_path):
    with serving(root, "--device", "cuda") as server:
        expected = asked(server.ready())
    alone = tmp_path / "alone"
    shutil.copytree(root, alone, ignore=shutil.ignore_patterns("engines", ".widebeam", "state"))
    with serving(alone, "--device", "cuda") as server:
        server.until(lambda: server.client.get("/readyz").status_code == 200, "ready", 240)
        made = server.metric(COUNTER)
        assert made == engine["modules"]
        assert asked(server) == expected
        assert server.metric(COUNTER) == made
        assert server.status()["engine"]["artifact"] is None


def test_a_policy_that_is_edited_after_the_build_is_compiled_beside_and_the_status_says_so(root, engine, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(root, live, ignore=shutil.ignore_patterns(".widebeam", "state"))
    with serving(live, "--device", "cuda") as server:
        server.ready()
        asked(server)
        text = (live / "policies" / "rewatch.yaml").read_text()
        edited = live / "policies" / ".rewatch.tmp"
        edited.write_text(text.replace("rank: score - where(", "rank: 2 * score - where("))
        assert edited.read_text() != text
        edited.replace(live / "policies" / "rewatch.yaml")

        def shown():
            return server.status()["engine"]["policies"]["rewatch"]

        server.until(lambda: shown()["compiled"], "compiled beside", 120)
        assert (shown()["from_artifacts"], shown()["missing"]) == (0, 0)
        assert server.metric(COUNTER) == shown()["compiled"]
        assert server.status()["engine"]["policies"]["weighted"]["compiled"] == 0
        assert [line["policies"] for line in server.said("kernels_compiled")] == [["rewatch"]]
        asked(server)
        assert server.metric(COUNTER) == shown()["compiled"]


def test_an_engine_of_another_compiler_is_refused_by_name_and_the_server_serves(root, engine, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(root, other, ignore=shutil.ignore_patterns(".widebeam", "state"))
    directory = other / "engines" / engine["engine"]
    arch = engine_artifact.read(directory).made_for.arch
    wanted = engine_artifact.of_contract(contract_on_gpu(other, None, None), arch)
    elsewhere = {**wanted.identity.versions, "nvrtc": "12.0"}
    changed = wanted._replace(identity=msgspec.structs.replace(wanted.identity, versions=elsewhere))
    shutil.rmtree(directory)
    refused = engine_artifact.build(other, changed, "a test").version
    with pytest.raises(Rejected, match=r"made for 12\.0"):
        engine_artifact.check(engine_artifact.read(other / "engines" / refused), wanted)
    with serving(other, "--device", "cuda") as server:
        server.until(lambda: server.client.get("/readyz").status_code == 200, "ready", 240)
        [shown] = [one for one in server.status()["artifacts"] if one["kind"] == "engine"]
        assert shown["state"] == "rejected"
        assert shown["reason"]["location"].endswith("made_for.versions.nvrtc")
        assert asked(server)


def test_a_binary_from_nvrtc_alone_is_loaded_and_runs():
    source = Path(cuda.__file__).parent / "trie" / "kernel.cu"
    device = torch.device("cuda", 0)
    build = cuda.Build.of(source, WIDE=0)
    assert cuda._binary(build.compiled(cuda.architecture(device)), 0).get_function("children").ptr
