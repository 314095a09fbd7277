"""Compiled engines on the disk, and servers that take or refuse them. No kernel is compiled here."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO

import msgspec
import pytest
import torch

from app.cli.contract import contract_on_gpu
from app.errors import Rejected
from app.ops import cuda, nvrtc
from app.ops.cuda import Build
from app.runtime import engine_artifact
from app.runtime.engine_artifact import FILE
from app.runtime.engines import Engines
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.vocab.manifest import FILE as MANIFEST
from app.vocab.manifest import verify
from tests import support
from tests.policies.contracts import plan_of

HERE = {"torch": "2.11.0+cu130", "triton": "3.6.0", "cupy": "14.2.0", "nvrtc": "13.0"}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A root, and its contract on a GPU."""
    root = support.write_root(tmp_path_factory.mktemp("root"))
    with support.without_exports():
        return root, contract_on_gpu(root, None, None)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """In the place of NVRTC: a binary that says what it is of."""
    monkeypatch.setattr(Build, "compiled", lambda self, arch: f"{arch} {self.name} {self.define}".encode())
    monkeypatch.setattr(engine_artifact, "versions", lambda: dict(HERE))


@pytest.fixture
def gpu(monkeypatch):
    """In the place of a GPU: what is loaded, and from what."""
    loaded: dict[Build, bytes | None] = {}

    def ready(builds, device, cubins=None):
        del device
        loaded.update({one: (cubins or {}).get(one) for one in builds})
        return sum(binary is None for binary in loaded.values())

    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_90")
    monkeypatch.setattr(cuda, "ready", ready)
    return loaded


def built(root, contract, arch="sm_90"):
    """A fresh root of the same contract with an engine of an architecture."""
    engine = engine_artifact.of_contract(contract, arch)
    return engine_artifact.build(root, engine, "a test").directory


def served(root, contract):
    """What a server says of its engines, and its log."""
    stream = BytesIO()
    engines = Engines(root, Metrics(), make_log(stream, "info"))
    engines.prepare(contract, torch.device("cpu"))
    engines.prepare(contract, torch.device("cpu"))  # the second time is nothing
    return engines, [json.loads(line) for line in stream.getvalue().splitlines()]


def events(log):
    return [line["event"] for line in log]


def test_an_engine_is_files_under_the_projects_own_manifest(deployed, tmp_path):
    contract = deployed[1]
    directory = built(tmp_path, contract)
    manifest = verify(directory, "engine")
    found = engine_artifact.read(directory)
    assert directory.parent == tmp_path / "engines"
    assert directory.name == found.made_for.id == manifest.version
    assert found.made_for.contract == contract.id
    assert found.made_for.arch == "sm_90"
    assert found.made_for.versions == HERE
    assert {"attention/kernel.cu", "selection/chunk.cu"} <= set(found.made_for.sources)
    assert set(manifest.files) == {FILE, *(one.file for one in found.modules)}
    assert [one.rows[-1] for one in found.made_for.plan] == [16, 64, 320]


def test_the_same_deployment_makes_the_same_engine_byte_by_byte(deployed, tmp_path):
    one, other = (built(tmp_path / name, deployed[1]) for name in "ab")
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


def test_an_engine_is_not_overwritten(deployed, tmp_path):
    built(tmp_path, deployed[1])
    with pytest.raises(Rejected, match="never overwritten"):
        built(tmp_path, deployed[1])


def test_a_server_takes_its_engine_and_compiles_nothing(deployed, tmp_path, gpu):
    contract = deployed[1]
    directory = built(tmp_path, contract)
    engines, log = served(tmp_path, contract)
    assert events(log) == ["engine_loaded"]
    assert gpu
    assert None not in gpu.values()
    assert all(binary == f"sm_90 {one.name} {one.define}".encode() for one, binary in gpu.items())
    assert engines.document()["artifact"] == directory.name
    [shown] = engines.documents()
    assert (shown["kind"], shown["version"], shown["state"]) == ("engine", directory.name, "active")


def test_without_an_engine_everything_is_compiled_before_the_first_batch(deployed, tmp_path, gpu):
    contract = deployed[1]
    engines, log = served(tmp_path, contract)
    assert events(log) == ["kernels_compiled"]
    assert set(gpu) == set(engine_artifact.of_contract(contract, "sm_90").builds)
    assert engines.document()["artifact"] is None
    assert engines.documents() == []


def test_a_server_says_what_torch_computes_although_there_are_kernels(deployed, tmp_path, gpu, monkeypatch):
    contract = deployed[1]
    engines, _ = served(tmp_path, contract)
    monkeypatch.setattr(cuda, "architecture", lambda _: "sm_80")
    assert engines.left_to_torch(contract, torch.device("cpu"))["context attention"].startswith("sm_80")
    assert {"attention/kernel.cu"} <= {one.name for one in gpu}
    monkeypatch.setattr(cuda, "unfit", lambda _: "CuPy is not installed")
    assert engines.left_to_torch(contract, torch.device("cpu")) == {}


