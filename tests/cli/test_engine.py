"""`widebeam engine` as a person and a script use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.ops.cuda import Build
from app.runtime import engine_artifact
from tests import support


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("root"))


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
    assert f"compiling {first['modules']} modules for sm_90" in err
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
    code, out, _ = run("check", name, "--root", root, "--arch", "sm_80")
    assert (code, out) == (1, f"engines/{name}/engine.json: made_for.arch: made for sm_90, here it is sm_80\n")


def test_an_engine_or_an_architecture_that_is_not_there_is_named(root):
    with pytest.raises(Exception, match="'nothing' is not there"):
        CliRunner().invoke(app, ["engine", "show", "nothing", "--root", str(root)], catch_exceptions=False)
    with pytest.raises(Exception, match="no kernels are made for sm_70"):
        CliRunner().invoke(app, ["engine", "build", "--root", str(root), "--arch", "sm_70"], catch_exceptions=False)
