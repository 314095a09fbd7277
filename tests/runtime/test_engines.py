"""Servers that take compiled engines, or refuse them and compile. A stand-in for the GPU loads; nothing is compiled."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from io import BytesIO

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from app.cli.contract import contract_on_gpu
from app.cli.main import app
from app.errors import Rejected
from app.policies.compile import compile_policy
from app.policies.facts import Catalogue, Column
from app.policies.source import Source
from app.runtime import engine_artifact, engines
from app.runtime.engines import Engines
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.vocab.manifest import FILE as MANIFEST
from tests import support
from tests.gpu_stand_in import VERSIONS, StandIn, cubin_of, without_compiler
from tests.live_support import live_server

CPU = torch.device("cpu")
WEIGHTED, DOUBLED, BY_RANKS = "score: parent + 0.5 * logp", "rank: score * 2", "rank: score - sibling"
POLICY = "widebeam: 1\nsteps:\n  all:\n    {}\n"


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Of a small root on a GPU."""
    root = support.write_root(tmp_path_factory.mktemp("root"))
    with support.without_exports():
        return contract_on_gpu(root, None, None)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    without_compiler(monkeypatch)
    return StandIn(monkeypatch)


def plan(contract, line, name="feed"):
    return support.plan_of(contract, POLICY.format(line), name=name)


def built(root, contract, *plans, arch="sm_90"):
    engine = engine_artifact.of_contract(contract, arch, plans)
    return engine_artifact.build(root, engine, "a test").directory


class Server:
    """What a process does with the engines of a root."""

    def __init__(self, root):
        self._stream = BytesIO()
        self._metrics = Metrics()
        self.engines = Engines(root, self._metrics, make_log(self._stream, "info"))

    def starts(self, contract, *plans):
        for _ in range(2):  # the second time is nothing
            self.engines.prepare(contract, CPU)
            self.engines.prepare_plans(contract, CPU, plans)
        return self.log

    @property
    def log(self):
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]

    @property
    def counted(self):
        """Modules that were compiled beside requests."""
        return self._metrics.registry.get_sample_value("widebeam_compiles_total", {"where": "background"})

    @property
    def events(self):
        return [line["event"] for line in self.log]

    @property
    def states(self):
        return {one["version"]: one["state"] for one in self.engines.documents()}

    def shown(self, contract, *plans):
        """The status's `engine` where these are active."""
        policies = support.Policies({one.policy: one for one in plans})
        engine = type("Active", (), {"device": CPU})
        return self.engines.document(type("Active", (), {"contract": contract, "engine": engine, "policies": policies}))


def flip(directory, pattern):
    """Change one bit of a file."""
    file = next(directory.glob(pattern))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    return file


# ---- the contract's ---------------------------------------------------------------------------------------------


def test_a_server_takes_its_engine_and_compiles_nothing(contract, tmp_path, gpu):
    directory, server = built(tmp_path, contract), Server(tmp_path)
    server.starts(contract)
    assert server.events == ["engine_loaded"]
    assert gpu.loaded == {one: cubin_of(one, "sm_90") for one in engine_artifact.of_contract(contract, "sm_90").builds}
    assert server.shown(contract) == {"artifact": directory.name, "compilations": 0, "policies": {}}
    [shown] = server.engines.documents()
    assert (shown["kind"], shown["version"], shown["state"]) == ("engine", directory.name, "active")


def test_without_an_engine_everything_is_compiled_before_the_first_batch(contract, tmp_path, gpu):
    server = Server(tmp_path)
    server.starts(contract)
    assert server.events == ["kernels_compiled"]
    assert set(gpu.loaded) == set(engine_artifact.of_contract(contract, "sm_90").builds)
    assert server.shown(contract) == {"artifact": None, "compilations": len(gpu.loaded), "policies": {}}
    assert server.counted == len(gpu.loaded)
    assert server.engines.documents() == []


def test_a_server_says_what_torch_computes_although_there_are_kernels(contract, tmp_path, gpu):
    server = Server(tmp_path)
    gpu.arch = "sm_80"
    assert server.engines.left_to_torch(contract, CPU)["context attention"].startswith("sm_80")
    gpu.unfit = "CuPy is not installed"
    assert server.engines.left_to_torch(contract, CPU) == {}


