"""The server that does nothing: a real process, real sockets."""

from __future__ import annotations

import pytest

from app.cli.load import Target
from app.cli.loop import run
from bench._nothing import END, Nothing, length, nothing, response
from bench.rest import opened

BODY = b'{"timings_ms": {"queue": 1, "context": 1, "decode": 1, "total": 1}, "batch": {"requests": 1}}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Wire:
    def __init__(self):
        self.written = []

    def write(self, data):
        self.written.append(data)


@pytest.mark.parametrize("cut", [0, 1, 40, 70, len(Target("h", 80, "/", tls=False).message(b"x" * 100)) - 1])
def test_it_answers_once_for_each_whole_request_wherever_its_bytes_are_cut(cut):
    message, wire = Target("h", 80, "/", tls=False).message(b"x" * 100), Wire()
    server = Nothing(ANSWER)
    server.connection_made(wire)
    for times in (1, 2):
        server.data_received(message[:cut])
        assert len(wire.written) == times - 1
        server.data_received(message[cut:])
        assert wire.written == [ANSWER] * times


def test_a_head_that_does_not_say_how_long_its_body_is_is_none_of_ours():
    assert length(b"POST / HTTP/1.1\r\nCONTENT-LENGTH: 17") == 17
    with pytest.raises(ValueError, match="none"):
        length(b"POST / HTTP/1.1\r\nhost: x")


def test_clients_get_the_bytes_of_the_other_server(tmp_path):
    with nothing(ANSWER, tmp_path) as target:
        assert response(target, b"{}") == ANSWER
        assert response(target, b"x" * 100_000) == ANSWER  # more than one read
        found = run(opened(target, [b"{}"], 200.0, 0.3))
    assert found["statuses"] == {"200": found["sent"]}
    assert found["latency_ms"]["p50"] > 0


def test_an_answer_that_is_an_error_is_no_answer(tmp_path):
    with (
        nothing(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0" + END, tmp_path) as target,
        pytest.raises(RuntimeError, match="503"),
    ):
        response(target, b"{}")