@pytest.mark.parametrize("package", sorted(HERE))
def test_an_engine_made_with_another_version_is_refused_with_the_field_and_both_values(
    package, deployed, tmp_path, gpu, monkeypatch
):
    contract = deployed[1]
    directory = built(tmp_path, contract)
    monkeypatch.setattr(engine_artifact, "versions", lambda: {**HERE, package: "99.1"})
    engines, log = served(tmp_path, contract)
    assert events(log) == ["artifact_rejected", "kernels_compiled"]
    [shown] = engines.documents()
    assert shown["state"] == "rejected"
    assert shown["reason"] == {
        "code": "engine_mismatch",
        "message": f"made for {HERE[package]}, here it is 99.1",
        "location": f"engines/{directory.name}/engine.json: made_for.versions.{package}",
    }
    assert set(gpu.values()) == {None}


def test_an_engine_of_another_architecture_contract_or_source_is_refused_with_every_difference(deployed, tmp_path, gpu):
    contract = deployed[1]
    built(tmp_path, contract, "sm_80")
    wanted = replace(contract, id="0" * 12, limits=msgspec.structs.replace(contract.limits, batch=8))
    _, log = served(tmp_path, wanted)
    assert events(log) == ["artifact_rejected", "kernels_compiled"]
    found = [log[0], *log[0]["others"]]
    places = {one["location"].partition("made_for.")[2]: one["message"] for one in found}
    assert places["arch"] == "made for sm_80, here it is sm_90"
    assert places["contract"] == f"made for {contract.id}, here it is 000000000000"
    assert any(place.startswith("plan") for place in places)


def test_a_changed_byte_refuses_an_engine_and_the_kernels_are_compiled(deployed, tmp_path, gpu):
    directory = built(tmp_path, deployed[1])
    file = next(directory.glob("attention-*.cubin"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    engines, log = served(tmp_path, deployed[1])
    assert events(log) == ["artifact_rejected", "kernels_compiled"]
    assert (log[0]["code"], log[0]["location"]) == ("file_digest", f"engines/{directory.name}/{file.name}")
    assert engines.document()["artifact"] is None


def test_an_edited_description_is_refused(deployed, tmp_path):
    directory = built(tmp_path, deployed[1])
    moved = directory.rename(directory.with_name("0" * 12))
    manifest = (moved / MANIFEST).read_text().replace(f'"{directory.name}"', f'"{moved.name}"')
    (moved / MANIFEST).write_text(manifest)
    with pytest.raises(Rejected, match=f"makes the id {directory.name}, not 000000000000"):
        engine_artifact.read(moved)


def test_an_engine_that_the_driver_does_not_load_is_refused(deployed, tmp_path, gpu, monkeypatch):
    built(tmp_path, deployed[1])

    def ready(builds, device, cubins=None):
        if cubins:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        gpu.update(dict.fromkeys(builds))
        return len(builds)

    monkeypatch.setattr(cuda, "ready", ready)
    _, log = served(tmp_path, deployed[1])
    assert events(log) == ["artifact_rejected", "kernels_compiled"]
    assert log[0]["code"] == "engine_unloadable"


def test_where_our_kernels_do_not_run_an_engine_is_only_listed(deployed, tmp_path):
    directory = built(tmp_path, deployed[1])
    engines, log = served(tmp_path, deployed[1])
    assert log == []
    [shown] = engines.documents()
    assert (shown["version"], shown["state"]) == (directory.name, "discovered")


def test_a_source_that_does_not_compile_leaves_no_engine(deployed, tmp_path, monkeypatch):
    def compiled(build, arch):
        raise nvrtc.CompileError(f"{arch}: expected a ;")

    monkeypatch.setattr(Build, "compiled", compiled)
    with pytest.raises(Rejected, match="expected a ;"):
        built(tmp_path, deployed[1])
    assert list((tmp_path / "engines").iterdir()) == []


def test_an_unknown_architecture_is_refused_with_the_known_ones(deployed):
    with pytest.raises(Rejected, match="known: sm_80"):
        engine_artifact.of_contract(deployed[1], "sm_70")


def test_compilations_are_a_metric():
    metrics = Metrics()
    metrics.kernel_compilations(lambda: 7)
    assert b"\nwidebeam_kernel_compilations_total 7.0\n" in metrics.render()


@pytest.fixture(scope="module")
def plans(deployed):
    lines = ("score: parent + 0.5 * logp", "rank: score * 2", "score: parent + logp", "rank: score - sibling")
    return [plan_of(f"widebeam: 1\nsteps:\n  all:\n    {line}\n", deployed[1]) for line in lines]


def test_what_policies_add_is_compiled_once_and_what_fails_is_logged(deployed, plans, tmp_path, gpu, monkeypatch):
    contract, stream = deployed[1], BytesIO()
    engines = Engines(tmp_path, Metrics(), make_log(stream, "info"))
    engines.prepare_plans(contract, torch.device("cpu"), plans)
    texts = {one.given for one in gpu}
    assert texts == {plan.structure.steps[0].generated.definitions for plan in plans[:2]}

    def broken(*_):
        raise RuntimeError("no such function")

    monkeypatch.setattr(cuda, "ready", broken)
    engines.prepare_plans(contract, torch.device("cpu"), plans)
    log = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert events(log) == ["kernels_compiled", "kernels_failed"]
    assert log[0]["modules"] == len(gpu)
