"""A server whose HTTP is in processes of its own: real processes, around a front door in this one."""

import asyncio
import errno
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from app.api import front_ends
from app.api.server import serve
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from tests.api.support import (
    GOLDEN,
    HELD_S,
    PATIENCE_S,
    FakeFront,
    Reply,
    ask,
    connect,
    deployment,
    get,
    held_delay,
    message,
    served,
    until,
)
from tests.api.test_hostile import HOSTILE

HELD = {"context": {"history": ["hold"]}, "k": 1}
EMBEDDINGS = {
    "context": {"embeddings": {"x": {"dtype": "bf16", "shape": [2, 3], "data": b"\x80\x3f" * 6},
                               "none": {"dtype": "f32", "shape": [0, 4], "data": b""}}},
    "k": 2,
}  # fmt: skip


def asked(word: str, **fields: object) -> bytes:
    return message(json.dumps({"context": {"history": [word]}, "k": 2, **fields}).encode())


def packed(body: object) -> bytes:
    return message(msgspec.msgpack.encode(body), content_type="application/msgpack", accept="application/msgpack")


CASES = {
    "golden": message(json.dumps(GOLDEN).encode()),
    "everything": message(
        json.dumps({**GOLDEN, "user_id": "u", "exclude": ["ä", "b"], "ctx": {"a": "b"}, "user": {"age": 3.5}, "seed": 9,
                    "request_id": "mine", "deadline_ms": 60_000, "explain": {"why": ["x"]}}).encode(),
        x_widebeam_arm="x=a,y=b",
    ),
    "tokens": message(json.dumps({"context": {"tokens": [1, 2, 70_000]}, "k": 1}).encode()),
    "embeddings": packed(EMBEDDINGS),
    "msgpack": packed(GOLDEN),
    "msgpack error": packed({**GOLDEN, "k": 0}),
    **{f"ends {word}": asked(word) for word in ("full", "crash", "unpolicy", "late", "model", "fault", "boom", "nan")},
    "dropped": asked("dropped"),
    "x-request-id": message(json.dumps(GOLDEN).encode(), x_request_id="abc-1"),
    "timeout header": message(json.dumps(GOLDEN).encode(), x_request_timeout_ms="soon"),
    "not acceptable": message(json.dumps(GOLDEN).encode(), accept="text/html"),
    "compressed": message(json.dumps(GOLDEN).encode(), content_encoding="gzip"),
    "another media type": message(json.dumps(GOLDEN).encode(), content_type="text/plain"),
    "too large": message(b"{}", content_length=str(2**31)),
    "chunked": message(b"%x\r\n%s\r\n0\r\n\r\n" % (len(json.dumps(GOLDEN)), json.dumps(GOLDEN).encode()),
                       content_length=None, transfer_encoding="chunked"),
    "percent": message(json.dumps(GOLDEN).encode(), path="/v1/%72ecommend?x=1"),
    "slash": message(json.dumps(GOLDEN).encode(), path="/v1/recommend/"),
    "upgrade": message(json.dumps(GOLDEN).encode(), connection="Upgrade, HTTP2-Settings", upgrade="h2c"),
    "no HTTP": b"nonsense\r\n\r\n",
    "large head": message(json.dumps(GOLDEN).encode(), x_large="x" * 70_000),
    **{
        f"{method} {path}": message(method=method, path=path)
        for path in ("/v1/recommend", "/livez", "/readyz", "/openapi.json", "/v1/models/widebeam", "/v1/models/other",
                     "/v2", "/v2/models/widebeam", "/v2/health/ready", "/nothing?here", "/%ff")
        for method in ("GET", "HEAD", "DELETE")
    },
    "POST /livez": message(b"x" * 10, path="/livez"),
    **{f"hostile {name}": message(body) for name, (_, _, body) in HOSTILE.items()},
}  # fmt: skip


