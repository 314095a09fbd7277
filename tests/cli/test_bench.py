import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import bench
from app.cli.bench import app


@pytest.fixture
def cli():
    return CliRunner()


@pytest.fixture
def requests(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"context": {"history": ["a"]}, "k": 1}\n\n{"context": {"history": []}, "k": 1}\n')
    return file


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"versions": {"weights": "w1"}}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_load_prints_a_table_and_writes_json(cli, server, requests, tmp_path):
    out = tmp_path / "out.json"
    done = cli.invoke(app, ["load", "--url", server, "--requests", str(requests), "--rate", "50", "--seconds", "0.3",
                            "--json", str(out)])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "p99.9" in done.stdout
    report = json.loads(out.read_text())
    assert report["answered"] == report["sent"] > 0
    assert report["versions"] == {"weights": {"w1": report["sent"]}}
    assert {"latency_ms", "late_ms", "offered_per_s", "achieved_per_s", "errors", "seed"} <= set(report)


def test_load_exits_1_when_nothing_was_answered(cli, requests):
    done = cli.invoke(app, ["load", "--url", "http://127.0.0.1:1", "--requests", str(requests), "--seconds", "0.2"])
    assert done.exit_code == 1
    assert "connect_failed" in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--url", "nonsense"], "expected http://host:port"),
        (["--rate", "0"], "rate"),
        (["--requests", "/nowhere"], "No such file"),
        (["--bogus"], "bogus"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(cli, requests, change, words):
    done = cli.invoke(app, ["load", "--url", "http://127.0.0.1:1", "--requests", str(requests), *change])
    assert done.exit_code == 2
    assert words in done.output


def test_an_empty_request_file_is_wrong_usage(cli, tmp_path):
    (tmp_path / "empty").write_text("\n")
    done = cli.invoke(app, ["load", "--url", "http://127.0.0.1:1", "--requests", str(tmp_path / "empty")])
    assert done.exit_code == 2
    assert "holds no requests" in done.output


def test_other_names_run_the_clone_s_scripts_with_their_arguments(cli, tmp_path, monkeypatch, capfd):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "my_figure.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    done = cli.invoke(app, ["my-figure", "--json", "x", "y"])
    assert done.exit_code == 3
    assert capfd.readouterr().out == "['--json', 'x', 'y']\n"
    missing = cli.invoke(app, ["other"])
    assert missing.exit_code == 2
    assert "known here: load, my-figure" in missing.stderr


def test_help_behind_a_name_is_that_of_the_script(cli, tmp_path, monkeypatch, capfd):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "some.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    assert cli.invoke(app, ["some", "--help"]).exit_code == 0
    assert capfd.readouterr().out == "['--help']\n"


def test_outside_a_clone_other_names_say_what_is_missing(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    done = cli.invoke(app, ["figure"])
    assert done.exit_code == 2
    assert "need a clone's bench/" in done.stderr


def test_the_load_generator_does_not_import_the_engine():
    import subprocess

    code = "import sys, app.cli.bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_lists_every_measurement_of_the_clone_with_what_it_says_of_itself(cli, tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "my_figure.py").write_text('"""How fast\nit is: ms.\n\nUsage."""\nimport nothing_like_that\n')
    (tmp_path / "bench" / "_part.py").write_text('"""No measurement."""\n')
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    said = " ".join(cli.invoke(app, ["--help"]).output.split())
    assert "my-figure How fast it is: ms." in said
    assert "Usage." not in said.partition("Measurements")[2]
    assert "part" not in said.partition("Measurements")[2]


def test_every_measurement_of_this_clone_says_what_it_is(monkeypatch):
    monkeypatch.setattr(bench, "CLONE", Path(__file__).parents[2])
    for name, file in bench.measurements().items():
        assert bench._about(file), name
    assert {"attention", "selection", "steps", "e2e", "rest", "cutover"} <= set(bench.measurements())


def test_outside_a_clone_help_lists_load_only(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    assert "Measurements" not in cli.invoke(app, ["--help"]).output
