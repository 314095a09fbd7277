"""`widebeam engine` as a person and a script use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import Rejected
from app.ops.cuda import Build
from app.runtime import engine_artifact
from tests import support

WEIGHTED = "widebeam: 1\nsteps:\n  all:\n    score: parent + {} * logp\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("root"))


@pytest.fixture
def with_policies(tmp_path):
    """A root with two policies whose expressions the kernels compute."""
    policies = {"weighted": WEIGHTED.format(0.5), "lighter": WEIGHTED.format(0.25)}
    return support.write_root(tmp_path / "root", policies=policies)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(Build, "compiled", lambda self, arch: f"{arch} {self}".encode())
    with support.without_exports():
        yield


def run(*arguments):
    done = CliRunner().invoke(app, ["engine", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_build_makes_an_engine_once_and_says_where(root):
    code, out, err = run("build", "--root", root, "--json")
    first = json.loads(out)
    assert (code, first["arch"], first["made"]) == (0, "sm_90", True)
    assert f"making {first['modules']} modules for sm_90" in err
    assert (root / "engines" / first["engine"] / "MANIFEST.json").is_file()
    code, out, _ = run("build", "--root", root)
    assert (code, out) == (0, f"{root}/engines/{first['engine']}: {first['modules']} modules, there already\n")


def test_build_says_what_is_missing_here_that_a_server_has(root, monkeypatch):
    monkeypatch.setattr(engine_artifact, "versions", lambda: {"torch": "2", "cupy": "none"})
    assert (
        "cupy is not installed here: a server that has it will not take this engine" in run("build", "--root", root)[2]
    )


def test_show_and_check(root):
    name = json.loads(run("build", "--root", root, "--json")[1])["engine"]
    code, out, _ = run("show", name, "--root", root)
    assert code == 0
    assert all(word in out for word in ("contract", "architecture", "sm_90", "nvrtc", "rows of step 3"))
    assert json.loads(run("show", name, "--root", root, "--json")[1])["made_for"]["arch"] == "sm_90"
    assert run("check", name, "--root", root)[:2] == (0, f"engines/{name}: as it is needed here\n")
    assert run("check", name, "--root", root, "--complete")[0] == 0
    code, out, _ = run("check", name, "--root", root, "--arch", "sm_80")
    place = f"engines/{name}/engine.json: made_for"
    arch, *sources = out.splitlines()  # some sources are for sm_90 alone
    assert (code, arch) == (1, f"{place}.arch: made for sm_90, here it is sm_80")
    assert all(line.startswith(f"{place}.sources.") and line.endswith("here it is none") for line in sources)


def test_build_takes_the_roots_policies_and_show_lists_them(with_policies):
    code, out, err = run("build", "--root", with_policies, "--json")
    made = json.loads(out)
    assert (code, set(made["policies"])) == (0, {"lighter", "weighted"})
    added = sum(made["policies"].values())  # they share none
    assert f"making {made['modules']} modules" in err
    directory = with_policies / "engines" / made["engine"]
    assert len(list(directory.glob("*.cubin"))) == made["modules"]
    code, out, _ = run("build", "--root", with_policies)
    assert out == f"{directory}: {made['modules']} modules, {added} of them of lighter, weighted, there already\n"
    code, out, _ = run("show", made["engine"], "--root", with_policies)
    rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert rows["modules of policies"].strip() == str(added)
    assert rows["policy weighted"].strip() == f"{made['policies']['weighted']} modules"


def test_check_says_what_is_missing_of_the_policies_as_they_are_now(with_policies):
    made = json.loads(run("build", "--root", with_policies, "--json")[1])
    name, every = made["engine"], {one: f"{count} modules" for one, count in made["policies"].items()}
    whole = f"engines/{name}: as it is needed here\npolicy lighter: all {every['lighter']}\n"
    assert run("check", name, "--root", with_policies, "--complete")[:2] == (
        0,
        f"{whole}policy weighted: all {every['weighted']}\n",
    )
    (with_policies / "policies" / "weighted.yaml").write_text(WEIGHTED.format(0.75))
    count = made["policies"]["weighted"]
    late = f"{count} of {count} modules missing: a server compiles what is missing before the policy serves"
    assert run("check", name, "--root", with_policies)[:2] == (0, f"{whole}policy weighted: {late}\n")
    assert run("check", name, "--root", with_policies, "--complete")[0] == 1
    again = json.loads(run("build", "--root", with_policies, "--json")[1])
    assert again["made"]
    assert again["engine"] != name


def test_a_policy_with_errors_is_named_and_adds_nothing(with_policies):
    (with_policies / "policies" / "weighted.yaml").write_text(WEIGHTED.format("nonsense"))
    code, out, err = run("build", "--root", with_policies, "--json")
    assert code == 0
    assert "policy weighted has errors, which `widebeam policy check` shows: it adds nothing" in err
    assert set(json.loads(out)["policies"]) == {"lighter"}


def test_a_root_without_policies_has_an_engine_of_its_contract(with_policies):
    for file in (with_policies / "policies").iterdir():
        file.unlink()
    code, out, _ = run("build", "--root", with_policies, "--json")
    assert (code, json.loads(out)["policies"]) == (0, {})


def test_an_engine_that_is_there_and_not_whole_is_no_engine_that_is_there(with_policies):
    made = json.loads(run("build", "--root", with_policies, "--json")[1])
    file = next((with_policies / "engines" / made["engine"]).glob("*.cubin"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Rejected, match="bytes, the manifest says") as refused:
        CliRunner().invoke(app, ["engine", "build", "--root", str(with_policies)], catch_exceptions=False)
    assert refused.value.location == f"engines/{made['engine']}/{file.name}"


def test_two_builds_at_once_make_one_engine(with_policies, monkeypatch):
    real, others = engine_artifact.build, []

    def late(root, engine, by, threads):
        others.append(real(root, engine, "another", threads))  # whoever was quicker
        return real(root, engine, by, threads)

    monkeypatch.setattr(engine_artifact, "build", late)
    code, out, _ = run("build", "--root", with_policies, "--json")
    assert (code, json.loads(out)["made"]) == (0, False)
    assert json.loads(out)["engine"] == others[0].version


def test_an_engine_or_an_architecture_that_is_not_there_is_named(root):
    with pytest.raises(Exception, match="'nothing' is not there"):
        CliRunner().invoke(app, ["engine", "show", "nothing", "--root", str(root)], catch_exceptions=False)
    with pytest.raises(Exception, match="no kernels are made for sm_70"):
        CliRunner().invoke(app, ["engine", "build", "--root", str(root), "--arch", "sm_70"], catch_exceptions=False)


def test_build_takes_policies_that_are_to_go_live_next(with_policies, tmp_path):
    now = json.loads(run("build", "--root", with_policies, "--json")[1])
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "weighted.yaml").write_text(WEIGHTED.format(0.75))
    then = json.loads(run("build", "--root", with_policies, "--policies", tmp_path / "next", "--json")[1])
    assert then["policies"] == {**now["policies"], "weighted": 2 * now["policies"]["weighted"]}
    assert run("check", then["engine"], "--root", with_policies, "--complete")[0] == 0
    (tmp_path / "next" / "weighted.yaml").replace(with_policies / "policies" / "weighted.yaml")
    assert run("check", then["engine"], "--root", with_policies, "--complete")[0] == 0
    assert run("check", now["engine"], "--root", with_policies, "--complete")[0] == 1