async def exchange(url: str, data: bytes) -> Reply:
    head = data.startswith(b"HEAD")
    async with connect(url) as client:
        client.writer.write(data)
        await client.writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            lines = (await client.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
            body = b"" if head else await client.reader.readexactly(int(headers.get("content-length", 0)))
    own = headers.pop("x-request-id", "")
    headers.pop("date", None)
    if len(own) == 32:  # made up by the server
        body = body.replace(own.encode(), b"*" * 32)
    else:
        headers["x-request-id"] = own
    return Reply(int(lines[0].split()[1]), headers, body)


async def counters(url: str) -> list[str]:
    """What is counted of requests, and the names of everything else."""
    lines = (await get(url, "/metrics")).body.decode().splitlines()
    wanted = ("widebeam_requests_total{", "widebeam_shed_total{", "widebeam_request_seconds_count")
    return sorted(line if line.startswith(wanted) else line.split(" ")[0] for line in lines if line[0] != "#")


async def everything(**server: object) -> tuple[dict[str, Reply], list[str], list[object]]:
    async with served(max_body=2**20, **server) as running:
        replies = {name: await exchange(running.addresses.public, data) for name, data in CASES.items()}
        counted = await counters(running.addresses.public)
        running.front.why_not = ("no_weights: none are there",)
        replies["not ready"] = await exchange(running.addresses.public, message(method="GET", path="/readyz"))
        return replies, counted, [_plain(one) for one in running.front.admitted]


def _plain(request) -> object:
    """A request for comparisons: arrays as lists, its id only where a client gave it, times as whether there are."""
    tensors = getattr(request.context, "tensors", None)
    shown = {n: (a.dtype.str, a.shape, a.tolist()) for n, a in tensors.items()} if tensors else request.context
    name = request.request_id if len(request.request_id) != 32 else None
    fields = ("k", "user_id", "policy", "exclude", "ctx", "user", "seed", "arms", "explain", "load")
    return (name, shown, request.received > 0, request.deadline and round(request.deadline - request.received, 6),
            *(getattr(request, field) for field in fields))  # fmt: skip


async def test_every_answer_is_that_of_one_process():
    (one, counted, admitted), (two, counted_too, admitted_too) = await everything(), await everything(front_ends=1)
    assert one["golden"].status == 200
    assert len({reply.status for reply in one.values()}) > 10
    for name in CASES:
        assert two[name] == one[name], name
    assert two["not ready"] == one["not ready"]
    assert counted_too == counted
    assert admitted_too == admitted


def pids(server) -> dict[int, int]:
    """Processes of the front ends that are up."""
    found = {}
    for line in server.lines():
        if line["event"] == "front_end_up":
            found[line["front_end"]] = line["pid"]
        elif line["event"] == "front_end_gone":
            found.pop(line["front_end"], None)
    return found


def events(server, name: str) -> list[dict]:
    return [line for line in server.lines() if line["event"] == name]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def asking(url: str, body: object):
    """A client that has sent a request and waits."""
    async with connect(url) as client:
        client.writer.write(message(json.dumps(body).encode()))
        await client.writer.drain()
        yield client


async def test_a_client_that_leaves_and_a_deadline_that_passes_cancel_in_the_engine():
    async with served(front_ends=1) as server:
        async with asking(server.addresses.public, HELD):
            await until(lambda: len(server.front.admitted) == 1)
        await until(lambda: len(server.front.cancelled) == 1)
        began = time.monotonic()
        late = await ask(server.addresses.public, {**HELD, "deadline_ms": 300})
        assert (late.status, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - began >= 0.3
        await until(lambda: len(server.front.cancelled) == 2)
        assert server.front.cancelled == server.front.admitted
        assert (await ask(server.addresses.public, GOLDEN)).status == 200


async def test_an_engine_that_is_busy_delays_no_deadline():
    body = {**HELD, "deadline_ms": 300}
    async with served(front_ends=1) as server, asking(server.addresses.public, body) as client:
        await until(lambda: len(server.front.admitted) == 1)
        own = client.writer.get_extra_info("socket")
        # this is the engine's loop, and it is busy until the answer comes
        ready, _, _ = select.select([own.fileno()], [], [], PATIENCE_S)
        assert ready
        assert (await client.reply()).status == 504


async def test_a_front_end_that_is_killed_takes_only_its_own_requests_and_is_started_again():
    async with served(front_ends=2) as server:
        before = pids(server)
        async with asking(server.addresses.public, HELD) as one, asking(server.addresses.public, HELD) as other:
            await until(lambda: len(server.front.admitted) == 2)
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: events(server, "front_end_gone"))
            [gone] = events(server, "front_end_gone")
            assert (gone["front_end"], gone["pid"], gone["status"]) == (0, before[0], -signal.SIGKILL)
            assert gone["cancelled"] == len(server.front.cancelled) <= 2
            server.front.release.set()
            ends = [await _end(one), await _end(other)]
            assert ends.count(None) == gone["cancelled"]
            assert {end for end in ends if end is not None} <= {200}
        await until(lambda: len(pids(server)) == 2)
        assert pids(server)[1] == before[1]
        assert b"widebeam_front_ends_lost_total 1.0" in (await get(server.addresses.public, "/metrics")).body
        assert not alive(before[0])
        assert [(await ask(server.addresses.public, GOLDEN)).status for _ in range(20)] == [200] * 20


async def _end(client) -> int | None:
    """The status of an answer; None where the connection ends without one."""
    try:
        return (await client.reply()).status
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def test_a_front_end_that_is_stopped_delays_nobody_else_and_is_ended_with_the_server():
    async with served(front_ends=2, drain_timeout_s=0.3) as server:
        first = pids(server)
        os.kill(first[0], signal.SIGSTOP)
        for _ in range(20):
            assert (await ask(server.addresses.public, GOLDEN)).status == 200
    assert not any(map(alive, first.values()))
    assert not events(server, "front_end_gone")


async def test_a_server_ends_although_its_front_ends_never_start():
    processes, stop, log = [], asyncio.Event(), io.BytesIO()

    def start(listener: int, engine: int) -> subprocess.Popen:
        code = "import time; time.sleep(600)"
        processes.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=(listener, engine)))
        return processes[-1]

    settings = deployment(front_ends=2, drain_timeout_s=0.1)
    server = asyncio.create_task(serve(FakeFront(), settings, Metrics(), make_log(log), start=start, stop=stop))
    await until(lambda: len(processes) == 2)
    stop.set()
    async with asyncio.timeout(30):
        await server
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert b"listening" not in log.getvalue()