@pytest.mark.parametrize("package", sorted(VERSIONS))
def test_an_engine_made_with_another_version_is_refused_with_the_field_and_both_values(
    package, contract, tmp_path, gpu, monkeypatch
):
    directory, server = built(tmp_path, contract, plan(contract, WEIGHTED)), Server(tmp_path)
    monkeypatch.setattr(engine_artifact, "versions", lambda: {**VERSIONS, package: "99.1"})
    server.starts(contract, plan(contract, WEIGHTED))
    assert server.events == ["artifact_rejected", "kernels_compiled", "kernels_compiled"]  # and it is said once
    [shown] = server.engines.documents()
    assert shown["state"] == "rejected"
    assert shown["reason"] == {
        "code": "engine_mismatch",
        "message": f"made for {VERSIONS[package]}, here it is 99.1",
        "location": f"engines/{directory.name}/engine.json: made_for.versions.{package}",
    }
    assert set(gpu.loaded.values()) == {b""}


def test_an_engine_of_another_architecture_contract_or_source_is_refused_with_every_difference(contract, tmp_path):
    built(tmp_path, contract, arch="sm_80")
    wanted = replace(contract, id="0" * 12, limits=msgspec.structs.replace(contract.limits, batch=8))
    server = Server(tmp_path)
    log = server.starts(wanted)
    assert server.events == ["artifact_rejected", "kernels_compiled"]
    found = [log[0], *log[0]["others"]]
    places = {one["location"].partition("made_for.")[2]: one["message"] for one in found}
    assert places["arch"] == "made for sm_80, here it is sm_90"
    assert places["contract"] == f"made for {contract.id}, here it is 000000000000"
    assert any(place.startswith("plan") for place in places)


def test_engines_of_every_architecture_may_lie_beside_each_other(contract, tmp_path, gpu):
    names = {arch: built(tmp_path, contract, plan(contract, WEIGHTED), arch=arch).name for arch in ("sm_80", "sm_90")}
    server = Server(tmp_path)
    server.starts(contract, plan(contract, WEIGHTED))
    assert server.shown(contract)["artifact"] == names["sm_90"]
    assert gpu.compiled == 0
    assert {cubin[:5] for cubin in gpu.loaded.values()} == {b"sm_90"}


@pytest.mark.parametrize("pattern", ["attention-*.cubin", "selection-chunk-*.cubin", "engine.json"])
def test_a_changed_byte_refuses_an_engine_and_the_kernels_are_compiled(pattern, contract, tmp_path, gpu):
    directory, server = built(tmp_path, contract), Server(tmp_path)
    file = flip(directory, pattern)
    log = server.starts(contract)
    assert server.events == ["artifact_rejected", "kernels_compiled"]
    assert (log[0]["code"], log[0]["location"]) == ("file_digest", f"engines/{directory.name}/{file.name}")
    assert server.shown(contract)["artifact"] is None
    assert set(gpu.loaded.values()) == {b""}


@pytest.mark.parametrize("pattern", ["attention-*.cubin", "engine.json", MANIFEST])
def test_a_file_that_is_cut_refuses_an_engine_and_the_kernels_are_compiled(pattern, contract, tmp_path, gpu):
    directory, server = built(tmp_path, contract), Server(tmp_path)
    file = next(directory.glob(pattern))
    file.write_bytes(file.read_bytes()[:-9])
    log = server.starts(contract)
    assert server.events == ["artifact_rejected", "kernels_compiled"]
    assert log[0]["location"] == f"engines/{directory.name}/{file.name}"
    assert set(gpu.loaded.values()) == {b""}


def test_an_engine_that_is_still_being_copied_is_incomplete_and_is_taken_when_it_is_whole(contract, tmp_path, gpu):
    directory, server = built(tmp_path, contract, plan(contract, WEIGHTED)), Server(tmp_path)
    manifest = (directory / MANIFEST).read_bytes()
    (directory / MANIFEST).unlink()
    server.starts(contract)
    assert server.states == {directory.name: "incomplete"}
    (directory / MANIFEST).write_bytes(manifest)
    assert server.states == {directory.name: "discovered"}
    before = gpu.compiled
    server.starts(contract, plan(contract, WEIGHTED))
    assert gpu.compiled == before
    assert server.states == {directory.name: "active"}


def test_an_engine_that_the_driver_does_not_load_is_refused(contract, tmp_path, gpu):
    built(tmp_path, contract)
    gpu.refuse, server = "sm_90 attention", Server(tmp_path)
    log = server.starts(contract)
    assert server.events == ["artifact_rejected", "kernels_compiled"]
    assert log[0]["code"] == "engine_unloadable"
    assert server.shown(contract)["artifact"] is None


