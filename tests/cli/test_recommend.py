"""`widebeam recommend`: a file of requests through the server's runtime."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app
from tests import support

RUNNER = CliRunner()


def run(root, bodies, out):
    source = root / "requests.jsonl"
    source.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return RUNNER.invoke(app, ["recommend", "--root", str(root), "--in", str(source), "--out", str(out)])


def test_answers_come_in_the_order_of_the_requests(tmp_path):
    root, out = support.write_root(tmp_path / "root"), tmp_path / "answers.jsonl"
    bodies = [{"context": {"history": [f"i{n % 40}"]}, "k": 1 + n % 7, "request_id": f"r{n}"} for n in range(50)]
    result = run(root, bodies, out)
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["request_id"] for answer in answers] == [f"r{n}" for n in range(50)]
    assert [len(answer["items"]) for answer in answers] == [1 + n % 7 for n in range(50)]


def test_a_bad_request_has_its_error_in_its_place_and_the_exit_code_says_so(tmp_path):
    root, out = support.write_root(tmp_path / "root"), tmp_path / "answers.jsonl"
    result = run(root, [{"context": {"history": []}, "k": 2}, {"context": {"history": []}, "k": 0}], out)
    assert result.exit_code == 1
    good, bad = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(good["items"]) == 2
    assert (bad["line"], bad["error"]["path"]) == (2, "$.k")


def test_files_that_are_not_there_are_wrong_usage_before_anything_is_loaded(tmp_path):
    files = {"--root": tmp_path, "--in": tmp_path / "nope.jsonl", "--out": tmp_path / "answers.jsonl"}
    cases = [({}, "nope.jsonl' does not exist"), ({"--in": Path(__file__), "--out": tmp_path / "no" / "a"}, "no' does")]
    for others, said in cases:
        given = [word for name, file in {**files, **others}.items() for word in (name, str(file))]
        result = RUNNER.invoke(app, ["recommend", *given])
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())


def test_a_root_that_cannot_serve_is_said_and_nothing_is_written(tmp_path):
    root, out = support.write_root(tmp_path / "root"), tmp_path / "answers.jsonl"
    (root / "weights" / "v1" / "model.safetensors").write_bytes(b"")
    result = run(root, [{"context": {"history": []}, "k": 2}], out)
    assert result.exit_code == 1
    assert not out.exists()