async def test_a_front_end_that_hangs_before_it_accepts_is_ended_and_tried_again(monkeypatch):
    monkeypatch.setattr(front_ends, "START_S", 0.2)
    processes, stop, log = [], asyncio.Event(), io.BytesIO()

    def start(listener: int, engine: int) -> subprocess.Popen:
        code = "import time; time.sleep(600)"
        processes.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=(listener, engine)))
        return processes[-1]

    settings = deployment(front_ends=1, drain_timeout_s=0.1)
    server = asyncio.create_task(serve(FakeFront(), settings, Metrics(), make_log(log), start=start, stop=stop))
    await until(lambda: len(processes) == 2 and b"listening" in log.getvalue())  # whoever connects waits
    assert processes[0].returncode == -signal.SIGKILL
    stop.set()
    async with asyncio.timeout(PATIENCE_S):
        await server
    events = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    assert "front_end_failed" in events
    assert "front_end_up" not in events


async def test_a_front_end_that_fails_at_once_is_tried_again_less_and_less_often():
    began, stop, log = [], asyncio.Event(), io.BytesIO()

    def start(listener: int, engine: int) -> subprocess.Popen:
        began.append(time.monotonic())
        if len(began) == 1:
            raise OSError("no more processes")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], pass_fds=(listener, engine))

    settings = deployment(front_ends=1)
    server = asyncio.create_task(serve(FakeFront(), settings, Metrics(), make_log(log), start=start, stop=stop))
    await until(lambda: len(began) == 4, 60)
    stop.set()
    async with asyncio.timeout(30):
        await server
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    events = [line["event"] for line in lines]
    assert [one for one in events if one.startswith("front_end")][:3] == ["front_end_failed", *["front_end_gone"] * 2]
    assert lines[events.index("front_end_gone")]["status"] in {7, -signal.SIGKILL}  # it may be ending when it is ended
    assert began[3] - began[2] >= 0.5
    assert "listening" in events  # the socket is there: whoever connects waits


async def test_without_descriptors_a_front_end_is_tried_again_and_none_is_left_open(monkeypatch):
    real, fails = socket.socket.dup, [1, 1]

    def dup(listener):
        if fails:
            fails.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "dup", dup)
    async with served(front_ends=1) as server:  # a socket that is forgotten is a warning, and warnings fail tests
        await until(lambda: pids(server))
        assert [line["reason"] for line in events(server, "front_end_failed")] == ["[Errno 24] Too many open files"] * 2
        assert (await ask(server.addresses.public, GOLDEN)).status == 200


async def test_while_leaving_what_runs_is_answered_and_connections_end(monkeypatch):
    go = held_delay(monkeypatch)
    async with served(front_ends=1, drain_delay_s=HELD_S, drain_timeout_s=PATIENCE_S) as server:
        public, before = server.addresses.public, pids(server)
        async with connect(public) as idle, asking(public, HELD) as held:
            await until(lambda: len(server.front.admitted) == 1)
            server.stop.set()
            await until(lambda: events(server, "draining"))
            ready = await get(public, "/readyz")
            assert (ready.status, ready.json()["reasons"], ready.headers["connection"]) == (503, ["draining"], "close")
            late = await ask(public, GOLDEN)
            assert (late.status, late.headers["connection"]) == (200, "close")
            go.set()
            await until(lambda: server.front.draining)
            assert await idle.closed()
            with pytest.raises(ConnectionError):
                await ask(public, GOLDEN)
            server.front.release.set()
            assert (await held.reply()).status == 200
    assert not any(map(alive, before.values()))


async def test_bodies_of_ten_megabytes_go_through_whole():
    async with served(front_ends=1, max_body=12 * 2**20) as server:
        data = os.urandom(2**20) * 5
        body = {"context": {"embeddings": {"x": {"dtype": "f16", "shape": [len(data) // 2],
                                                 "data": bytes(len(data))}}}, "k": 1}  # fmt: skip
        large = {"context": {"tokens": [2**31 - 1] * 2_000_000}, "k": 1}
        for one in (body, large):
            async with connect(server.addresses.public) as client:
                client.writer.write(packed(one))
                await client.writer.drain()
                assert (await client.reply()).status == 200
        tensors, tokens = (request.context for request in server.front.admitted)
        assert tensors.tensors["x"].shape == (len(data) // 2,)
        assert tokens.ids == (2**31 - 1,) * 2_000_000


async def test_a_front_end_needs_no_torch_and_reads_no_file():
    code = "import sys; from app.api import front_end; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
