"""Records read back: what was written is what is asked again, and what is no record says where it stands."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from app.core import Embeddings, HistoryIds, Request, TokenIds
from app.errors import Rejected
from app.runtime.recorded import read_records, recorded
from app.runtime.records import request_line
from tests.runtime.test_records import ASKED, OUTCOME

CONTEXTS = [
    HistoryIds(("i1", "ü")),
    TokenIds((5, 0, 7)),
    Embeddings({"short": np.array([[1.5, -2.0], [3e30, 1e-40]], np.float32), "empty": np.zeros((0, 4), np.float32)}),
]


@pytest.mark.parametrize("context", CONTEXTS, ids=["history", "tokens", "embeddings"])
def test_what_was_written_can_be_asked_again(context):
    asked = Request("r-1", context, 3, user_id="u", exclude=("i9",), ctx={"c": "BR"}, user={"age": 31.0}, policy="base")
    line = msgspec.json.encode(request_line(asked, OUTCOME, "now", lambda unit: unit))
    again = recorded(line, "log:1")
    for name in ("request_id", "k", "user_id", "exclude", "ctx", "user"):
        assert getattr(again.request, name) == getattr(asked, name)
    assert (again.request.seed, again.request.policy) == (OUTCOME.seed, None)
    assert again.items == ("a", "b")
    assert again.versions["policy_id"] == "id"
    if isinstance(context, Embeddings):
        assert again.request.context.tensors.keys() == context.tensors.keys()
        for name, tensor in context.tensors.items():
            assert np.array_equal(again.request.context.tensors[name], tensor)
    else:
        assert again.request.context == context


def test_a_line_by_hand_needs_a_context_and_k(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"context": {"history": ["i1"]}, "k": 5}\n\n{"context": {"tokens": [1]}, "k": 2, "other": 1}\n')
    one, two = read_records(file)
    assert one.request.request_id == one.place == f"{file}:1"
    assert (two.place, two.request.k, two.items) == (f"{file}:3", 2, None)


def test_the_files_of_a_directory_come_in_their_order(tmp_path):
    for name in ("20261102", "20261101"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"context": {"history": [name]}, "k": 1}) + "\n")
    assert [one.request.context.ids[0] for one in read_records(tmp_path)] == ["20261101", "20261102"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"k": 1}',
        '{"context": {}, "k": 1}',
        '{"context": {"history": [], "tokens": []}, "k": 1}',
        '{"context": {"history": [7]}, "k": 1}',
        '{"context": {"embeddings": {"short": {"shape": [2, 2], "data": "AAAA"}}}, "k": 1}',
        '{"context": {"embeddings": {"short": {"shape": [1], "data": "~"}}}, "k": 1}',
        '{"context": {"embeddings": {"short": {"shape": [-1, -1], "data": ""}}}, "k": 1}',
    ],
)
def test_what_is_no_record_says_where_it_stands(tmp_path, line):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"context": {"history": []}, "k": 1}) + "\n" + line + "\n")
    found = read_records(file)
    next(found)
    with pytest.raises(Rejected) as error:
        next(found)
    assert error.value.location == f"{file}:2"
    assert ASKED.k
