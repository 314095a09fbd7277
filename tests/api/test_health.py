import asyncio

from app.api.health import Readiness
from tests.api.support import GOLDEN, HELD_S, FakeFront, ask, connect, get, held_delay, message, served, until


async def test_live_does_not_depend_on_models_and_ready_says_why_not():
    async with served(FakeFront(why_not=("no_weights: weights/ is empty",))) as server:
        for path in ("/livez", "/v2/health/live"):
            reply = await get(server.addresses.public, path)
            assert (reply.status, reply.json()) == (200, {"live": True})
        for path in ("/readyz", "/v2/health/ready"):
            reply = await get(server.addresses.public, path)
            assert reply.status == 503
            assert reply.json() == {"ready": False, "reasons": ["no_weights: weights/ is empty"]}
            assert reply.headers["cache-control"] == "no-store"
        server.front.why_not = ()
        assert (await get(server.addresses.public, "/readyz")).json() == {"ready": True, "reasons": []}


async def test_head_is_get_without_a_body():
    async with served(FakeFront(why_not=("no_weights",))) as server, connect(server.addresses.public) as client:
        for path, status in (("/livez", 200), ("/readyz", 503), ("/v2/health/ready", 503), ("/v1/recommend", 405)):
            whole = await get(server.addresses.public, path)
            client.writer.write(message(path=path, method="HEAD", content_type=None))
            head = (await client.reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith(f"http/1.1 {status} "), head
            assert f"content-length: {len(whole.body)}\r\n" in head
        client.writer.write(message(path="/livez", method="GET"))
        assert (await client.reply()).json() == {"live": True}  # nothing of a body was in between
    assert {line["method"] for line in server.requests()} == {"GET", "HEAD"}


async def test_metrics_are_prometheus_text_with_the_documented_names():
    async with served() as server:
        await ask(server.addresses.public, GOLDEN)
        await asyncio.sleep(0.12)  # the lag is measured ten times a second; nothing is asserted about its value
        reply = await get(server.addresses.public, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    text = reply.body.decode()
    assert 'widebeam_requests_total{outcome="ok",policy="base"} 1.0' in text
    for name in ("request_seconds", "queue_seconds", "batch_size", "batch_rows", "queue_depth", "in_flight",
                 "event_loop_lag_seconds", "compiles_total"):  # fmt: skip
        assert f"widebeam_{name}" in text


async def test_while_leaving_everything_is_answered_but_nothing_is_kept_alive(monkeypatch):
    go = held_delay(monkeypatch)
    async with served(drain_delay_s=HELD_S) as server, connect(server.addresses.public) as client:
        client.writer.write(message(path="/livez", method="GET"))
        assert "connection" not in (await client.reply()).headers
        server.stop.set()
        await until(lambda: server.events("draining"))
        ready = await get(server.addresses.public, "/readyz")
        assert (ready.status, ready.json()["reasons"]) == (503, ["draining"])
        assert (await get(server.addresses.public, "/livez")).status == 200
        late = await ask(server.addresses.public, GOLDEN)
        assert (late.status, late.headers["connection"]) == (200, "close")
        assert not server.front.draining
        go.set()


def test_draining_is_said_once():
    front = FakeFront(why_not=("draining",))
    readiness = Readiness(front)
    readiness.leave()
    assert readiness.reasons() == ("draining",)
