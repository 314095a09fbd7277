"""Compiled engines on the disk. No kernel is compiled here."""

from __future__ import annotations

import hashlib
import json
import shutil

import msgspec
import pytest

from app.cli.contract import contract_on_gpu
from app.errors import Rejected
from app.ops import cuda, nvrtc
from app.ops.cuda import Build
from app.runtime import engine_artifact
from app.runtime.engine_artifact import FILE
from app.vocab.manifest import FILE as MANIFEST
from app.vocab.manifest import verify
from tests import support
from tests.gpu_stand_in import VERSIONS, without_compiler


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Of a small root on a GPU."""
    root = support.write_root(tmp_path_factory.mktemp("root"))
    with support.without_exports():
        return contract_on_gpu(root, None, None)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    without_compiler(monkeypatch)


def plan(contract, line, name="feed"):
    return support.plan_of(contract, f"widebeam: 1\nsteps:\n  all:\n    {line}\n", name=name)


def built(root, contract, *plans, arch="sm_90"):
    """An engine in a fresh root."""
    return engine_artifact.build(root, engine_artifact.of_contract(contract, arch, plans), "a test").directory


def test_an_engine_is_files_under_the_projects_own_manifest(contract, tmp_path):
    directory = built(tmp_path, contract)
    manifest = verify(directory, "engine")
    found = engine_artifact.read(directory)
    assert directory.parent == tmp_path / "engines"
    assert directory.name == found.id == manifest.version
    assert found.made_for.contract == contract.id
    assert found.made_for.arch == "sm_90"
    assert found.made_for.versions == VERSIONS
    assert {"attention/kernel.cu", "selection/chunk.cu"} <= set(found.made_for.sources)
    assert set(manifest.files) == {FILE, *(one.file for one in found.modules)}
    assert [one.rows[-1] for one in found.made_for.plan] == [16, 64, 320]


def test_the_same_deployment_makes_the_same_engine_byte_by_byte(contract, tmp_path):
    plans = plan(contract, "score: parent + 0.5 * logp"), plan(contract, "rank: score * 2", "other")
    one, other = built(tmp_path / "a", contract, *plans), built(tmp_path / "b", contract, *reversed(plans))
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


def test_an_engine_is_not_overwritten(contract, tmp_path):
    built(tmp_path, contract)
    with pytest.raises(Rejected, match="never overwritten"):
        built(tmp_path, contract)


def test_what_policies_add_is_in_the_engine_and_in_its_id(contract, tmp_path):
    weighted = plan(contract, "score: parent + 0.5 * logp", "weighted")
    bare = engine_artifact.read(built(tmp_path, contract))
    own = engine_artifact.read(built(tmp_path, contract, weighted))
    builds = engine_artifact.of_plans(contract, "sm_90", [weighted])
    assert bare.made_for == own.made_for
    assert bare.id != own.id
    assert bare.has(builds) == ()
    assert own.has(builds) == builds
    assert set(own.policies) == {"weighted"}
    assert own.added == set(own.policies["weighted"])
    assert len(own.modules) == len(bare.modules) + len(builds)
    cubins = engine_artifact.cubins(tmp_path / "engines" / own.id, builds)
    assert all(build.given.encode() in cubin for build, cubin in cubins.items())


def test_policies_by_another_name_or_without_expressions_make_no_other_engine(contract):
    lines = {"weighted": "score: parent + 0.5 * logp", "again": "score: parent + 0.5 * logp", "plain": "mask: trie"}
    plans = {name: plan(contract, line, name) for name, line in lines.items()}

    def name(*names):
        return engine_artifact.of_contract(contract, "sm_90", [plans[one] for one in names]).id

    assert name("weighted") == name("again") == name("again", "weighted", "plain")
    assert name("plain") == name() != name("weighted")


def test_what_policies_add_is_no_reason_to_refuse_an_engine_and_what_is_missing_of_a_contract_is_one(
    contract, tmp_path
):
    here = engine_artifact.of_contract(contract, "sm_90", [plan(contract, "rank: score * 2")])
    found = engine_artifact.read(built(tmp_path, contract, plan(contract, "rank: score * 3")))
    engine_artifact.check(found, here)
    less = msgspec.structs.replace(found, modules=found.modules[1:])
    with pytest.raises(Rejected, match=f"{found.modules[0].file} missing, none not needed"):
        engine_artifact.check(less, here)
    more = msgspec.structs.replace(found, modules=(*found.modules, msgspec.structs.replace(found.modules[0], file="x")))
    with pytest.raises(Rejected, match="none missing, x not needed"):
        engine_artifact.check(more, here)


def test_another_option_of_the_compiler_is_another_module(contract, tmp_path, monkeypatch):
    found = engine_artifact.read(built(tmp_path, contract))
    monkeypatch.setattr(nvrtc, "AS_CUPY", (*nvrtc.AS_CUPY, "-prec-div=false"))
    here = engine_artifact.of_contract(contract, "sm_90")
    assert found.has(here.builds) == ()
    with pytest.raises(Rejected, match="missing"):
        engine_artifact.check(found, here)


def test_an_edited_description_is_refused(contract, tmp_path):
    directory = built(tmp_path, contract)
    moved = directory.rename(directory.with_name("0" * 12))
    manifest = (moved / MANIFEST).read_text().replace(f'"{directory.name}"', f'"{moved.name}"')
    (moved / MANIFEST).write_text(manifest)
    with pytest.raises(Rejected, match=f"makes the id {directory.name}, not 000000000000"):
        engine_artifact.read(moved)


def test_a_description_that_is_cut_or_none_is_refused_with_its_file(contract, tmp_path):
    directory = built(tmp_path, contract)
    text = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(text[:-7])
    with pytest.raises(Rejected, match="bytes, the manifest says") as refused:
        engine_artifact.read(directory)
    assert refused.value.location == FILE
    (directory / FILE).unlink()
    with pytest.raises(Rejected, match="no such file"):
        engine_artifact.read(directory)


@pytest.mark.parametrize("whole", [b"[" * 5000, b"\xff", b'{"format": 2}', b"{}"])
def test_what_is_no_description_is_refused_whatever_the_manifest_says(whole, contract, tmp_path):
    directory = built(tmp_path, contract)
    (directory / FILE).write_bytes(whole)
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["files"][FILE] = {"size": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Rejected) as refused:
        engine_artifact.read(directory)
    assert (refused.value.code, refused.value.location) == ("engine_invalid", FILE)


def test_a_source_that_does_not_compile_leaves_no_engine(contract, tmp_path, monkeypatch):
    def compiled(build, arch):
        raise nvrtc.CompileError(f"{arch}: expected a ;")

    monkeypatch.setattr(Build, "compiled", compiled)
    with pytest.raises(Rejected, match="expected a ;"):
        built(tmp_path, contract)
    assert list((tmp_path / "engines").iterdir()) == []


def test_an_engine_of_a_policy_does_not_depend_on_where_the_sources_lie(contract, tmp_path, monkeypatch):
    """Two installations make the same files of it: nothing in a name says where a source is."""
    feed = plan(contract, "score: parent + 0.5 * logp")
    names = {file.name for file in built(tmp_path / "a", contract, feed).iterdir()}
    elsewhere = tmp_path / "ops"
    shutil.copytree(cuda._OPS, elsewhere)
    before = engine_artifact.of_contract(contract, "sm_90", [feed])
    moved = [one._replace(source=elsewhere / one.source.relative_to(cuda._OPS)) for one in before.added]
    assert {engine_artifact._module(one).file for one in moved} <= names


def test_an_unknown_architecture_is_refused_with_the_known_ones(contract):
    with pytest.raises(Rejected, match="known: sm_80"):
        engine_artifact.of_contract(contract, "sm_70")


def test_another_policy_costs_its_own_kernels_only_and_the_engine_is_the_same_as_one_made_alone(
    contract, tmp_path, monkeypatch
):
    one, other = plan(contract, "score: parent + 0.5 * logp", "one"), plan(contract, "rank: score * 2", "other")
    built(tmp_path / "a", contract, one)
    alone = built(tmp_path / "b", contract, one, other)
    compiled, real = [], Build.compiled
    monkeypatch.setattr(Build, "compiled", lambda build, arch: compiled.append(build) or real(build, arch))
    beside = built(tmp_path / "a", contract, one, other)
    assert set(compiled) == set(engine_artifact.of_plans(contract, "sm_90", [other]))
    assert {file.name: file.read_bytes() for file in alone.iterdir()} == {
        file.name: file.read_bytes() for file in beside.iterdir()
    }


def test_nothing_is_taken_from_an_engine_that_is_damaged_or_was_made_with_something_else(
    contract, tmp_path, monkeypatch
):
    engine = engine_artifact.of_contract(contract, "sm_90")
    file = next(built(tmp_path, contract).glob("attention-*.cubin"))
    assert len(engine_artifact._known(tmp_path, engine.identity, engine.builds)) == len(engine.builds)
    file.write_bytes(file.read_bytes()[::-1])
    assert engine_artifact._known(tmp_path, engine.identity, engine.builds) == {}
    monkeypatch.setattr(engine_artifact, "versions", lambda: {**VERSIONS, "nvrtc": "12.0"})
    elsewhere = engine_artifact.of_contract(contract, "sm_90", [plan(contract, "rank: score * 2")])
    built(tmp_path, contract)
    assert engine_artifact._known(tmp_path, engine.identity, elsewhere.builds) == {}
