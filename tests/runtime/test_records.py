"""Request records: the sample, what a line holds, and that it is enough to ask again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json

import numpy as np
import pytest

from app.config import Log as LogSettings
from app.core import Embeddings, Exposure, HistoryIds, Item, Outcome, Request, Timings, TokenIds, Versions
from app.policies.assign import Assignment, Traffic
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.recorder import Files
from app.runtime.records import SALT_FILE, namer, request_line, sampled

LOG = make_log(io.BytesIO())
OUTCOME = Outcome(
    request_id="r-1",
    items=(Item("a", -0.5, (1, 2, 3)), Item("b", -0.75, (1, 2, 4))),
    status="underfilled",
    reason="width",
    versions=Versions("s", "w", "v", "base", "id", "c"),
    experiments=(Exposure("ranking", "color", "control", "assigned", 0.1),),
    seed=17,
    load=None,
    level="busy",
    unknown_history=0,
    unknown_exclude=0,
    timings=Timings(0.0, 0.0, 0.0, 1.0),
    batch_requests=1,
    batch_rows=1,
)
ASKED = Request(
    "r-1", HistoryIds(("i1", "i2")), 3, user_id="u-7", exclude=("i9",), ctx={"country": "BR"}, user={"age": 31.0}
)


def files(tmp_path, **settings):
    return Files(LogSettings(**settings), tmp_path, Metrics(), LOG, lambda: 0.0)


def lines(tmp_path):
    files = sorted((tmp_path / "requests").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_the_sample_is_a_function_of_the_request_id():
    ids = [f"r-{n}" for n in range(20_000)]
    few, many = ({one for one in ids if sampled(one, share)} for share in (0.01, 0.1))
    assert 140 < len(few) < 260
    assert 1850 < len(many) < 2150
    assert few < many
    assert all(sampled(one, 1.0) for one in ids)
    assert not any(sampled(one, 0.0) for one in ids)


def test_nothing_is_recorded_unless_the_deployment_asks(tmp_path):
    quiet = files(tmp_path)
    quiet.answered(ASKED, Traffic(None), Assignment(None), OUTCOME)
    quiet.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_holds_what_was_asked_and_what_came_back(tmp_path):
    loud = files(tmp_path, requests=1.0, unit_salt="s")
    loud.answered(ASKED, Traffic(None), Assignment(None), OUTCOME)
    loud.close()
    (line,) = lines(tmp_path)
    assert line.pop("at").startswith("20")
    assert line == {
        "request_id": "r-1",
        "user_id": hmac.new(b"s", b"u-7", hashlib.sha256).hexdigest()[:32],
        "context": {"history": ["i1", "i2"]},
        "k": 3,
        "policy": None,
        "exclude": ["i9"],
        "ctx": {"country": "BR"},
        "user": {"age": 31.0},
        "seed": 17,
        "load": "busy",
        "versions": OUTCOME.versions._asdict(),
        "experiments": [{"layer": "ranking", "name": "color", "arm": "control", "reason": "assigned", "coverage": 0.1}],
        "answer": {
            "items": [{"id": "a", "score": -0.5, "sid": [1, 2, 3]}, {"id": "b", "score": -0.75, "sid": [1, 2, 4]}],
            "status": "underfilled",
            "reason": "width",
        },
    }


def test_the_share_is_kept(tmp_path):
    loud = files(tmp_path, requests=0.1)
    for n in range(1000):
        loud.answered(Request(f"r-{n}", HistoryIds(()), 1), Traffic(None), Assignment(None), OUTCOME)
    loud.close()
    assert [line["request_id"] for line in lines(tmp_path)] == [f"r-{n}" for n in range(1000) if sampled(f"r-{n}", 0.1)]


def test_every_kind_of_context_comes_back_exactly():
    tensor = np.array([[0.1, -1e-30], [3.5, 7.25]], np.float32)
    for context, want in (
        (HistoryIds(("é", "b")), {"history": ("é", "b")}),
        (TokenIds((1, 2, 3)), {"tokens": (1, 2, 3)}),
    ):
        line = request_line(Request("r", context, 1), OUTCOME, "now", str)
        assert line["context"] == want
    line = request_line(Request("r", Embeddings({"x": tensor}), 1), OUTCOME, "now", str)
    wire = json.loads(json.dumps(line["context"]))["embeddings"]["x"]
    back = np.frombuffer(base64.b64decode(wire["data"]), "<f4").reshape(wire["shape"])
    assert wire["dtype"] == "f32"
    assert np.array_equal(back, tensor)


def test_users_are_named_by_a_key_that_stays(tmp_path):
    one, two = (namer("hashed", "", tmp_path / "state", LOG) for _ in range(2))
    assert one("u-7") == two("u-7") != one("u-8")
    key = tmp_path / "state" / SALT_FILE
    assert key.stat().st_mode & 0o077 == 0
    assert len(key.read_bytes()) == 64
    assert [path.name for path in key.parent.iterdir()] == [SALT_FILE]
    elsewhere = namer("hashed", "", tmp_path / "other", LOG)
    assert elsewhere("u-7") != one("u-7")
    assert namer("plain", "", tmp_path, LOG)("u-7") == "u-7"


def test_without_a_place_for_the_key_users_are_hashed_all_the_same(tmp_path):
    (tmp_path / "state").write_text("no directory")
    log = io.BytesIO()
    name = namer("hashed", "", tmp_path / "state", make_log(log))
    assert name("u-7") == name("u-7") != "u-7"
    assert b"unit_salt_unusable" in log.getvalue()


@pytest.mark.parametrize("closed", [1, 2])
def test_closing_writes_what_is_queued(tmp_path, closed):
    loud = files(tmp_path, requests=1.0)
    for n in range(500):
        loud.answered(Request(f"r-{n}", HistoryIds(()), 1), Traffic(None), Assignment(None), OUTCOME)
    for _ in range(closed):
        loud.close()
    assert len(lines(tmp_path)) == 500
