"""The engine's end of a front end's socket, against bytes of all kinds."""

import asyncio
import io
import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import Deployment, Limits, Server, SidConfig
from app.core import Embeddings, HistoryIds, Request, TokenIds
from app.runtime.channel import HEAD
from app.runtime.logs import make_log
from app.runtime.messages import (
    Accepting,
    Admit,
    Answer,
    Cancel,
    Done,
    Fetch,
    Fetched,
    Hello,
    Requests,
    ToFrontEnd,
)
from app.runtime.metrics import Metrics
from app.runtime.port import Port, most_bytes
from app.runtime.translate import asked
from tests.api.support import FakeFront, outcome_of, until

DEPLOYMENT = Deployment(
    family="fake", sid=SidConfig(sizes=(4,)), limits=Limits(widths=(4,)), server=Server(max_body=10_000)
)
METRICS = Metrics()
"""For examples by the hundred."""


class Wire(asyncio.Transport):
    """What a port writes; reading can be paused."""

    def __init__(self):
        super().__init__()
        self.data, self.aborted, self.reading = b"", False, True

    def write(self, data):
        self.data += data

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def messages(self) -> list:
        found, data = [], self.data
        while data:
            size = int.from_bytes(data[:HEAD])
            found.append(msgspec.msgpack.decode(data[HEAD : HEAD + size], type=ToFrontEnd))
            data = data[HEAD + size :]
        return found[1:]


class Ended:
    def __init__(self, front=None, metrics=None):
        self.front, self.metrics, self.log, self.wire = front or FakeFront(), metrics or Metrics(), io.BytesIO(), Wire()

        async def fetch(asked):
            return Fetched(asked.number, 200, (), asked.path.encode())

        self.port = Port(self.front, self.metrics, make_log(self.log), fetch, Hello(DEPLOYMENT, False))
        self.port.connection_made(self.wire)

    def gives(self, *messages):
        self.port.data_received(b"".join(map(frame, messages)))

    def lines(self):
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def frame(message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD) + body


def request(word="a", **fields) -> Request:
    return Request("r", HistoryIds((word,)), k=2, **fields)


async def test_it_says_what_is_served_then_answers_what_it_is_asked():
    ended = Ended()
    ended.gives(asked(1, request()), asked(2, request("late")), asked(3, request("full")), asked(4, request("crash")))
    await until(lambda: len(ended.wire.messages()) == 4)
    found = {one.number: one for one in ended.wire.messages()}
    assert found[1] == Answer(1, outcome_of(request()))
    assert (found[2].kind, found[3].kind, found[4].kind) == ("Expired", "QueueFull", "Fault")
    assert msgspec.msgpack.decode(
        ended.wire.data[HEAD:][: int.from_bytes(ended.wire.data[:HEAD])], type=Hello
    ) == Hello(DEPLOYMENT, False)
    lines = [(line["event"], line["level"], line["request_id"]) for line in ended.lines()]
    assert lines == [("admission_failed", "error", "r")]
    assert "admission broke" in str(ended.lines())


async def test_an_answer_is_on_its_way_before_the_next_one_of_its_batch_is_made():
    told = []

    class Later(FakeFront):
        def hand_in(self, asked, tell):
            told.append(tell)
            return super().hand_in(asked, lambda _: None)

    ended = Ended(Later())
    ended.gives(asked(1, request("hold")), asked(2, request("hold")))
    for number, tell in enumerate(told, 1):
        tell(outcome_of(request()))
        assert [answer.number for answer in ended.wire.messages()] == list(range(1, number + 1))
    assert len(told) == 2
    ended.front.release.set()
    await until(lambda: not ended.front.waiting)


async def test_an_answer_that_cannot_be_said_is_a_fault_of_that_request_alone(monkeypatch):
    ended = Ended()
    ended.gives(asked(1, request("hold")), asked(2, request("hold")))
    one, two = ended.front.admitted
    answers = [replace(outcome_of(one), seed=2**64), outcome_of(two)]
    monkeypatch.setattr("tests.api.support.outcome_of", lambda asked: answers.pop(0))
    ended.front.release.set()
    await until(lambda: len(ended.wire.messages()) == 2)
    first, second = ended.wire.messages()
    assert (first.number, first.kind, first.code) == (1, "Fault", "internal")
    assert (second.number, type(second)) == (2, Answer)
    assert [(line["event"], line["request_id"]) for line in ended.lines()] == [("answer_failed", "r")]


