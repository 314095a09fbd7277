"""A compiled engine as NVRTC makes it, and a server that takes every one of its kernels (`make test-kernels`)."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.ops.cuda import Build
from tests import support
from tests.gpu_stand_in import StandIn
from tests.live_support import live_server

POLICY = "widebeam: 1\nsteps:\n  all:\n    {}\n"
LINES = {"weighted": "score: parent + 0.5 * logp", "likely": "keep:\n      - min_p(0.01)"}
EDITED = "rank: score - 0.1 * prob"


def build(root, *more):
    done = CliRunner().invoke(app, ["engine", "build", "--root", str(root), "--json", *map(str, more)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def compiled(monkeypatch):
    """What NVRTC has compiled."""
    found, real = [], Build.compiled
    monkeypatch.setattr(Build, "compiled", lambda one, arch: found.append(one) or real(one, arch))
    return found


@pytest.mark.timeout(900)
async def test_a_server_compiles_nothing_at_its_start_nor_for_an_edit_that_a_later_engine_knows(
    tmp_path, compiled, monkeypatch
):
    policies = {name: POLICY.format(line) for name, line in LINES.items()}
    root = support.write_root(
        tmp_path / "root", (8, 8, 8), policies=policies, extra='precision = "bfloat16"',
        limits="rows = 64\nbatch = 1\ncontext = 8",
    )  # fmt: skip
    made = build(root)
    assert made["made"]
    assert set(made["policies"]) == set(LINES)
    assert len(compiled) == made["modules"]
    gpu = StandIn(monkeypatch)
    async with live_server(root) as server:
        engine = (await server.status())["engine"]
        assert (engine["artifact"], engine["compilations"]) == (made["engine"], 0)
        assert {name: shown["from_artifacts"] for name, shown in engine["policies"].items()} == made["policies"]
        assert len(gpu.loaded) == made["modules"]
        assert {cubin[:4] for cubin in gpu.loaded.values()} == {b"\x7fELF"}
        for one, cubin in gpu.loaded.items():
            if one.given:  # each part of chunk.cu has its own entry
                assert (b"rank_scan" if dict(one.define)["PART"] == 2 else b"tail") in cubin
        compiled.clear()
        (tmp_path / "next").mkdir()
        (tmp_path / "next" / "weighted.yaml").write_text(POLICY.format(EDITED))
        later = build(root, "--policies", tmp_path / "next")
        assert later["modules"] == made["modules"] + len(compiled)  # the others are taken over
        before = (await server.status())["policies"]["weighted"]["policy_id"]
        (tmp_path / "next" / "weighted.yaml").replace(root / "policies" / "weighted.yaml")
        status = await server.settles(lambda found: found["policies"]["weighted"]["policy_id"] != before)
        assert status["engine"]["compilations"] == gpu.compiled == 0
        assert status["engine"]["policies"]["weighted"]["from_artifacts"] == len(compiled)
        assert [line["engine"] for line in server.events("kernels_loaded")] == [made["engine"], later["engine"]]
