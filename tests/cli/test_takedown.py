"""`widebeam takedown`: from a person's file of ids to a server that gives none of them."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.runtime.takedowns import load_takedowns
from tests.live_support import live_server
from tests.runtime.test_cutover import state_of, world


def run(*arguments):
    return CliRunner().invoke(app, ["takedown", *map(str, arguments)])


@pytest.fixture
def root(tmp_path):
    return world(tmp_path)


def listed(tmp_path, *ids):
    file = tmp_path / "ids.txt"
    file.write_text("".join(f"{one}\n" for one in ids))
    return file


async def test_a_file_of_ids_takes_them_down_on_a_running_server(tmp_path, root):
    async with live_server(root) as server:
        first = [item["id"] for item in (await server.recommend("i1", k=100))["items"]]
        done = await asyncio.to_thread(run, "publish", listed(tmp_path, *first[:2]), "--root", root)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{root}/takedowns/v1: 2 items taken down, digest ")
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v1")
        left = [item["id"] for item in (await server.recommend("i1", k=100))["items"]]
        assert not {*first[:2]} & {*left}
        done = await asyncio.to_thread(run, "publish", listed(tmp_path, first[1]), "--root", root)
        assert done.stderr == f"warning: 1 item of v1 comes back: {first[0]}\n"
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v2")


def test_what_a_list_may_get_wrong_is_said_and_it_is_published_all_the_same(tmp_path, root):
    done = run("publish", listed(tmp_path, "i1", "nobody", "no one"), "--root", root, "--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["version"], shown["items"]) == (0, "v1", 3)
    assert shown["warnings"] == ["vocab v1 does not know 2 ids: nobody, no one"]
    assert load_takedowns(root / "takedowns" / "v1")[0].ids == ("i1", "nobody", "no one")
    done = run("publish", listed(tmp_path), "--root", root)
    assert "nothing is taken down any more" in done.stdout
    assert "3 items of v1 come back: i1, no one, nobody" in done.stderr
    (root / "release.json").write_text('{"takedowns": "v2"}')
    done = run("publish", listed(tmp_path, "i1"), "--root", root, "--version", "v0")
    assert "v0 comes before v2" in done.stderr
    assert "release.json asks for v2: v0 waits" in done.stderr
    rows = json.loads(run("list", "--root", root, "--json").stdout)
    assert [(one["version"], one["items"]) for one in rows] == [("v2", 0), ("v1", 3), ("v0", 1)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"i1\n\ni2\n", "line 2: an id has 1 to"),
        (b"\xef\xbb\xbfi1\n", "byte order mark"),
        (b"i1\n\xff\n", "byte 3 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_list_is_refused_with_its_place_and_leaves_nothing(data, says, tmp_path, root):
    file = tmp_path / "ids.txt"
    file.write_bytes(data)
    done = run("publish", file, "--root", root)
    assert done.exit_code == 1
    assert says in str(done.exception)
    assert str(file) in str(done.exception)
    assert not (root / "takedowns").exists()


def test_a_name_that_exists_and_a_folder_that_is_no_root_are_refused(tmp_path, root):
    file = listed(tmp_path, "i1")
    assert run("publish", file, "--root", root, "--version", "v1").exit_code == 0
    assert run("publish", file, "--root", root, "--version", "v1").exit_code == 1
    assert run("publish", file, "--root", tmp_path).exit_code == 1
    (root / "takedowns" / "v1" / "items.txt").write_text("i2\n")
    (root / "takedowns" / "v9").mkdir()
    done = run("list", "--root", root)
    assert done.exit_code == 1
    assert "MANIFEST.json" in done.stdout


async def test_a_plain_file_and_a_folder_without_a_manifest_are_named_with_the_reason(root):
    (root / "takedowns" / "v3").mkdir(parents=True)
    async with live_server(root) as server:
        (root / "takedowns" / "bad-items.txt").write_text("i1\n")
        (root / "takedowns" / os.fsdecode(b"\xff.txt")).write_text("i1\n")
        (root / "takedowns" / ".tmp-1").mkdir()
        (root / "takedowns" / "v4").mkdir()
        status = await server.settles(
            lambda status: (
                None not in [state_of(status, "takedowns", name)["state"] for name in ("bad-items.txt", "v4")]
            )
        )
        assert state_of(status, "takedowns", "bad-items.txt")["reason"]["code"] == "no_version"
        for version in ("v3", "v4"):
            found = state_of(status, "takedowns", version)
            assert (found["state"], found["reason"]["code"]) == ("incomplete", "manifest_missing")
        assert state_of(status, "takedowns", ".tmp-1")["state"] is None
        await server.settles(lambda status: state_of(status, "takedowns", "\\udcff.txt")["state"] == "incomplete")
        said = {line["location"] for line in server.events("takedowns_ignored")}
        assert said == {"takedowns/bad-items.txt", "takedowns/\\udcff.txt"}
        (root / "takedowns" / "bad-items.txt").unlink()
        await server.settles(lambda status: state_of(status, "takedowns", "bad-items.txt")["state"] is None)
