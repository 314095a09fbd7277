from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from app.policies.check_contract import Catalogue
from app.policies.load import compile_folder, snapshot
from app.policies.source import MAX_BYTES
from tests.policies.contracts import BASE, contract


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "policies"
    root.mkdir()
    (root / "base.yaml").write_text(BASE)
    return root


def load(folder, catalogue=None):
    return compile_folder(snapshot(folder), contract(), catalogue)


def test_each_file_becomes_a_plan_or_diagnostics(folder):
    (folder / "good.yaml").write_text("widebeam: 1\nextends: base\nwidths: [8, 8, 8]\n")
    (folder / "bad.yaml").write_text("widebeam: 1\nextends: base\nwidth: [8, 8, 8]\n")
    (folder / "root.yaml").write_text("widebeam: 1\nabstract: true\n")
    got = load(folder)
    assert sorted(plan.policy for plan in got.plans()) == ["base", "good"]
    assert got.plan("good").widths == (8, 8, 8)
    assert got.plan("bad") is got.plan("root") is got.plan("nobody") is None
    assert [one.rule.code for one in got.policies["bad"].errors] == ["S007"]
    status = got.status()
    assert {name: one["state"] for name, one in status.items()} == {"bad": "rejected", "base": "live", "good": "live"}
    assert status["bad"]["errors"][0]["line"] == 3
    assert got.rejections()[0][0] == "bad"
    assert "policies/bad.yaml:3:1: error S007" in got.rejections()[0][1]


def test_the_default_is_base_unless_traffic_says_otherwise(folder):
    assert load(folder).default == "base"
    (folder / "feed.yaml").write_text("widebeam: 1\nextends: base\n")
    (folder / "traffic.yaml").write_text("widebeam: 1\nkind: traffic\ndefault: feed\n")
    got = load(folder)
    assert (got.default, got.findings) == ("feed", ())
    assert "traffic" not in got.policies


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("widebeam: 1\nkind: traffic\ndefault: nobody\n", "E002"),
        ("widebeam: 1\nkind: traffic\ndefault: root\n", "E002"),
        ("widebeam: 1\nkind: experiment\ndefault: base\n", "S011"),
        ("widebeam: 1\ndefault: base\n", "S009"),
        ("kind: traffic\ndefault: base\n", "S009"),
        ("widebeam: 1\nkind: traffic\nlayers: {a: {salt: x, slots: 3}}\n", "S007"),
        ("widebeam: 1\nkind: traffic\ndefualt: base\n", "S007"),
        ("widebeam: 1\nkind: traffic\ndefault: base\ndefault: base\n", "S003"),
        ("[", "S002"),
        ("", "S010"),
    ],
)
def test_a_bad_traffic_file_is_reported_and_serves_nobody_else(folder, text, code):
    (folder / "root.yaml").write_text("widebeam: 1\nabstract: true\n")
    (folder / "traffic.yaml").write_text(text)
    got = load(folder)
    assert code in {one.rule.code for one in got.findings}
    assert got.rejections()[-1][0] == ""


def test_leftovers_of_editors_and_files_of_other_kinds_are_passed_over(folder):
    for name in (
        ".base.yaml.swp",
        "_draft.yaml",
        "base.yaml~",
        "x.yaml.tmp",
        "y.bak",
        "4913",
        "#base.yaml#",
        "README",
        "KILL",
    ):
        (folder / name).write_bytes(b"\xff\x00")
    got = load(folder)
    assert list(got.policies) == ["base"]
    assert got.findings == ()


@pytest.mark.parametrize("name", ["Feed.yaml", "feed-new.yaml", "1st.yaml", "é.yaml", f"{'a' * 64}.yaml", "feed.yml"])
def test_names_that_no_policy_can_have_are_reported(folder, name):
    (folder / name).write_text("widebeam: 1\n")
    got = load(folder)
    assert [(one.rule.code, one.span.file) for one in got.findings] == [("S016", f"policies/{name}")]
    assert list(got.policies) == ["base"]


def test_a_folder_that_may_not_be_read_is_reported(folder, monkeypatch):
    (folder / "experiments").mkdir()

    def forbidden(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)  # nothing is forbidden to root
    got = snapshot(folder)
    assert (got.sources, got.experiments) == ({}, {})
    said = [(file, code, message) for file, code, message, _ in got.refused]
    denied = "S016", "cannot be read: Permission denied"
    assert said == [("policies", *denied), ("policies/experiments", *denied)]


