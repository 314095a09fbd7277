"""Nothing outside of a root is ever opened: not by a relative link, nor by one whose target comes later."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from app.api.admin import Tokens
from app.cli.deployment import read_deployment
from app.config import LOOKS, Unread, read_small
from app.engine.registry import family
from app.engine.safetensors import read_header
from app.engine.tokens import read_json
from app.errors import BadDeployment, LeadsOut, Rejected, unreadable
from app.runtime import state_dir
from app.runtime.contracts import Contracts
from app.runtime.expectations import read_canary
from app.runtime.kill import KillSwitch
from app.runtime.logs import make_log
from app.runtime.reading import model_files
from app.runtime.records import namer
from app.runtime.survey import survey
from app.runtime.takedowns import NOTHING, Takedowns, keep, kept
from tests import support
from tests.api.support import get, until
from tests.live_support import live_server
from tests.runtime.test_cutover import SIZES, Load, Truth, items, serving, weights, world

LEADS_OUT = "is a link that leads out of its folder, which is never followed"


@pytest.fixture
def root(tmp_path):
    return support.write_root(tmp_path / "root")


@pytest.fixture
def opened(monkeypatch):
    """Every file that was opened, links followed."""
    real, found = os.open, []

    def noting(path, *rest, **how):
        if isinstance(path, (str, os.PathLike)):
            found.append(os.path.realpath(path))
        return real(path, *rest, **how)

    monkeypatch.setattr(os, "open", noting)
    return found


def point(link, to):
    """At once, as whoever does it well."""
    beside = link.with_name(".link")
    beside.symlink_to(to)
    beside.replace(link)


def move_out(file):
    """A file lies beside the root, and where it was is a link to it: at once, so that nobody sees neither."""
    target = file.parent
    while not (target / "deployment.toml").exists():
        target = target.parent
    target = target.parent / f"outside-{file.name}"
    if file.is_dir():  # which nothing takes the place of: nobody looks there meanwhile
        shutil.move(file, target)
    else:
        shutil.copy2(file, target)
    point(file, target)
    return str(target)


def as_config_map(folder, name, text):
    """As Kubernetes lays out a ConfigMap."""
    (folder / "..d1").mkdir(parents=True)
    (folder / "..d1" / name).write_text(text)
    (folder / "..data").symlink_to("..d1")
    (folder / name).symlink_to(f"..data/{name}")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("to", ["../out.json", "{}/out.json", "sub/../../out.json"])
@pytest.mark.parametrize(("file", "place"), [("release.json", "release.json"), ("state/pin.json", "state/pin.json")])
def test_what_asks_for_versions_is_not_read_where_it_leads_out(tmp_path, root, opened, file, place, to, there):
    (root / "state").mkdir()
    (root / "sub").mkdir()
    link = root / file
    if place != "release.json":
        to = to.replace("../", "../../", 1) if to.startswith("..") else f"../{to}" if to.startswith("sub") else to
    link.symlink_to(to.format(tmp_path))
    if there:
        (tmp_path / "out.json").write_text('{"weights": "v7"}')
    seen = survey(root, root / "state")
    assert (seen.ask, seen.problem.code, seen.problem.location) == ({}, "path_escape", place)
    assert str(tmp_path / "out.json") not in opened


def test_links_inside_of_the_root_and_as_kubernetes_makes_them_are_followed(root):
    as_config_map(root, "release.json", '{"weights": "v1"}')
    assert survey(root, root / "state").ask == {"weights": "v1"}
    as_config_map(root / "policies", "KILL", "feed\n")
    assert KillSwitch(root / "policies", root / "state").names == {"feed"}
    as_config_map(root / "secrets", "tokens", "read a\n")
    assert Tokens(root / "secrets" / "tokens", make_log(io.BytesIO()), root).right_of(b"a") == "read"
    contract = next((root / "contracts").iterdir())
    text = contract.read_text()
    contract.unlink()
    as_config_map(root / "contracts", contract.name, text)
    deployment, files = read_deployment(root), model_files(root / "weights" / "v1")
    made = Contracts(root).make(family(deployment.family), files, deployment, torch.float32, store=False)
    assert (made.file, made.exported, made.found) == (contract, False, ())


def test_a_root_that_is_a_link_itself_is_a_root(tmp_path, root):
    (root / "release.json").write_text('{"weights": "v1"}')
    (tmp_path / "current").symlink_to("root")
    seen = survey(tmp_path / "current", tmp_path / "current" / "state")
    assert (seen.ask, seen.problem, bool(seen.deployment)) == ({"weights": "v1"}, None, True)
    assert read_deployment(tmp_path / "current") == read_deployment(root)


def test_an_overlay_that_leads_out_is_refused(root, opened):
    target = root.parent / "outside.toml"
    shutil.move(root / "deployment.toml", target)
    (root / "deployment.toml").symlink_to(target)
    with pytest.raises(BadDeployment, match="leads out"):
        read_deployment(root)
    assert survey(root, root / "state").deployment == Unread("path_escape", LEADS_OUT)
    assert str(target) not in opened


def test_a_kill_list_that_leads_out_changes_nothing_and_says_so(root, opened):
    file = root / "policies" / "KILL"
    file.write_text("a\n")
    switch = KillSwitch(root / "policies", root / "state")
    file.write_text("*\n")
    target = move_out(file)
    assert switch.take(switch.read()) == {"a"}
    assert "leads out" in switch.document()[0]["by"]
    switch.post(["b"], [])
    (root / "state" / "killed.json").write_text('["c"]')
    other = move_out(root / "state" / "killed.json")
    assert switch.take(switch.read()) == {"a", "b"}
    assert switch.unreadable
    Path(other).unlink()  # a link to nowhere revives nobody
    assert switch.take(switch.read()) == {"a", "b"}
    assert not {target, other} & set(opened)


def test_the_servers_own_files_are_not_read_where_they_lead_out(root, opened):
    state = root / "state"
    keep(state, Takedowns("v1", "d", "now", ("i1",)))
    assert kept(state).ids == ("i1",)
    state_dir.write(state / "last_good" / "feed.json", b"{}")
    state_dir.write(state / "unit_salt", b"salt")
    targets = {move_out(state / "takedowns.json"), move_out(state / "unit_salt"), move_out(state / "last_good")}
    log = io.BytesIO()
    assert kept(state) == NOTHING
    assert state_dir.load_last_good(state) == {}
    assert namer("hashed", "", state, make_log(log))("u") != namer("hashed", "salt", state, make_log(log))("u")
    assert json.loads(log.getvalue().splitlines()[0])["event"] == "unit_salt_unusable"
    assert not {path for path in opened if any(path.startswith(target) for target in targets)}


def test_tokens_below_the_root_may_not_lead_out_and_others_lie_where_they_lie(tmp_path, root, opened):
    file, log = root / "tokens", io.BytesIO()
    file.write_text("write a\n")
    target = move_out(file)
    assert Tokens(file, make_log(log), root).right_of(b"a") is None
    assert "leads out" in json.loads(log.getvalue())["reason"]
    assert target not in opened
    for elsewhere in (target, root / ".." / Path(target).name):  # named as a place outside: meant so
        assert Tokens(root / elsewhere, make_log(log), root).right_of(b"a") == "write"


def test_contracts_that_lead_out_are_neither_read_nor_written(root, opened):
    deployment, files = read_deployment(root), model_files(root / "weights" / "v1")
    target = move_out(root / "contracts")
    before = sorted(Path(target).iterdir())
    with support.without_exports():
        made = Contracts(root).make(family(deployment.family), files, deployment, torch.float32)
    assert made.exported
    assert [(one.code, one.location) for one in made.found] == [("path_escape", "contracts")]
    assert made.file.parent == root / "state" / "contracts"
    assert sorted(Path(target).iterdir()) == before
    assert not [path for path in opened if path.startswith(target)]


def test_what_a_version_holds_is_not_read_where_it_leads_out(root, opened):
    directory, targets = root / "weights" / "v1", set()
    (directory / "canary.jsonl").write_text("{}\n{}\n")
    for name, read in {
        "config.json": lambda: read_json(directory / "config.json"),
        "model.safetensors": lambda: read_header(directory / "model.safetensors"),
        "canary.jsonl": lambda: read_canary(directory, "weights"),
    }.items():
        targets.add(move_out(directory / name))
        with pytest.raises(Rejected) as caught:
            read()
        assert (caught.value.code, caught.value.location) == ("path_escape", name)
    assert not targets & set(opened)


def test_a_version_that_leads_out_is_not_even_listed(root, monkeypatch):
    (root / "weights" / "v9").symlink_to("/etc", target_is_directory=True)
    real, walked = os.walk, []
    monkeypatch.setattr(os, "walk", lambda top, *rest: walked.append(os.path.realpath(top)) or real(top, *rest))
    survey(root, root / "state")
    assert walked
    assert "/etc" not in walked


def test_a_link_to_itself_leads_nowhere(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LeadsOut):
        read_small(tmp_path / "loop", 9, tmp_path)


@pytest.fixture
def meanwhile(monkeypatch):
    """A list: what others do, one before each opening of `file`, after it was looked where it leads. All of it is done,
    and what was opened is closed again."""
    opening, closing, todo, held = os.open, os.close, [], set()

    def late(path, *rest, **how):
        if Path(path).name != "file":
            return opening(path, *rest, **how)
        if todo:
            todo.pop(0)()
        descriptor = opening(path, *rest, **how)
        held.add(descriptor)
        return descriptor

    monkeypatch.setattr(os, "open", late)
    monkeypatch.setattr(os, "close", lambda descriptor: (closing(descriptor), held.discard(descriptor)))
    yield todo
    assert (todo, held) == ([], set())


@pytest.mark.parametrize("before", [False, True])
def test_a_link_that_is_made_between_a_look_and_the_opening_is_found(tmp_path, meanwhile, before):
    folder, out = tmp_path / "root", tmp_path / "out"
    folder.mkdir()
    out.write_text("secret")
    if before:
        (folder / "file").write_text("mine")
    meanwhile.append(lambda: point(folder / "file", out))
    with pytest.raises(LeadsOut):
        read_small(folder / "file", -1, folder)


def test_a_file_that_is_replaced_between_a_look_and_the_opening_is_read_as_it_is_then(tmp_path, meanwhile):
    file = tmp_path / "..2" / "file"
    as_config_map(tmp_path, "file", "1")

    def update():  # as a ConfigMap's folders are: the new one beside, the link pointed there, the old one removed
        file.parent.mkdir()
        file.write_text("2")
        point(tmp_path / "..data", "..2")
        shutil.rmtree(tmp_path / "..d1")

    meanwhile.append(update)
    assert read_small(tmp_path / "file", -1, tmp_path) == b"2"
    meanwhile.append((tmp_path / "file").unlink)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "file", -1, tmp_path)


def test_a_file_that_never_stays_says_that_it_may_the_next_time(tmp_path, meanwhile):
    as_config_map(tmp_path, "file", "1")
    (tmp_path / "..d2").mkdir()
    (tmp_path / "..d2" / "file").write_text("2")
    meanwhile += [lambda to=f"..d{2 - number % 2}": point(tmp_path / "..data", to) for number in range(LOOKS)]
    with pytest.raises(OSError, match="replaced all the time") as caught:
        read_small(tmp_path / "file", -1, tmp_path)
    assert unreadable(caught.value, "unreadable", None).code == "disk_error"


async def test_what_serves_goes_on_while_a_release_leads_out(root):
    async with live_server(root) as server:
        (root / "release.json").symlink_to("/etc/hostname")
        status = await server.settles(lambda status: "problem" in status["desired"])
        assert status["desired"]["problem"]["code"] == "path_escape"
        assert status["desired"]["problem"]["location"] == "release.json"
        assert (await server.recommend())["items"]
        (root / "release.json").unlink()
        await server.settles(lambda status: "problem" not in status["desired"])


async def test_an_overlay_that_leads_out_is_refused_for_the_same_reason_live_and_at_a_start(root):
    async with live_server(root) as server:
        move_out(root / "deployment.toml")
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert status["deployment"]["reason"] == {
            "code": "path_escape",
            "message": LEADS_OUT,
            "location": "deployment.toml",
        }
        assert (await server.recommend())["items"]
    async with live_server(root, ready=False) as server:
        await until(lambda: server.events("not_ready"))
        ready = (await get(server.public, "/readyz")).json()
        assert ready["reasons"] == [f"path_escape: deployment.toml: {LEADS_OUT}"]


def release(disk, number):
    """Everything that there is of weights and vocabs, and one more of each, in folders of their own."""
    place, before = disk / f"r{number}", disk / f"r{number - 1}"
    shutil.copytree(before, place)
    weights(place, f"v{number}", number)
    support.write_vocab(place, SIZES, items(f"n{number}-"), f"v{number}")
    return place


@pytest.mark.parametrize("how", ["another disk", "ConfigMap"])
async def test_folders_that_are_links_are_pointed_elsewhere_under_load(tmp_path, how):
    root = world(tmp_path)
    disk = tmp_path / "disk" if how == "another disk" else root / "..releases"
    for kind in ("weights", "vocab"):
        (disk / "r1").mkdir(parents=True, exist_ok=True)
        (root / kind).rename(disk / "r1" / kind)
        (root / kind).symlink_to(disk / "r1" / kind if how == "another disk" else f"..data/{kind}")
    (root / "..data").symlink_to(disk / "r1")
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        for number in range(2, 6):
            place = release(disk, number)
            point(root / "..data", place)
            if how == "another disk":
                for kind in ("weights", "vocab"):
                    point(root / kind, place / kind)
            await server.settles(serving(f"v{number}", f"v{number}"))
        await load.end()
        status = await server.status()
        assert status["counters"]["failed"] == status["counters"]["refused"] == 0
        assert serving("v5", "v5")(status)