def test_where_our_kernels_do_not_run_an_engine_is_only_listed(contract, tmp_path, gpu):
    gpu.unfit = "CuPy is not installed"
    directory, server = built(tmp_path, contract, plan(contract, WEIGHTED)), Server(tmp_path)
    assert server.starts(contract, plan(contract, WEIGHTED)) == []
    assert server.states == {directory.name: "discovered"}
    assert server.shown(contract, plan(contract, WEIGHTED)) == {"artifact": None, "compilations": 0, "policies": {}}


def test_compilations_are_a_metric():
    metrics = Metrics()
    metrics.kernel_compilations(lambda: 7)
    assert b"\nwidebeam_kernel_compilations_total 7.0\n" in metrics.render()


# ---- the policies' ----------------------------------------------------------------------------------------------


def test_kernels_of_policies_come_from_the_engine_too(contract, tmp_path, gpu):
    plans = [plan(contract, line, name) for name, line in (("a", WEIGHTED), ("b", DOUBLED), ("c", BY_RANKS))]
    directory, server = built(tmp_path, contract, *plans), Server(tmp_path)
    log = server.starts(contract, *plans)
    assert server.events == ["engine_loaded", "kernels_loaded"]
    assert (log[1]["engine"], log[1]["policies"]) == (directory.name, ["a", "b"])
    assert gpu.compiled == 0
    assert {one.given for one in gpu.loaded} == {"", *(p.structure.steps[0].generated.definitions for p in plans[:2])}
    assert all(cubin == cubin_of(one, "sm_90") for one, cubin in gpu.loaded.items())
    there = {"compiled": 0, "missing": 0}
    assert server.shown(contract, *plans)["policies"] == {
        one.policy: {"from_artifacts": len(engine_artifact.of_plans(contract, "sm_90", [one])), **there}
        for one in plans[:2]
    }


def test_a_policy_that_was_edited_after_the_build_is_compiled_beside_and_nothing_is_refused(contract, tmp_path, gpu):
    kept = plan(contract, WEIGHTED, "kept")
    directory, server = built(tmp_path, contract, kept, plan(contract, DOUBLED, "edited")), Server(tmp_path)
    edited = plan(contract, "rank: score * 3", "edited")
    log = server.starts(contract, kept, edited)
    assert server.events == ["engine_loaded", "kernels_loaded", "kernels_compiled"]
    assert (log[1]["policies"], log[2]["policies"]) == (["kept"], ["edited"])
    builds = engine_artifact.of_plans(contract, "sm_90", [edited])
    assert gpu.compiled == log[2]["modules"] == server.counted == len(builds)
    assert {one for one, cubin in gpu.loaded.items() if cubin == b""} == set(builds)
    assert server.shown(contract, edited)["policies"] == {
        "edited": {"from_artifacts": 0, "compiled": len(builds), "missing": 0}
    }
    assert server.states == {directory.name: "active"}


def test_an_edit_of_parameters_needs_nothing_new(contract, tmp_path, gpu):
    def tuned(value):
        given = f"params:\n  x: {{value: {value}, range: [0, 1]}}\nsteps:\n  all:\n    score: parent + param.x * logp\n"
        return support.plan_of(contract, f"widebeam: 1\n{given}", name="feed")

    built(tmp_path, contract, tuned(0.5))
    server = Server(tmp_path)
    server.starts(contract, tuned(0.5))
    said = len(server.log)
    server.starts(contract, tuned(0.7))
    assert gpu.compiled == 0
    assert len(server.log) == said


def test_a_catalogue_with_other_labels_makes_other_kernels_of_the_same_structure(contract, tmp_path, gpu):
    def over(*labels):
        catalogue = Catalogue((4, 20, 40), (Column("attr", "kind", "text", labels=labels),))
        text = POLICY.format('rank: score + where(attr.kind == "b", 1, 0)')
        return compile_policy("feed", {"feed": Source("feed.yaml", text.encode())}, contract, catalogue)[0]

    first, second = over("a", "b"), over("b", "c")
    assert first.structure.id == second.structure.id
    server = Server(tmp_path)
    server.starts(contract, first)
    before = gpu.compiled
    server.starts(contract, second)
    builds = engine_artifact.of_plans(contract, "sm_90", [second])
    assert gpu.compiled == before + len(builds)
    assert server.shown(contract, second)["policies"]["feed"]["compiled"] == len(builds)


