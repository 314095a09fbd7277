import asyncio
import json
import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.load import PERCENTILES, Target, arrivals, run_load, summary
from tests.api.support import GOLDEN, HELD_S, held_delay, served, until

BODIES = [json.dumps(GOLDEN).encode(), json.dumps({**GOLDEN, "k": 2}).encode()]


async def load(url, bodies=BODIES, *, rate=200.0, seconds=1.0, timeout_s=60.0, connections=64):
    return await run_load(Target.parse(url), bodies, url=url, rate=rate, seconds=seconds, seed=3,
                          timeout_s=timeout_s, connections=connections)  # fmt: skip


async def test_a_run_reports_what_was_sent_and_what_came_back():
    async with served() as server:
        result = await load(server.addresses.public)
    assert result.sent == len(arrivals(200.0, 1.0, 3)) == result.answered == len(server.front.admitted)
    assert {request.k for request in server.front.admitted} == {2, 3}
    assert result.statuses == {"200": result.sent}
    assert result.errors == {}
    assert result.versions["snapshot"] == {"snap-1": result.sent}
    latencies = result.latency_ms
    assert latencies["p50"] <= latencies["p90"] <= latencies["p99"] <= latencies["p99.9"] <= latencies["max"]
    assert set(result.late_ms) == set(latencies)


async def test_errors_are_counted_by_code():
    bodies = [json.dumps({"context": {"history": [word]}, "k": 1}).encode() for word in ("full", "late", "fault", "a")]
    async with served() as server:
        result = await load(server.addresses.public, [*bodies, b"["])
    assert set(result.errors) == {"queue_full", "deadline_exceeded", "internal", "malformed_body"}
    assert sum(result.errors.values()) + result.answered == result.sent


async def test_a_stalled_server_is_charged_from_the_intended_time():
    """All requests are sent while nothing is answered; then all come back at once: the early ones waited longest."""
    bodies = [json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode()]
    async with served() as server:
        running = asyncio.create_task(load(server.addresses.public, bodies, rate=100.0, seconds=0.5, connections=2))
        times = arrivals(100.0, 0.5, 3)
        await until(lambda: len(server.front.admitted) == 2)
        await asyncio.sleep(0.6)
        server.front.release.set()
        result = await running
    assert result.connections == 2
    assert result.answered == len(times)
    assert result.latency_ms["p50"] > 200  # all of them, not only the 2 that were out, waited for the stall to end
    assert result.late_ms["max"] > 100  # 2 connections: the others could not leave when they should have


async def test_a_server_that_does_not_answer_is_a_timeout_and_one_that_is_not_there_a_failure():
    bodies = [json.dumps({"context": {"history": ["hold"]}, "k": 1}).encode()]
    async with served() as server:
        url = server.addresses.public
        result = await load(url, bodies, rate=50.0, seconds=0.3, timeout_s=0.2, connections=3)
    assert result.errors == {"timeout": result.sent}
    gone = await load(url, bodies, rate=50.0, seconds=0.3)
    assert gone.errors == {"connect_failed": gone.sent}
    assert (gone.answered, gone.latency_ms) == (0, {})


async def test_a_server_that_closes_each_connection_loses_no_request(monkeypatch):
    go = held_delay(monkeypatch)
    async with served(drain_delay_s=HELD_S) as server:
        server.stop.set()
        await until(lambda: server.events("draining"))
        result = await load(server.addresses.public, seconds=0.5, timeout_s=60.0)
        go.set()
    assert result.errors == {}
    assert result.answered == result.sent
    assert result.connections > 5


def test_arrivals_are_a_poisson_process_and_repeatable():
    times = arrivals(1000.0, 20.0, 7)
    assert times == arrivals(1000.0, 20.0, 7) != arrivals(1000.0, 20.0, 8)
    gaps = [b - a for a, b in pairwise(times)]
    assert abs(len(times) - 20_000) < 5 * math.sqrt(20_000)
    assert abs(statistics.stdev(gaps) / statistics.mean(gaps) - 1) < 0.05  # exponential: spread = mean


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_measured_values_with_their_share_below(values):
    found = summary(values)
    for name, share in PERCENTILES.items():
        value = min(v for v in values if sum(w <= v for w in values) >= share * len(values))
        assert found[name] == round(value * 1e3, 3)
    assert found["max"] == round(max(values) * 1e3, 3)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, "/v1/recommend", tls=False)),
        ("http://host/", Target("host", 80, "/v1/recommend", tls=False)),
        ("https://[::1]:9/x", Target("::1", 9, "/x", tls=True)),
    ],
)
def test_urls(url, target):
    assert Target.parse(url) == target
    assert b"\r\n\r\nbody" in target.message(b"body")


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="expected http"):
        Target.parse(url)
