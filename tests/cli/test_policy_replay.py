"""`widebeam policy replay` from a server's own records to a table."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests import support


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    narrow = "widebeam: 1\nwidths: [2, 3, 4]\n"
    root = support.write_root(
        tmp_path_factory.mktemp("root"), policies={"narrow": narrow}, extra="[log]\nrequests = 1.0\n"
    )
    lines = [{"request_id": f"r{n}", "context": {"history": [f"i{n}", "i2"]}, "k": 6} for n in range(8)]
    (root / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("recommend", "--root", root, "--in", root / "in.jsonl", "--out", root / "out.jsonl").exit_code == 0
    return root


def replayed(root, *more):
    return run("policy", "replay", root / "state" / "requests", "--root", root, "--a", "base", "--b", "narrow", *more)


def test_recorded_requests_come_again_and_are_compared(root):
    before = sorted((root / "state" / "requests").iterdir())
    result = replayed(root, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["requests"], found["failed"], found["reproduced"], found["comparable"]) == (8, 0, 8, 8)
    assert found["underfilled"] == [0, 1]
    assert 0 < found["overlap"] < 1
    assert {one["request_id"] for one in found["records"]} == {f"r{n}" for n in range(8)}
    assert all(one["items"] == [6, 4] for one in found["records"])
    assert sorted((root / "state" / "requests").iterdir()) == before  # nothing is recorded about a replay


def test_people_get_a_table_and_a_summary(root):
    result = replayed(root, "--limit", "3")
    assert result.exit_code == 0
    assert result.stdout.count("\nr") == 3
    assert "3 requests, 0 failed\noverlap@k     mean 0." in result.stdout
    assert "underfilled   base 0.00%, narrow 100.00%\n" in result.stdout
    assert "as recorded   3 of 3 answers under the versions that gave them\n" in result.stdout


def test_what_cannot_be_replayed_fails(root, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"context": {"history": []}, "k": 100000}\n')
    result = run("policy", "replay", log, "--root", root, "--a", "base", "--b", "narrow")
    assert result.exit_code == 1
    assert f"{log}:1: invalid_request: k is 100000" in result.stdout
    assert run("policy", "replay", log, "--root", root, "--a", "base", "--b", "nope").exit_code == 2
    log.write_text("{\n")
    broken = run("policy", "replay", log, "--root", root, "--a", "base", "--b", "narrow")
    assert broken.exit_code == 1
    assert broken.exception.location == f"{log}:1"
