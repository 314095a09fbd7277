import asyncio
import json
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from app.api import listener
from app.api.server import CannotListen, is_loopback
from tests import said
from tests.api.support import GOLDEN, HELD_S, PATIENCE_S, ask, connect, get, message, served, until

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from app.api.server import serve
    from app.cli.loop import run
    from app.runtime.logs import make_log, route_stdlib
    from app.runtime.metrics import Metrics
    from tests.api.support import HELD_S, FakeFront, deployment

    class Slow(FakeFront):
        def begin_drain(self):
            super().begin_drain()
            asyncio.get_running_loop().call_later(0.3, self.release.set)

    def ready(addresses):
        print(addresses.public, addresses.admin, flush=True)

    real = asyncio.sleep

    async def sleep(seconds, *rest):  # a delay that ends when a test says so
        held = seconds == HELD_S
        await (asyncio.to_thread(sys.stdin.readline) if held else real(seconds, *rest))

    asyncio.sleep = sleep

    async def main():
        settings = dict(drain_delay_s=float(sys.argv[1]), drain_timeout_s=float(sys.argv[2]), admin_auth="none",
                        read_timeout_s=60.0)
        log = make_log(sys.stderr.buffer)
        route_stdlib(log)
        await serve(Slow(), deployment(**settings), Metrics(), log, on_ready=ready)

    run(main())
    """
)


class Process:
    def __init__(self, delay: float, timeout: float) -> None:
        command = [sys.executable, "-c", PROGRAM, str(delay), str(timeout)]
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        self.public, self.admin = self.popen.stdout.readline().decode().split()
        self.heard: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.lines: list[dict] = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        text = lambda: "\n".join(map(json.dumps, self.lines))  # noqa: E731
        said.listen("server as a process", text, lambda: self.popen.poll() is None)

    def read(self) -> None:
        for line in self.popen.stderr:
            self.lines.append(json.loads(line))
            self.heard.put(self.lines[-1])

    async def says(self, event: str) -> None:
        """Wait for a line of the log."""
        while (await asyncio.to_thread(self.heard.get, timeout=PATIENCE_S))["event"] != event:
            pass

    def go(self) -> None:
        """End a delay of `HELD_S`."""
        self.popen.stdin.write(b"\n")
        self.popen.stdin.flush()

    def end(self) -> tuple[int, list[dict]]:
        code = self.popen.wait(PATIENCE_S)
        self.reader.join()
        return code, self.lines


@pytest.fixture
def start():
    made = []

    def begin(delay: float, timeout: float) -> Process:
        made.append(Process(delay, timeout))
        return made[-1]

    yield begin
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()
        process.reader.join()
        for stream in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
            stream.close()


async def heard(process):
    """What was sent before is with the server: it takes connections in their order, and so does one look at them."""
    await asyncio.sleep(0)
    for _ in range(3):
        assert (await get(process.public, "/livez")).status == 200


async def test_sigterm_drops_readiness_finishes_what_runs_and_exits_with_0(start):
    process = start(HELD_S, PATIENCE_S)
    held = [asyncio.create_task(ask(process.public, {"context": {"history": ["hold"]}, "k": 1})) for _ in range(20)]
    await heard(process)
    process.popen.send_signal(signal.SIGTERM)
    await process.says("draining")
    ready, live = await get(process.public, "/readyz"), await get(process.public, "/livez")
    assert (ready.status, ready.json()["reasons"], live.status) == (503, ["draining"], 200)
    late = await ask(process.public, GOLDEN)
    assert (late.status, late.headers["connection"]) == (200, "close")
    assert not any(task.done() for task in held)
    process.go()
    replies = await asyncio.gather(*held)
    assert [reply.status for reply in replies] == [200] * 20
    code, lines = process.end()
    assert code == 0
    events = [line["event"] for line in lines if line["event"] != "request"]
    assert events == ["listening", "signal", "draining", "stopped"]


async def test_a_second_signal_exits_at_once(start):
    process = start(HELD_S, PATIENCE_S)
    process.popen.send_signal(signal.SIGTERM)
    await process.says("draining")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 128 + signal.SIGTERM


async def test_a_client_that_never_finishes_its_body_does_not_outlast_the_grace_period(start):
    process = start(0, 0.5)
    async with connect(process.public) as client:
        client.writer.write(message(method="POST", content_length="100"))
        await client.writer.drain()
        await heard(process)
        process.popen.send_signal(signal.SIGTERM)
        reply = await client.reply()
    assert (reply.status, reply.json()["error"]["code"], reply.headers["connection"]) == (503, "draining", "close")
    code, lines = process.end()
    assert code == 0
    assert not any("exception" in line for line in lines)


async def test_idle_connections_do_not_hold_up_the_end(start):
    process = start(0, 10)
    async with connect(process.public) as idle, connect(process.public) as silent:
        idle.writer.write(message(path="/livez", method="GET"))
        await idle.reply()
        silent.writer.write(b"GET /li")
        await silent.writer.drain()
        process.popen.send_signal(signal.SIGINT)
        assert process.end()[0] == 0


async def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for which in ("port", "admin_port"):
            choose = f"choose another {which} with --{which.replace('_', '-')} or under"
            with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: .*in use; {choose}"):
                async with served(**{which: port}):
                    pass


async def test_one_port_for_both_listeners_is_refused():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(CannotListen, match="in use"):
        async with served(port=port, admin_port=port):
            pass


async def test_a_host_that_is_none_is_an_error():
    with pytest.raises(CannotListen, match=r"cannot listen on no\.such\.host\.invalid"):
        async with served(host="no.such.host.invalid"):
            pass


async def test_ports_of_choice_0_are_reported_and_no_server_header_is_sent():
    async with served() as server:
        assert server.addresses.public != server.addresses.admin
        reply = await get(server.addresses.public, "/livez")
        assert "server" not in reply.headers
        listening = next(line for line in server.lines() if line["event"] == "listening")
        assert (listening["public"], listening["admin"]) == server.addresses


async def test_a_listener_that_dies_ends_the_server_with_its_error(monkeypatch):
    class Broken(listener._Uvicorn):
        async def main_loop(self) -> None:
            raise RuntimeError("listener broke")

    monkeypatch.setattr(listener, "_Uvicorn", Broken)
    with pytest.raises(RuntimeError, match="listener broke"):
        async with served() as server:
            await until(server.stop.is_set, 0.5)  # never: the error comes from the server


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.1", False), ("localhost.example.org", False), ("", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host, loopback):
    assert is_loopback(host) is loopback