def test_an_endless_row_of_edits_does_not_fill_the_memory(contract, tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(engines, "MOST_EXPANDED", 4)
    server, plans = Server(tmp_path), [plan(contract, f"rank: score * {number}.5") for number in range(1, 12)]
    for one in plans:
        server.engines.prepare_plans(contract, CPU, [one])
        assert len(server.engines._expanded) <= 4
    assert server.shown(contract, plans[0])["policies"]["feed"]["missing"] == 0


def test_what_is_there_does_not_wait_for_what_another_contract_compiles(contract, tmp_path, gpu):
    server, there = Server(tmp_path), plan(contract, WEIGHTED)
    server.starts(contract, there)
    with server.engines._lock:  # as `prepare` holds it, for a minute
        asking = threading.Thread(target=server.engines.prepare_plans, args=(contract, CPU, [there]), daemon=True)
        asking.start()
        asking.join(60)
        assert not asking.is_alive()


def test_what_does_not_compile_is_logged_and_shown_and_is_tried_again(contract, tmp_path, gpu):
    good, bad = plan(contract, WEIGHTED, "good"), plan(contract, DOUBLED, "bad")
    gpu.refuse, server = bad.structure.steps[0].generated.definitions, Server(tmp_path)
    server.engines.prepare_plans(contract, CPU, [good, bad])
    [line] = server.log
    assert (line["event"], line["policies"]) == ("kernels_failed", ["bad"])
    shown = server.shown(contract, good, bad)["policies"]
    assert (shown["good"]["missing"], shown["bad"]["compiled"]) == (0, 0)
    gpu.refuse = "nothing of the kind"
    server.engines.prepare_plans(contract, CPU, [good, bad])
    assert server.shown(contract, bad)["policies"]["bad"]["missing"] == 0


def test_an_engine_that_appears_while_the_server_runs_is_taken_for_what_comes_afterwards(contract, tmp_path, gpu):
    server, before, after = Server(tmp_path), plan(contract, WEIGHTED), plan(contract, DOUBLED)
    server.starts(contract, before)
    compiled = gpu.compiled
    directory = built(tmp_path, contract, before, after)
    assert server.states == {directory.name: "discovered"}
    server.engines.prepare_plans(contract, CPU, [before])  # which is there
    assert server.states == {directory.name: "discovered"}
    server.engines.prepare_plans(contract, CPU, [after])
    assert gpu.compiled == compiled
    assert server.states == {directory.name: "active"}
    shown = server.shown(contract, after)
    assert shown["artifact"] is None  # the contract's own were compiled
    assert shown["policies"]["feed"]["from_artifacts"] == len(engine_artifact.of_plans(contract, "sm_90", [after]))


def test_what_an_engine_that_is_removed_gave_stays(contract, tmp_path, gpu):
    own = plan(contract, WEIGHTED)
    directory, server = built(tmp_path, contract, own), Server(tmp_path)
    server.starts(contract, own)
    shown = server.shown(contract, own)
    shutil.rmtree(directory)
    said = len(server.log)
    server.starts(contract, own)
    assert server.shown(contract, own) == shown
    assert shown["artifact"] == directory.name
    assert server.states == {}
    assert len(server.log) == said
    server.starts(contract, plan(contract, DOUBLED))
    assert server.events[said:] == ["kernels_compiled"]


def test_kernels_of_policies_are_gathered_from_several_engines(contract, tmp_path, gpu):
    one, other = plan(contract, WEIGHTED, "one"), plan(contract, DOUBLED, "other")
    names = {built(tmp_path, contract, one).name, built(tmp_path, contract, other).name}
    server = Server(tmp_path)
    server.starts(contract, one, other)
    assert gpu.compiled == 0
    assert set(server.states) == names
    assert set(server.states.values()) == {"active"}


def test_a_policys_cubin_that_was_changed_refuses_the_whole_engine_at_a_start(contract, tmp_path, gpu):
    own = plan(contract, WEIGHTED)
    directory, server = built(tmp_path, contract, own), Server(tmp_path)
    file = flip(directory, sorted(engine_artifact.read(directory).added)[0])
    log = server.starts(contract, own)
    assert server.events == ["artifact_rejected", "kernels_compiled", "kernels_compiled"]
    assert (log[0]["code"], log[0]["location"]) == ("file_digest", f"engines/{directory.name}/{file.name}")
    assert set(gpu.loaded.values()) == {b""}


def test_an_engine_that_serves_and_is_damaged_afterwards_gives_nothing_more_and_says_why(contract, tmp_path, gpu):
    own = plan(contract, WEIGHTED)
    directory, server = built(tmp_path, contract, own), Server(tmp_path)
    server.starts(contract)
    file = flip(directory, sorted(engine_artifact.read(directory).added)[0])
    server.starts(contract, own)
    assert server.events == ["engine_loaded", "artifact_rejected", "kernels_compiled"]
    [shown] = server.engines.documents()
    assert (shown["state"], shown["reason"]["location"]) == ("active", f"engines/{directory.name}/{file.name}")
    assert gpu.compiled == len(engine_artifact.of_plans(contract, "sm_90", [own]))


def test_two_contracts_have_an_engine_each_and_neither_is_called_refused(contract, tmp_path, gpu):
    other = replace(contract, id="0" * 12)
    names = [built(tmp_path, one, plan(contract, WEIGHTED)).name for one in (contract, other)]
    server = Server(tmp_path)
    for one in (contract, other, contract):
        server.starts(one, plan(contract, WEIGHTED))
    assert [server.shown(one)["artifact"] for one in (contract, other)] == names
    assert server.states == dict.fromkeys(names, "active")
    assert gpu.compiled == 0


def test_a_contract_whose_kernels_do_not_compile_is_refused_with_the_compilers_words(contract, tmp_path, gpu):
    gpu.refuse, server = "", Server(tmp_path)
    with pytest.raises(Rejected, match="no such function") as refused:
        server.engines.prepare(contract, CPU)
    assert (refused.value.code, refused.value.location) == ("kernels_failed", f"contract {contract.id}")
    assert server.events == ["kernels_failed"]
    gpu.refuse = "nothing of the kind"
    server.starts(contract)
    assert server.events == ["kernels_failed", "kernels_compiled"]


# ---- whole servers ----------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """A server's root with an engine of all that its policies ask for."""
    lines = {"weighted": WEIGHTED, "doubled": DOUBLED, "leaning": 'rank: score + where(attr.kind == "b", 1, 0)'}
    sids = support.random_sids((4, 5, 6), 40).tolist()
    items = [{"id": f"i{n}", "sid": sid, "attrs": {"kind": "abc"[n % 3]}} for n, sid in enumerate(sids)]
    made = support.write_root(
        tmp_path / "root", items=items, policies={name: POLICY.format(line) for name, line in lines.items()},
        extra='precision = "bfloat16"\n[attributes]\nkind = {of = "kind", as = "same"}',
    )  # fmt: skip
    with support.without_exports():
        done = CliRunner().invoke(app, ["engine", "build", "--root", str(made)])
    assert done.exit_code == 0, done.output
    return made


async def test_a_complete_engine_leaves_nothing_to_compile_but_a_policy_that_is_edited(root, gpu):
    async with live_server(root) as server:
        status = await server.status()
        [engine] = [one for one in status["artifacts"] if one["kind"] == "engine"]
        assert engine["state"] == "active"
        assert status["engine"]["artifact"] == engine["version"]
        assert status["engine"]["compilations"] == gpu.compiled == 0
        assert set(status["engine"]["policies"]) == {"weighted", "doubled", "leaning"}
        for shown in status["engine"]["policies"].values():
            assert shown["from_artifacts"] > shown["compiled"] + shown["missing"] == 0
        assert server.events("kernels_compiled") == []
        assert [line["policies"] for line in server.events("kernels_loaded")] == [["doubled", "leaning", "weighted"]]
        (root / "policies" / "weighted.yaml").write_text(POLICY.format("score: parent + 0.7 * logp"))
        status = await server.settles(lambda found: found["engine"]["policies"]["weighted"]["compiled"])
        shown = status["engine"]["policies"]
        assert shown["weighted"]["from_artifacts"] == shown["weighted"]["missing"] == 0
        assert shown["weighted"]["compiled"] == status["engine"]["compilations"] == gpu.compiled
        assert shown["doubled"]["compiled"] == 0
        assert [line["policies"] for line in server.events("kernels_compiled")] == [["weighted"]]
        assert len((await server.recommend("i1", policy="weighted"))["items"])


async def test_two_servers_on_one_root_and_state_take_the_same_engine(root, gpu):
    async with live_server(root) as one, live_server(root) as other:
        shown = [(await server.status())["engine"] for server in (one, other)]
        assert shown[0] == shown[1]
        assert shown[0]["compilations"] == 0
    assert gpu.compiled == 0