@pytest.mark.parametrize("name", [b"x\xff.yaml", b"x\xff.yml"])
def test_a_name_that_is_no_text_is_reported_in_words_that_can_be_written_down(folder, name):
    os.close(os.open(os.fsencode(folder) + b"/" + name, os.O_CREAT))
    (found,) = load(folder).findings
    assert (found.rule.code, found.span.file) == ("S016", f"policies/x\\udcff{name[2:].decode()}")
    msgspec.json.encode(found.data())


def test_links_inside_the_folder_are_followed_and_others_refused(folder, tmp_path):
    data = folder / "..d1"
    data.mkdir()
    (data / "feed.yaml").write_text("widebeam: 1\nextends: base\n")
    (folder / "..data").symlink_to("..d1")
    (folder / "feed.yaml").symlink_to("..data/feed.yaml")  # as Kubernetes lays out a ConfigMap
    outside = tmp_path / "outside.yaml"
    outside.write_text("widebeam: 1\n")
    (folder / "stolen.yaml").symlink_to(outside)
    (folder / "gone.yaml").symlink_to("missing.yaml")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    got = load(folder)
    assert got.plan("feed") is not None
    assert sorted((one.span.file, one.rule.code) for one in got.findings) == [
        ("policies/gone.yaml", "S016"), ("policies/loop.yaml", "S016"), ("policies/stolen.yaml", "S016"),
    ]  # fmt: skip


def test_a_folder_and_a_pipe_named_like_a_policy_do_not_hang_the_loader(folder):
    (folder / "dir.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    assert [one.rule.code for one in load(folder).findings] == ["S016", "S016"]


def test_what_is_no_file_is_called_what_it_is(folder):
    (folder / "dir.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "secret.yaml").write_text("widebeam: 1\n")
    (folder / "secret.yaml").chmod(0)
    said = {one.span.file: one.message for one in load(folder).findings}
    assert said["policies/dir.yaml"] == "a folder stands where a file should"
    assert said["policies/pipe.yaml"] == "a pipe stands where a file should"
    if os.geteuid():  # nothing is unreadable to root
        assert said["policies/secret.yaml"] == "the file cannot be read: Permission denied"


def test_a_folder_that_leads_out_of_its_root_is_not_read(folder, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "policies").symlink_to(folder)
    assert snapshot(tmp_path / "root" / "policies").sources.keys() == {"base"}
    out = snapshot(tmp_path / "root" / "policies", root=tmp_path / "root")
    assert (out.sources, out.traffic, out.experiments) == ({}, None, {})
    assert [one[2] for one in out.refused] == ["the folder is a link that leads out of the root"]
    assert snapshot(tmp_path / "root" / "policies", root=tmp_path).sources.keys() == {"base"}  # inside of that one


def test_a_huge_file_is_refused_without_being_read(folder):
    with (folder / "huge.yaml").open("wb") as file:
        file.truncate(50 * 2**20)
    assert len(snapshot(folder).sources["huge"].data) == MAX_BYTES + 1
    assert load(folder).policies["huge"].errors[0].message == f"the file has {50 * 2**20} bytes"


def test_experiments_are_read_and_not_passed_over(folder):
    (folder / "experiments").mkdir()
    assert load(folder).findings == ()
    (folder / "experiments" / "one.yaml").write_text("widebeam: 2\n")
    (folder / "experiments" / "two.yml").write_text("widebeam: 1\n")
    (folder / "experiments" / ".three.yaml").write_text("widebeam: 1\n")
    found = load(folder).findings
    assert {one.span.file for one in found} == {"policies/experiments/one.yaml", "policies/experiments/two.yml"}
    assert {"S009", "S016", "S017"} == {one.rule.code for one in found}


def test_a_missing_folder_has_no_policies_and_no_default_plan(tmp_path):
    got = load(tmp_path / "nowhere")
    assert (dict(got.policies), got.plan(got.default)) == ({}, None)


def test_the_id_of_the_set_follows_what_can_be_served(folder):
    one = load(folder).id
    (folder / "base.yaml").write_text("# a comment\n" + BASE)
    assert load(folder).id == one
    (folder / "feed.yaml").write_text("widebeam: 1\nwidths: [1, 1, 1]\n")
    two = load(folder).id
    assert two != one
    (folder / "traffic.yaml").write_text("widebeam: 1\nkind: traffic\ndefault: feed\n")
    assert load(folder).id not in (one, two)


def test_prefixes_of_the_catalogue_reach_the_checks(folder):
    (folder / "feed.yaml").write_text("widebeam: 1\nwidths: [8, 8, 8]\n")
    got = load(folder, Catalogue((4, 5, 6)))
    assert [one.rule.code for one in got.policies["feed"].findings] == ["K004"] * 3
