import asyncio
import json
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from app.api import listener
from app.api.server import CannotListen, is_loopback
from tests.api.support import GOLDEN, ask, connect, get, message, served, until

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from app.api.server import serve
    from app.cli.loop import run
    from app.runtime.logs import make_log, route_stdlib
    from app.runtime.metrics import Metrics
    from tests.api.support import FakeFront, deployment

    class Slow(FakeFront):
        def begin_drain(self):
            super().begin_drain()
            asyncio.get_running_loop().call_later(0.3, self.release.set)

    def ready(addresses):
        print(addresses.public, addresses.admin, flush=True)

    async def main():
        settings = dict(drain_delay_s=float(sys.argv[1]), drain_timeout_s=float(sys.argv[2]), admin_auth="none")
        log = make_log(sys.stderr.buffer)
        route_stdlib(log)
        await serve(Slow(), deployment(**settings), Metrics(), log, on_ready=ready)

    run(main())
    """
)


class Process:
    def __init__(self, delay: float, timeout: float) -> None:
        command = [sys.executable, "-c", PROGRAM, str(delay), str(timeout)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.public, self.admin = self.popen.stdout.readline().decode().split()

    def end(self) -> tuple[int, list[dict]]:
        _, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, [json.loads(line) for line in errors.splitlines()]


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
        process.popen.stdout.close()
        process.popen.stderr.close()


async def test_sigterm_drops_readiness_finishes_what_runs_and_exits_with_0(start):
    process = start(0.6, 10)
    held = [asyncio.create_task(ask(process.public, {"context": {"history": ["hold"]}, "k": 1})) for _ in range(20)]
    await asyncio.sleep(0.2)
    process.popen.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    ready, live = await get(process.public, "/readyz"), await get(process.public, "/livez")
    assert (ready.status, ready.json()["reasons"], live.status) == (503, ["draining"], 200)
    late = await ask(process.public, GOLDEN)
    assert (late.status, late.headers["connection"]) == (200, "close")
    assert not any(task.done() for task in held)
    replies = await asyncio.gather(*held)
    assert [reply.status for reply in replies] == [200] * 20
    code, lines = process.end()
    assert code == 0
    events = [line["event"] for line in lines if line["event"] != "request"]
    assert events == ["listening", "signal", "draining", "stopped"]


async def test_a_second_signal_exits_at_once(start):
    process = start(30, 30)
    for number in (signal.SIGTERM, signal.SIGTERM):
        process.popen.send_signal(number)
        await asyncio.sleep(0.2)
    assert process.end()[0] == 128 + signal.SIGTERM


async def test_a_client_that_never_finishes_its_body_does_not_outlast_the_grace_period(start):
    process = start(0, 0.5)
    async with connect(process.public) as client:
        client.writer.write(message(method="POST", content_length="100"))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        reply = await client.reply()
    assert (reply.status, reply.json()["error"]["code"], reply.headers["connection"]) == (503, "draining", "close")
    code, lines = process.end()
    assert (code, time.monotonic() - began < 5) == (0, True)
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
            await until(server.stop.is_set, 0.5)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.1", False), ("localhost.example.org", False), ("", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host, loopback):
    assert is_loopback(host) is loopback