async def test_a_request_that_is_given_up_is_cancelled_and_not_answered():
    ended = Ended()
    ended.gives(asked(1, request("hold")), asked(2, request("hold")), Cancel(1), Cancel(1), Cancel(99))
    assert ended.front.cancelled == [ended.front.admitted[0]]
    ended.front.release.set()
    await until(lambda: len(ended.wire.messages()) == 1)
    await asyncio.sleep(0)
    assert [one.number for one in ended.wire.messages()] == [2]


async def test_when_the_socket_ends_so_do_its_requests():
    ended = Ended()
    ended.gives(*(asked(n, request("hold")) for n in range(3)), Fetch(9, "GET", "/x", b"/x", b"", ()))
    ended.port.connection_lost(None)
    assert await ended.port.gone == 3
    assert len(ended.front.cancelled) == 3
    ended.front.release.set()
    await until(lambda: not ended.front.waiting)
    assert ended.wire.messages() == []


async def test_a_front_end_that_does_not_read_cannot_ask_for_more():
    ended = Ended()
    ended.port.pause_writing()
    assert not ended.wire.reading
    ended.port.resume_writing()
    assert ended.wire.reading


async def test_other_routes_are_fetched_and_counts_arrive():
    ended = Ended()
    done = Done((Requests("ok", "base", (0.1, 0.2)), Requests("refused", None, (0.3,))), {"queue_full": 4}, (0.01,))
    ended.gives(Accepting(), Accepting(), done, Fetch(5, "GET", "/livez", b"/livez", b"", ()))
    await until(ended.wire.messages)
    assert ended.wire.messages() == [Fetched(5, 200, (), b"/livez")]
    assert ended.port.accepting.done()
    text = ended.metrics.render().decode()
    lines = (
        'requests_total{outcome="ok",policy="base"} 2',
        'requests_total{outcome="refused",policy="none"} 1',
        'shed_total{reason="queue_full"} 4',
        "request_seconds_count 3",
        "event_loop_lag_seconds_count 1",
    )
    for line in lines:
        assert f"widebeam_{line}" in text


async def test_one_number_twice_is_malformed():
    ended = Ended()
    ended.gives(asked(1, request("hold")), asked(1, request("hold")))
    assert ended.wire.aborted


GOOD = st.sampled_from([
    frame(asked(1, request("hold"))), frame(asked(2, request())), frame(asked(3, request("full"))),
    frame(asked(4, Request("r", TokenIds((1, 2)), 1))), frame(asked(5, Request("r", Embeddings({}), 1))),
    frame(Cancel(1)), frame(Accepting()), frame(Done((), {}, ())), frame(Fetch(6, "GET", "/", b"/", b"", ())),
])  # fmt: skip
CHANGED = st.builds(
    lambda good, at, byte: good[: at % len(good)] + bytes([byte]) + good[at % len(good) + 1 :],
    GOOD, st.integers(0, 200), st.integers(0, 255),
)  # fmt: skip
SHAPES = st.builds(
    lambda values, tag: frame([tag, *values]),
    st.lists(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() |
                          st.binary(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4),
             max_size=18),
    st.integers(0, 7),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(GOOD, CHANGED, SHAPES, st.binary(max_size=40)), max_size=6))
def test_no_bytes_harm_anybody_but_their_own_connection(pieces):
    async def run():
        front = FakeFront()
        bad, good = Ended(front, METRICS), Ended(front, METRICS)
        for data in pieces:
            bad.port.data_received(data)
        good.gives(asked(7, request()))
        await until(good.wire.messages)
        assert good.wire.messages() == [Answer(7, outcome_of(request()))]
        assert bad.wire.aborted == any(line["event"] == "front_end_malformed" for line in bad.lines())
        bad.port.connection_lost(None)
        assert await bad.port.gone >= 0
        front.release.set()
        await until(lambda: not front.waiting)

    asyncio.run(run())


@pytest.mark.parametrize(
    "change",
    [{"k": "x"}, {"embeddings": {"x": ["<f8", [1], b"12345678"]}}, {"embeddings": {"x": ["<f4", [2, 2], b"1234"]}},
     {"embeddings": {"x": ["<f4", [-1], b"1234"]}}, {"received": "now"}],
)  # fmt: skip
async def test_a_request_that_is_none_is_malformed(change):
    fields = dict(zip(Admit.__struct_fields__, msgspec.to_builtins(asked(1, request()))[1:], strict=True))
    fields |= {"history": None} | change
    ended = Ended()
    ended.port.data_received(frame([2, *fields.values()]))
    assert ended.wire.aborted
    assert ended.front.admitted == []


async def test_a_frame_is_bounded_by_the_largest_body():
    ended = Ended()
    ended.port.data_received((most_bytes(10_000) + 1).to_bytes(HEAD))
    assert ended.wire.aborted
