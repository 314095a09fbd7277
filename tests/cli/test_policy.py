from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from app.cli import policy
from app.cli.policy_files import Deployed
from app.policies.builtin import BUILT_IN
from tests.policies.contracts import BASE, contract
from tests.support import deployment_of, write_root, write_vocab

BAD = "widebeam: 1\nextends: base\nsteps:\n  all:\n    score: parent + logpp\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "deployed", lambda root: Deployed(root, deployment_of((4, 5, 6)), contract(), None))
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "base.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(policy.app, [str(arg) for arg in args])


def test_check_passes_good_files_with_exit_0(run):
    result = run("check")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "0 errors, 0 warnings, 0 notes\n")


def test_check_prints_what_is_wrong_with_exit_1(run, tmp_path):
    (tmp_path / "policies" / "feed.yaml").write_text(BAD)
    for args in ((), ("policies",), ("policies/feed.yaml",), ("policies/base.yaml", "policies/feed.yaml")):
        result = run("check", *args)
        assert result.exit_code == 1
        assert result.stdout == (
            "policies/feed.yaml:5:21: error T001: unknown name `logpp`\n"
            "     5 |     score: parent + logpp\n"
            "       |                     ^^^^^\n"
            "  help: did you mean `logp`?\n"
        )
    assert run("check", "policies/base.yaml").exit_code == 0


def test_check_gives_machines_the_fields_of_an_editor(run, tmp_path):
    (tmp_path / "policies" / "feed.yaml").write_text(BAD)
    result = run("check", "--json")
    assert result.exit_code == 1
    [one] = json.loads(result.stdout)
    assert (one["file"], one["line"], one["col"], one["end_col"], one["code"]) == (
        "policies/feed.yaml",
        5,
        21,
        26,
        "T001",
    )


def test_check_looks_at_traffic_and_at_names(run, tmp_path):
    (tmp_path / "policies" / "traffic.yaml").write_text("widebeam: 1\nkind: traffic\ndefault: bass\n")
    (tmp_path / "policies" / "Feed.yaml").write_text(BASE)
    assert run("check", "policies/traffic.yaml").exit_code == 1
    assert "S016" in run("check", "policies/Feed.yaml").stdout
    assert "S016" not in run("check", "policies/base.yaml").stdout


