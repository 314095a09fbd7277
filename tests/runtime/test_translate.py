from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import errors
from app.core import (
    Embeddings,
    ExplainedItem,
    ExplainedStep,
    Explanation,
    Exposure,
    HistoryIds,
    Item,
    Outcome,
    Request,
    Timings,
    TokenIds,
    Versions,
)
from app.errors import Fault, QueueFull, Rejected, WidebeamError
from app.runtime.messages import Admit, Answer, Failed, ToEngine, ToFrontEnd
from app.runtime.translate import KINDS, asked, error_of, failed, request_of

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.lists(TEXT, max_size=5).map(tuple)
ARRAYS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)).map(
    lambda drawn: np.random.default_rng(drawn[2]).standard_normal(drawn[:2]).astype(np.float32)
)
CONTEXTS = st.one_of(
    st.builds(HistoryIds, TEXTS),
    st.builds(TokenIds, st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)),
    st.builds(Embeddings, st.dictionaries(TEXT, ARRAYS, max_size=3)),
)
REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    context=CONTEXTS,
    k=st.integers(1, 2**31 - 1),
    user_id=st.none() | TEXT,
    policy=st.none() | TEXT,
    exclude=TEXTS,
    ctx=st.dictionaries(TEXT, TEXT, max_size=3),
    user=st.dictionaries(TEXT, FINITE, max_size=3),
    received=FINITE,
    deadline=st.none() | FINITE,
    seed=st.none() | st.integers(0, 2**63 - 1),
    arms=st.dictionaries(TEXT, TEXT, max_size=3),
    explain=st.none() | TEXTS,
    load=st.sampled_from([None, "quiet", "normal", "busy"]),
)
OUTCOMES = st.builds(
    Outcome,
    request_id=TEXT,
    items=st.lists(st.builds(Item, TEXT, FINITE, st.lists(st.integers(0, 2**31 - 1)).map(tuple)), max_size=3).map(
        tuple
    ),
    status=st.sampled_from(["ok", "underfilled", "no_candidates"]),
    reason=st.none() | TEXT,
    versions=st.builds(Versions, *[TEXT] * 6),
    experiments=st.lists(st.builds(Exposure, TEXT, TEXT, TEXT, TEXT, st.none() | FINITE), max_size=2).map(tuple),
    seed=st.integers(0, 2**63 - 1),
    load=st.none() | TEXT,
    unknown_history=st.integers(0, 99),
    unknown_exclude=st.integers(0, 99),
    timings=st.builds(Timings, FINITE, FINITE, FINITE, FINITE),
    batch_requests=st.integers(1, 99),
    batch_rows=st.integers(1, 99),
    level=st.sampled_from(["quiet", "normal", "busy"]),
)
EXPLANATION = Explanation(
    (ExplainedStep(1, 1, 4, 3, {"mask": 1}, 2, 2, -0.5, -0.75), ExplainedStep(2, 2, 8, 0, {}, 0, 2, None, None)),
    (ExplainedItem("a", "cut", 1, "top", -2.0, -1.0, 3, 2), ExplainedItem("b", "final", rule="cap(item.x, max=1)")),
    "one more",
)


def through(message, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@given(st.integers(0, 2**63 - 1), REQUESTS)
def test_a_request_arrives_as_it_was(number, request):
    message = through(asked(number, request), ToEngine)
    assert isinstance(message, Admit)
    assert message.number == number
    found = request_of(message)
    if isinstance(request.context, Embeddings):
        assert found.context.tensors.keys() == request.context.tensors.keys()
        for name, array in request.context.tensors.items():
            other = found.context.tensors[name]
            assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert other.flags.writeable
        found = replace(found, context=request.context)
    assert found == request


@given(st.integers(0, 2**63 - 1), OUTCOMES, st.sampled_from([None, EXPLANATION]))
def test_an_outcome_arrives_as_it_was(number, outcome, explanation):
    outcome = replace(outcome, explanation=explanation)
    assert through(Answer(number, outcome), ToFrontEnd) == Answer(number, outcome)


def every_kind(of=WidebeamError):
    return [of, *(kind for one in of.__subclasses__() if one.__module__ == "app.errors" for kind in every_kind(one))]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_the_class_that_it_was_with_everything_that_an_answer_says_of_it(kind):
    made = {
        "Rejected": lambda: Rejected("bad_shape", "wrong", location="weights/v1"),
        "PolicyRejected": lambda: errors.PolicyRejected("wrong", ()),
        "BadDeployment": lambda: errors.BadDeployment("wrong", file="deployment.toml", line=3),
    }
    error = made.get(kind.__name__, lambda: kind("what is wrong: ä"))()
    if isinstance(error, errors.Refused):
        error.retry_after_s = 7
    elif kind.__name__ in KINDS:
        error.path = "$.context.history[1]"
    message = through(failed(3, error), ToFrontEnd)
    assert isinstance(message, Failed)
    found = error_of(message)
    assert type(found) is (kind if kind.__name__ in KINDS else WidebeamError)
    for name in ("code", "message", "path", "retryable", "retry_after_s"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_an_error_of_a_plug_in_arrives_as_the_nearest_class_that_the_project_knows():
    class Full(QueueFull):
        code = "my_queue_full"

    found = error_of(failed(1, Full("full", retry_after_s=None)))
    assert (type(found), found.code, found.retry_after_s) == (QueueFull, "my_queue_full", None)


def test_a_message_with_half_a_character_is_spelled_out():
    message = failed(1, Fault("broke on \ud800"))
    assert "ud800" in through(message, ToFrontEnd).message


def test_a_request_needs_a_context():
    message = msgspec.structs.replace(asked(1, Request("r", HistoryIds(("a",)), 1)), history=None)
    with pytest.raises(ValueError, match="context"):
        request_of(message)
