"""Load levels and fields of requests over real sockets: said in the answer, recorded, and asked again."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests import support
from tests.served.process import PATIENCE_S, serving

SIZES = (4, 5, 6)
STEPS = "steps:\n  all:\n    rank: score - 0.2 * sibling\n"
POLICIES = {
    "base": "widebeam: 1\nwidths: [4, 6, 8]\nload:\n  busy: {widths: [1, 2, 3]}\n  quiet: {widths: [4, 12, 20]}\n"
    + STEPS,
    "as_busy": "widebeam: 1\nwidths: [1, 2, 3]\n" + STEPS,
    "as_normal": "widebeam: 1\nwidths: [4, 6, 8]\n" + STEPS,
    "as_quiet": "widebeam: 1\nwidths: [4, 12, 20]\n" + STEPS,
    "fields": 'widebeam: 1\nfinal:\n  mask: position > user.skip or ctx.device == "tv"\n',
    "needs": "widebeam: 1\nfinal: {score: score + user.taste}\n",
}
FILE = """rows = 4096
batch = 1
context = 64
[load]
busy = 0.05
quiet = 0.01
window_s = 0.05
hold_s = 1.0
[request.user]
skip = {default = 2, low = 0, high = 40}
taste = {}
[request.ctx]
device = ["tv", "phone"]
[log]
requests = 1.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return support.write_root(tmp_path_factory.mktemp("load") / "root", SIZES, policies=POLICIES, limits=FILE)


@pytest.fixture(scope="module")
def server(root):
    with serving(root) as running:
        yield running.ready()


def plain(answer):
    return [(item["id"], item["score"]) for item in answer["items"]]


def test_an_answer_says_its_level_and_is_that_of_the_levels_widths(server):
    server.until(lambda: server.status()["load"]["level"] == "quiet", "quiet")
    answer = server.ask("i1", k=30).json()
    assert answer["load"] == "quiet"
    written = server.ask("i1", k=30, policy="as_quiet").json()
    assert "load" not in written
    assert plain(answer) == plain(written)
    assert len(plain(answer)) == 20


def many_at_once(server, name):
    """Answers of clients that ask together until one of them is told that the server is busy."""
    number, answers, end = count(), [], time.monotonic() + PATIENCE_S

    def ask(_):
        return server.ask("i1", "i2", k=30, request_id=f"{name}-{next(number)}").json()

    with ThreadPoolExecutor(12) as pool:
        while not any(answer["load"] == "busy" for answer in answers) and time.monotonic() < end:
            answers += pool.map(ask, range(36))
    return answers


def test_many_at_once_make_it_busy_and_calm_makes_it_quiet_again(server):
    answers = many_at_once(server, "many")
    by_level = {level: [plain(one) for one in answers if one["load"] == level] for level in ("quiet", "normal", "busy")}
    assert by_level["busy"], {level: len(found) for level, found in by_level.items()}
    for level, found in by_level.items():
        written = plain(server.ask("i1", "i2", k=30, policy=f"as_{level}").json())
        for one in found:
            assert [item for item, _ in one] == [item for item, _ in written]
    assert server.metric('widebeam_load_requests_total{level="busy"}') >= len(by_level["busy"])
    server.until(lambda: server.metric('widebeam_load_level{level="quiet"}') == 1, "quiet")
    assert server.ask("i1", k=30).json()["load"] == "quiet"


def test_fields_that_the_policy_reads_are_used_and_refused_with_their_path(server):
    whole = server.ask("i1", k=40, policy="fields", ctx={"device": "tv"}).json()["items"]
    assert server.ask("i1", k=40, policy="fields").json()["items"] == whole[2:]
    assert server.ask("i1", k=40, policy="fields", user={"skip": 5}).json()["items"] == whole[5:]
    for policy, user, path in (("fields", {"skip": 41}, "$.user.skip"), ("needs", {}, "$.user.taste")):
        refused = server.ask("i1", policy=policy, user=user)
        assert refused.status_code == 422
        assert refused.json()["error"]["path"] == path
    assert server.ask("i1", policy="as_normal", user={"skip": 41}).status_code == 200
    assert server.ask("i1", policy="needs", user={"taste": 0.5}).status_code == 200


def test_recorded_requests_are_asked_again_at_their_level_with_their_fields(server, root):
    asked = {
        "again-quiet": {},
        "again-fields": {"policy": "fields", "user": {"skip": 7}},
        "again-tv": {"policy": "fields", "ctx": {"device": "tv"}},
    }
    busy = next(one["request_id"] for one in many_at_once(server, "again-busy") if one["load"] == "busy")
    server.until(lambda: server.status()["load"]["level"] == "quiet", "quiet")
    for name, fields in asked.items():
        assert server.ask("i3", k=30, request_id=name, **fields).status_code == 200

    def records():
        texts = [file.read_text() for file in (root / "state" / "requests").glob("*.jsonl")]
        lines = [line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]  # whole ones
        return {one["request_id"]: one for one in map(json.loads, lines)}

    server.until(lambda: {*asked, busy} <= records().keys(), "recorded")
    written = records()
    assert written["again-quiet"]["load"] == "quiet"
    assert all(written[name]["load"] for name in asked)  # of policies without levels, too
    log = root / "some.jsonl"
    log.write_text("".join(json.dumps(written[name]) + "\n" for name in (*asked, busy)))
    found = CliRunner().invoke(
        app, ["policy", "replay", str(log), "--a", "base", "--b", "fields", "--root", str(root), "--json"]
    )
    assert found.exit_code == 0, found.output
    assert [one["recorded"] for one in json.loads(found.output)["records"]] == [True] * 4


def test_a_file_is_answered_at_the_level_that_is_asked_for(root, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"context": {"history": ["i1"]}, "k": 30}) + "\n")
    for flags, level, items in (((), "normal", 8), (("--load", "busy"), "busy", 3)):
        call = ["recommend", "--root", str(root), "--in", str(source), "--out", str(out), *flags]
        result = CliRunner().invoke(app, call)
        assert result.exit_code == 0, result.output
        answer = json.loads(out.read_text())
        assert (answer["load"], len(answer["items"])) == (level, items)
