"""Only the moves of the table happen, and each is an event, a line of the log and a count."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from app.errors import Fault, Rejected
from app.runtime.desired import Option
from app.runtime.ledger import EVENTS, Ledger
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.stage import IN_MEMORY, Stage
from app.runtime.states import MOVES, State, check_move
from app.runtime.status import ArtifactStatus, Reason


def test_every_state_can_be_reached_and_left():
    assert set(MOVES) == set(State)
    reached = {after for afters in MOVES.values() for after in afters}
    assert reached == set(State)
    assert all(MOVES.values())


def test_nothing_is_served_that_was_not_ready():
    assert {before for before, afters in MOVES.items() if State.ACTIVE in afters} == {State.READY, State.DRAINING}
    assert State.REJECTED not in MOVES[State.ACTIVE]


@pytest.mark.parametrize("before", State)
def test_other_moves_are_bugs(before):
    for after in State:
        if after in MOVES[before]:
            check_move(before, after)
        else:
            with pytest.raises(Fault):
                check_move(before, after)


@pytest.fixture
def logged():
    return io.BytesIO()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def ledger(logged, metrics):
    return Ledger(make_log(logged), metrics)


@pytest.mark.parametrize("before", [None, *(one for one in State if one not in IN_MEMORY)])
def test_what_is_not_in_memory_can_be_refused_and_begun_anew_at_any_time(before, ledger):
    """It may leave memory, or its files may go and come back, while it is being looked at."""
    for wanted in (State.VERIFYING, State.LOADING, State.VALIDATING, State.WARMING, State.REJECTED):
        version = f"v-{wanted}"
        if before is not None:
            ledger._known["weights", version] = ArtifactStatus("weights", version, before, "now")
        if wanted is State.REJECTED:
            ledger.reject("weights", version, Rejected("bad", "is bad"))
        else:
            Stage._moved(SimpleNamespace(_ledger=ledger), "weights", Option(version, "d", {}), wanted)
        assert ledger.state("weights", version) is wanted


def test_a_move_is_an_event_and_a_line(ledger, logged):
    ledger.move("weights", "v1", State.DISCOVERED)
    ledger.move("weights", "v1", State.DISCOVERED)  # nothing new
    ledger.move("weights", "v1", State.VERIFYING, digest="d")
    assert [(one["state"], one["before"]) for one in ledger.events()] == [
        ("discovered", None),
        ("verifying", "discovered"),
    ]
    assert ledger.events(after=1)[0]["number"] == 2
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [line["state"] for line in lines] == ["discovered", "verifying"]
    with pytest.raises(Fault):
        ledger.move("weights", "v1", State.ACTIVE)
    assert ledger.documents() == [
        {"kind": "weights", "version": "v1", "state": "verifying", "at": ledger.documents()[0]["at"], "digest": "d"}
    ]


def test_a_rejection_has_a_place_and_is_counted_once(ledger, metrics):
    ledger.move("weights", "v1", State.DISCOVERED)
    for _ in range(2):
        ledger.reject("weights", "v1", Rejected("bad_shape", "shape [1]", location="model.safetensors: x"))
    assert ledger.reason("weights", "v1") == Reason("bad_shape", "shape [1]", "weights/v1/model.safetensors: x")
    assert metrics.registry.get_sample_value("widebeam_rejections_total", {"kind": "weights"}) == 1


def test_events_are_bounded_and_keep_their_numbers(ledger):
    for _ in range(EVENTS + 7):
        ledger.note("cutover")
    events = ledger.events()
    assert (len(events), events[-1]["number"]) == (EVENTS, EVENTS + 7)