def test_of_several_paths_it_is_said_what_was_checked_and_on_which_contract(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.yaml").write_text("widebeam: 1\nsteps: {all: {mask: trie}}\n")
    result = run("check", str(tmp_path / "a"), str(tmp_path / "b"))
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert [line.partition(", on the contract of ")[0] for line in lines[:-1]] == [
        f"{tmp_path}/a: a",
        f"{tmp_path}/b: b",
    ]


def test_warnings_alone_exit_0(run, tmp_path):
    (tmp_path / "policies" / "feed.yaml").write_text("widebeam: 1\nwidths: [100, 100, 100]\n")
    result = run("check")
    assert (result.exit_code, result.stderr) == (0, "0 errors, 0 warnings, 1 note\n")


def test_wrong_usage_exits_2(run):
    assert run("check", "nowhere.yaml").exit_code == 2
    assert run("explain", "nobody").exit_code == 2
    assert run("help", "Z999").exit_code == 2
    assert run("chekc").exit_code == 2


def test_a_folder_without_policies_is_wrong_usage_and_not_a_pass(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("check", tmp_path / "empty").exit_code == 2


def test_explain_and_show_print_the_plan(run):
    text = run("explain", "base")
    assert text.exit_code == 0
    assert "step 1  rows=1 codes=64 width=256 planned=64" in text.stdout
    assert "score        parent + logp  <- all of policies/base.yaml:5" in text.stdout
    data = json.loads(run("explain", "policies/base.yaml", "--json").stdout)
    shown = json.loads(run("show", "base").stdout)
    assert data["policy_id"] == shown["policy_id"]
    assert shown["resolved"]["steps"][0]["mask"] == "trie"


def test_explain_of_a_bad_policy_says_why_with_exit_1(run, tmp_path):
    (tmp_path / "policies" / "feed.yaml").write_text(BAD)
    result = run("explain", "feed")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "T001" in result.stderr


def test_help_prints_what_an_operator_takes_and_lists_them_all(run, monkeypatch):
    assert run("help", "top_p").stdout.splitlines()[:2] == [
        "top_p(p)   (under `keep`, of Widebeam, version 1)",
        "codes while the mass of better ones is below p",
    ]
    assert "diverse(groups, penalty)" in run("help").stdout
    slip = run("help", "topp")
    assert slip.exit_code == 2
    assert "did you mean `top_p`?" in " ".join(slip.stderr.replace("│", " ").split())
    monkeypatch.setattr(policy, "installed", lambda: replace(BUILT_IN, broken={"gap": "some-package 1 is broken"}))
    broken = run("help", "gap")
    assert broken.exit_code == 2
    assert "some-package 1 is broken" in " ".join(broken.stderr.replace("│", " ").split())


def test_help_knows_the_words_of_the_language(run):
    assert run("help", "seen").stdout.startswith("condition in `mask`, `score`, `rank`")
    keep = run("help", "keep").stdout
    assert keep.startswith("phase of a step: cuts the tail of each row; takes a list of operators\n")
    assert "top_k(n)" in keep
    assert "diverse" not in keep
    both = run("help", "where").stdout.splitlines()
    assert [line.partition(":")[0] for line in both] == ["function where(condition, a, b)", "in experiments"]
    assert run("help").stdout.splitlines()[-1].startswith("words: about, above, ")
    slip = run("help", "widht")
    assert slip.exit_code == 2
    assert "did you mean `width`?" in " ".join(slip.stderr.replace("│", " ").split())


def test_help_prints_the_page_of_a_code(run):
    result = run("help", "k003")
    assert result.exit_code == 0
    assert result.stdout.startswith("# K003: a width is above the contract's limit\n")


def test_fmt_formats_in_place_and_checks_without_writing(run, tmp_path):
    file = tmp_path / "policies" / "feed.yaml"
    file.write_text("widebeam: 1\nsteps: {all: {score: parent+logp}}\n")
    assert run("fmt", "--check", "policies").exit_code == 1
    assert "parent+logp" in file.read_text()
    assert run("fmt", "policies").exit_code == 0
    assert file.read_text() == "widebeam: 1\nsteps: {all: {score: parent + logp}}\n"
    assert run("fmt", "--check", "policies").exit_code == 0
    file.write_text("a: [")
    assert run("fmt", "policies").exit_code == 1
    assert file.read_text() == "a: ["


def test_the_schema_is_printed_as_json(run):
    assert json.loads(run("schema").stdout)["title"] == "Widebeam selection policy"


def test_a_real_root_gives_contract_and_catalogue(tmp_path, monkeypatch):
    root = write_root(tmp_path / "root", policies={"list": "widebeam: 1\nfinal: {mask: item.stock > 1}\n"})
    result = CliRunner().invoke(policy.app, ["check", "--root", str(root)])
    assert result.exit_code == 1
    assert "error T002: item has no `stock` in this deployment" in result.stdout
    shown = CliRunner().invoke(policy.app, ["explain", "base", "--root", str(root)])
    assert "planned=40" in shown.stdout  # 40 items


def test_a_file_that_is_no_policy_file_is_wrong_usage(run, tmp_path):
    (tmp_path / "policies" / "notes.txt").write_text("hello")
    assert run("check", "policies/notes.txt").exit_code == 2


def test_names_that_a_root_declares_are_explained(tmp_path):
    root = write_root(tmp_path / "root")

    def run(*args: str):
        return CliRunner().invoke(policy.app, list(args))

    with (root / "deployment.toml").open("a") as file:
        file.write('[attributes]\nknown = {of = "year", as = "any"}\n[request.user]\nage = {low = 0, high = 9}\n')
    items = [{"id": f"i{n}", "sid": [n, 0, 0], "attrs": {"year": 1990 + n}} for n in range(3)]
    write_vocab(root, (4, 5, 6), items, version="v2")
    known = "flag: whether an item below is one of 3 items by `year`"
    assert run("help", "attr.known", "--root", str(root)).output == f"attr.known: {known}\n"
    every = run("help", ".", "--root", str(root)).output.splitlines()
    assert [line.partition(":")[0] for line in every] == ["attr.known", "item.known", "item.year", "user.age"]
    assert run("help", "user.", "--root", str(root)).output == "user.age: number 0 to 9\n"
    wrong = run("help", "attr.knwon", "--root", str(root))
    assert wrong.exit_code == 2 and "did you mean `attr.known`?" in wrong.output
    assert f"attr.known ({known})" in run("schema", "--root", str(root)).output
    assert "attr.known" not in run("schema").output
    file = root / "policies" / "new.yaml"
    file.write_text("widebeam: 1\nsteps: {all: {mask: trie and attr.known}}\n")
    assert f"  reads attr.known, {known}\n" in run("explain", "new", "--root", str(root)).output
