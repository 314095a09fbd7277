import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import wire
from app.config import Limits
from app.core import Embeddings, ExplainedItem, ExplainedStep, Explanation, Item, TokenIds
from app.errors import Fault, InvalidRequest
from tests.api.support import GOLDEN, outcome_of

BODY = wire.body_type(Limits(k=5))


def request(body, override=False):
    made = msgspec.convert(body, BODY)
    return wire.to_request(made, request_id="r", received=1.0, deadline=2.0, override=override)


def embedded(dtype, shape, data):
    return {"context": {"embeddings": {"short": {"dtype": dtype, "shape": shape, "data": data}}}, "k": 1}


def test_a_request_keeps_what_the_body_says():
    asked = request({"context": {"tokens": [5, 0]}, "k": 5, "user_id": "u", "policy": "p", "seed": 9}, override=True)
    assert asked.context == TokenIds((5, 0))
    assert (asked.k, asked.user_id, asked.policy, asked.seed) == (5, "u", "p", 9)
    assert (asked.request_id, asked.received, asked.deadline) == ("r", 1.0, 2.0)


def test_the_limit_of_k_is_in_the_type():
    with pytest.raises(msgspec.ValidationError, match="<= 5"):
        request({**GOLDEN, "k": 6})


@pytest.mark.parametrize("count", [512, 513])
def test_ids_are_measured_in_bytes(count):
    for id_ in ("x" * count, "é" * (count // 2) + "x" * (count % 2)):
        for place, body in (
            ("$.context.history[1]", {"context": {"history": ["a", id_]}, "k": 1}),
            ("$.exclude[0]", {"context": {"history": []}, "k": 1, "exclude": [id_]}),
        ):
            if count == 512:
                request(body)
            else:
                with pytest.raises((InvalidRequest, msgspec.ValidationError)) as found:
                    request(body)
                assert place in str(found.value) or getattr(found.value, "path", None) == place


def test_explain_asks_for_nothing_for_steps_or_for_items_too():
    assert request({**GOLDEN}).explain is request({**GOLDEN, "explain": False}).explain is None
    assert request({**GOLDEN, "explain": True}).explain == ()
    assert request({**GOLDEN, "explain": {"why": ["a", "b"]}}).explain == ("a", "b")
    with pytest.raises(InvalidRequest) as found:
        request({**GOLDEN, "explain": {"why": ["a", "ü" * 257]}})
    assert found.value.path == "$.explain.why[1]"


def test_an_explanation_is_a_list_of_steps_items_and_what_does_not_fit():
    told = Explanation(
        (
            ExplainedStep(1, 1, 4, 3, {"trie": 1, "width": 1}, 2, 2, -0.5, -1.5),
            ExplainedStep(2, 0, 0, 0, {}, 0, 2, None, None),
        ),
        (ExplainedItem("a", "cut", 1, "width", -2.0, -1.5, 3, 2), ExplainedItem("b", "unknown")),
        None,
    )
    steps = [
        {"kind": "step", "step": 1, "parents": 1, "candidates": 4, "legal": 3, "removed": {"trie": 1, "width": 1},
         "kept": 2, "planned": 2, "best": -0.5, "cut": -1.5},
        {"kind": "step", "step": 2, "parents": 0, "candidates": 0, "legal": 0, "removed": {}, "kept": 0, "planned": 2},
    ]  # fmt: skip
    items = [
        {"kind": "item", "id": "a", "result": "cut", "step": 1, "phase": "width", "rank": -2.0, "cut": -1.5,
         "place": 3, "kept": 2},
        {"kind": "item", "id": "b", "result": "unknown"},
    ]  # fmt: skip
    outcome = outcome_of(request(GOLDEN))

    def wire_of(explanation):
        return msgspec.to_builtins(wire.to_answer(replace(outcome, explanation=explanation)))["explain"]

    assert wire_of(told) == [*steps, *items]
    assert wire_of(replace(told, mismatch="2 of 3"))[-1] == {"kind": "explain_mismatch", "message": "2 of 3"}


@pytest.mark.parametrize(
    ("dtype", "code", "exact"), [("f32", "<f4", [1.5, -2.0, 3e30]), ("f16", "<f2", [1.5, -2.0, 65504.0])]
)
def test_embeddings_become_fp32(dtype, code, exact):
    made = request(embedded(dtype, [3, 1], np.array(exact, code).tobytes())).context
    assert isinstance(made, Embeddings)
    array = made.tensors["short"]
    assert (array.dtype, array.shape) == (np.float32, (3, 1))
    assert array.ravel().tolist() == np.array(exact, np.float32).tolist()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_bf16_is_the_upper_half_of_an_fp32(value):
    upper = struct.pack("<f", value)[2:]
    expected = struct.unpack("<f", b"\0\0" + upper)[0]
    made = request(embedded("bf16", [1, 1], upper)).context
    assert isinstance(made, Embeddings)
    assert made.tensors["short"].item() == expected


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (embedded("f32", [2, 2], b"\0" * 15), "$.context.embeddings.short.data", "needs 16 bytes, got 15"),
        (embedded("bf16", [2**31 - 1] * 4, b""), "$.context.embeddings.short.data", "needs"),
        (embedded("f32", [1], np.array([np.nan], "<f4").tobytes()), "$.context.embeddings.short.data", "finite"),
        (embedded("f16", [1], np.array([np.inf], "<f2").tobytes()), "$.context.embeddings.short.data", "finite"),
        (embedded("bf16", [1], b"\x80\x7f"), "$.context.embeddings.short.data", "finite"),
        ({"context": {}, "k": 1}, "$.context", "got 0"),
        ({"context": {"history": [], "tokens": []}, "k": 1}, "$.context", "got 2"),
        ({**GOLDEN, "user": {"a": float("inf")}}, "$.user.a", "finite"),
        ({**GOLDEN, "policy": "p"}, "$.policy", "does not let"),
    ],
)
def test_what_types_cannot_say_is_refused_with_its_place(body, path, words):
    with pytest.raises(InvalidRequest, match=words) as found:
        request(body)
    assert found.value.path == path


def test_an_answer_leaves_out_what_is_absent_and_shows_what_is_there():
    outcome = outcome_of(request(GOLDEN))
    plain = msgspec.to_builtins(wire.to_answer(outcome))
    assert not {"reason", "load", "unknown", "explain"} & set(plain)
    assert "coverage" not in plain["experiments"][0]
    full = replace(outcome, reason="width", load="high", unknown_history=2,
                   experiments=(outcome.experiments[0]._replace(coverage=0.5),))  # fmt: skip
    shown = msgspec.to_builtins(wire.to_answer(full))
    assert (shown["reason"], shown["load"], shown["unknown"]) == ("width", "high", {"history": 2, "exclude": 0})
    assert shown["experiments"][0]["coverage"] == 0.5


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_is_a_fault_and_never_null(score):
    outcome = outcome_of(request(GOLDEN), (Item("a", 1.0, (1,)), Item("b", score, (2,))))
    with pytest.raises(Fault, match="'b'"):
        wire.to_answer(outcome)
