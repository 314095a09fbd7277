"""`widebeam policy diff` and `plan` over a small root on disk; what they say is `policies.difference`'s own."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.policy_files import deployed
from app.runtime.state_dir import save_last_good, save_policies
from tests import support
from tests.live_support import live_server

TRAFFIC = "widebeam: 1\nkind: traffic\ndefault: base\nlayers:\n  ranking: {salt: ranking/1}\n"
EXPERIMENT = """\
widebeam: 1
kind: experiment
layer: ranking
slots: [0, 2000]
salt: wider/1
arms:
  control: {weight: 50, policy: base}
  wide: {weight: 50, policy: feed}
"""
FEED = "widebeam: 1\nparams:\n  w: {value: 1, range: [0, 2]}\nsteps:\n  last:\n    rank: score * param.w\n"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    policies = {"feed": FEED, "traffic": TRAFFIC, "shape": "widebeam: 1\nabstract: true\n"}
    root = support.write_root(tmp_path_factory.mktemp("root"), policies=policies)
    (root / "policies" / "experiments").mkdir()
    (root / "policies" / "experiments" / "wider.yaml").write_text(EXPERIMENT)
    return root


@pytest.fixture
def root(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "root")


def run(*args):
    return CliRunner().invoke(app, ["policy", *(str(arg) for arg in args)])


def edited(root, name, text, to="next"):
    folder = root / to
    if not folder.exists():
        shutil.copytree(root / "policies", folder)
    (folder / f"{name}.yaml").write_text(text)
    return folder


def test_two_policies_of_a_root(root):
    result = run("diff", "base", "feed", "--root", root)
    ids = {one.policy: one.policy_id for one in deployed(root).in_force().plans()}
    assert (result.exit_code, result.stdout) == (
        0,
        f"base {ids['base']} -> feed {ids['feed']}\n"
        "  param w value: none -> 1\n"
        "  param w range: none -> 0; 2\n"
        "  step 3 rank: score -> score * param.w\n"
        "  another structure\n",
    )


def test_a_file_and_an_id_that_has_served(root):
    before = deployed(root).in_force()
    kept = {one.plan.policy_id: one.kept for one in before.policies.values() if one.plan}
    save_policies(root / "state", kept)
    old = before.plan("feed").policy_id
    (root / "policies" / "feed.yaml").write_text(FEED.replace("value: 1", "value: 1.5"))
    result = run("diff", old, root / "policies" / "feed.yaml", "--root", root, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["a"]["policy_id"] == old
    assert found["same_structure"]
    assert found["changes"] == [{"place": "param w value", "before": "1", "after": "1.5"}]


def test_a_policy_that_has_served_is_shown_and_written_by_its_id(root, tmp_path):
    (root / "policies" / "child.yaml").write_text("widebeam: 1\nextends: feed\nwidths: [2, 2, 2]\n")
    before = deployed(root).in_force()
    kept = before.policies["child"]
    save_policies(root / "state", {kept.plan.policy_id: kept.kept})
    (root / "policies" / "child.yaml").unlink()
    (root / "policies" / "feed.yaml").write_text(FEED.replace("value: 1", "value: 1.5"))
    out = tmp_path / "out"
    result = run("show", kept.plan.policy_id, "--root", root, "--out", out)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policy_id"] == kept.plan.policy_id
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "feed.yaml": FEED,
        "child.yaml": "widebeam: 1\nextends: feed\nwidths: [2, 2, 2]\n",
    }
    again = run("show", "feed", "--root", root, "--out", out)
    assert (again.exit_code, (out / "feed.yaml").read_text()) == (2, FEED)
    assert run("show", "0123456789ab", "--root", root).exit_code == 2


def test_what_is_no_policy_is_wrong_usage_and_a_broken_one_fails(root):
    edited(root, "feed", "widebeam: 1\nstep: 1\n", to="policies")
    assert run("diff", "base", "nothing", "--root", root).exit_code == 2
    assert run("diff", "base", "0123456789ab", "--root", root).exit_code == 2
    assert run("diff", "base", root / "policies", "--root", root).exit_code == 2
    assert run("diff", "base", "shape", "--root", root).exit_code == 1
    broken = run("diff", "base", "feed", "--root", root)
    assert broken.exit_code == 1
    assert "S007" in broken.stderr


def test_two_folders_say_whom_they_move(root):
    folder = edited(root, "experiments/wider", EXPERIMENT.replace("2000", "3000"))
    result = run("diff", root / "policies", folder, "--root", root)
    assert (result.exit_code, result.stdout) == (
        0,
        "policies\n    3 unchanged\n"
        "experiments\n  ~ wider: changed\n      slots: [0, 2000] -> [0, 3000]\n"
        "users\n  all: 10.0000% change arm, at least 10.0000% must; 5.0000% get another policy id\n",
    )


def test_a_plan_names_what_is_swapped_compiled_and_rejected(root):
    folder = edited(root, "feed", FEED.replace("param.w", "(param.w + 1)"))
    edited(root, "new", "widebeam: 1\nwidths: [8, 8, 8]\n")
    result = run("plan", folder, "--root", root, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    what = {one["name"]: (one["what"], one["compile"]) for one in found["policies"]}
    assert what == {
        "base": ("same", False), "feed": ("changed", True), "new": ("added", False), "shape": ("same", False),
    }  # fmt: skip
    assert len(found["compile"]) == 1
    assert found["users"][0]["arm"] == 0
    assert found["users"][0]["policy"] == pytest.approx(0.1)
    edited(root, "feed", "widebeam: 1\nstep: 1\n")
    result = run("plan", folder, "--root", root)
    assert result.exit_code == 1
    assert "  ! feed: rejected" in result.stdout
    assert "error S007" in result.stdout


def test_a_plan_refuses_what_would_reassign_people(root):
    folder = edited(
        root, "experiments/wider", EXPERIMENT.replace("weight: 50", "weight: 40", 1).replace("weight: 50", "weight: 60")
    )
    result = run("plan", folder, "--root", root)
    assert result.exit_code == 1
    assert "  ! wider: rejected\n" in result.stdout
    assert "error E008" in result.stdout


def test_a_broken_file_is_compared_by_its_last_good_text(root):
    before = deployed(root).in_force()
    save_last_good(root / "state", {name: one.kept for name, one in before.policies.items() if one.kept}, {})
    folder = edited(root, "feed", FEED.replace("value: 1", "value: 2"))
    (root / "policies" / "feed.yaml").write_text("widebeam: 1\nstep: 1\n")
    found = json.loads(run("plan", folder, "--root", root, "--json").stdout)
    [feed] = [one for one in found["policies"] if one["name"] == "feed"]
    assert feed["changes"] == [{"place": "param w value", "before": "1", "after": "2"}]


async def test_a_plan_against_a_running_server(tmp_path):
    policies = {"feed": FEED, "traffic": TRAFFIC}
    root = support.write_root(tmp_path / "root", policies=policies)
    (root / "policies" / "experiments").mkdir()
    (root / "policies" / "experiments" / "wider.yaml").write_text(EXPERIMENT)

    async def plan(folder, **given):
        args = ("plan", folder, "--root", root, "--admin", server.admin, "--json")
        result = await asyncio.to_thread(run, *args)
        return result.exit_code, json.loads(result.stdout)

    async with live_server(root) as server:
        before = deployed(root).in_force().plan("feed").policy_id
        folder = edited(root, "feed", FEED.replace("value: 1", "value: 2"))
        code, found = await plan(folder)
        assert (code, found["notes"]) == (0, [])
        what = {one["name"]: (one["what"], one["before"]) for one in found["policies"]}
        assert what["feed"] == ("changed", before)
        assert found["users"][0]["policy"] == pytest.approx(0.1)
        # somebody edits the root while the server is asked about something else: ids are the server's, users unknown
        elsewhere = shutil.copytree(root, tmp_path / "elsewhere")
        (elsewhere / "policies" / "feed.yaml").write_text(FEED.replace("value: 1", "value: 0.5"))
        args = ("plan", folder, "--root", elsewhere, "--admin", server.admin, "--json")
        found = json.loads((await asyncio.to_thread(run, *args)).stdout)
        assert [one["before"] for one in found["policies"] if one["name"] == "feed"] == [before]
        assert found["users"] == []
        assert "does not serve what" in found["notes"][0]
        assert (root / "state" / "policies" / f"{before}.json").is_file()
    diffed = run("diff", before, folder / "feed.yaml", "--root", root)
    assert "param w value: 1 -> 2" in diffed.stdout
