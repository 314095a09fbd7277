"""`widebeam serve` with front ends in processes of their own: updates, deaths and departures, over a real model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests import support
from tests.api.support import ask
from tests.live_support import live_server
from tests.runtime.test_cutover import Load, Truth, edit, weights, world
from tests.runtime.test_cutover import serving as active
from tests.served.process import PATIENCE_S, serving


def with_front_ends(root: Path, number: int) -> Path:
    edit(root, "[server]\n", f"[server]\nfront_ends = {number}\n")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return with_front_ends(support.write_root(tmp_path_factory.mktemp("front_ends") / "root", (4, 5, 6)), 2)


def up(server) -> dict[int, int]:
    """Processes of the front ends that are up, by number."""
    found = {}
    for line in list(server.lines):
        if line.get("event") == "front_end_up":
            found[line["front_end"]] = line["pid"]
        elif line.get("event") == "front_end_gone":
            found.pop(line["front_end"], None)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: Iterable[int], seconds: float = PATIENCE_S) -> bool:
    """Whether processes end: their files are closed a moment before they are gone."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Asking:
    """Clients without pause, each on connections of its own: answers by client, and connections that were cut."""

    def __init__(self, server, clients: int = 4) -> None:
        self.server, self.going, self.answers, self.cut = server, True, 0, 0
        self.wrong: list[str] = []
        self.truth = {n: server.items(f"i{n}", f"i{n + 7}", k=20) for n in range(clients)}
        self.threads = [threading.Thread(target=self.run, args=(n,), daemon=True) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self, n: int) -> None:
        body = {"context": {"history": [f"i{n}", f"i{n + 7}"]}, "k": 20}
        with httpx.Client(base_url=self.server.public, timeout=PATIENCE_S) as http:
            while self.going:
                try:
                    answer = http.post("/v1/recommend", json=body)
                except httpx.TransportError:
                    self.cut += 1
                    continue
                self.answers += 1
                if answer.status_code != 200:
                    self.wrong.append(answer.text)
                    continue
                found = [(item["id"], item["score"]) for item in answer.json()["items"]]
                if [one for one, _ in found] != [one for one, _ in self.truth[n]]:
                    self.wrong.append(f"client {n}: {found}")

    def more(self, number: int) -> None:
        want = self.answers + number
        self.server.until(lambda: self.answers >= want, f"{number} more answers")

    def end(self) -> None:
        self.going = False
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.slow  # four processes that start again, beside clients without pause
@pytest.mark.timeout(300)
def test_front_ends_that_are_killed_under_load_cost_only_their_own_connections(root):
    with serving(root) as server:
        server.ready()
        load = Asking(server)
        load.more(100)
        before, files, deaths = rss(server.process.pid), _files(server), 4
        for number in range(deaths):
            server.until(lambda: len(up(server)) == 2, "both up")
            victim = up(server)[number % 2]
            os.kill(victim, signal.SIGKILL)
            server.until(lambda pid=victim: pid not in up(server).values(), "gone")
            load.more(30)
        server.until(lambda: len(up(server)) == 2, "both up again")
        load.more(50)
        load.end()
        assert load.wrong == []
        assert load.cut <= deaths * 4
        server.until(lambda: server.status()["queue"]["in_flight"] == 0, "idle")
        server.until(lambda: _files(server) <= files, "no descriptor left")
        assert rss(server.process.pid) < before + 64 * 2**20
        last = up(server)
        assert server.stop() == 0
        assert ended(last.values())
        assert [line for line in server.lines if line.get("event") == "raw"] == []


def _files(server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.slow
def test_when_the_engines_process_is_killed_front_ends_end_and_the_port_is_free(root):
    with serving(root) as server:
        server.ready()
        children = up(server)
        host, port = urlsplit(server.public).hostname, urlsplit(server.public).port
        with socket.create_connection((host, port)):  # who is connected does not keep a front end alive
            server.process.kill()
            server.process.wait(PATIENCE_S)
            server._reader.join(60)  # nobody holds its log open any more
            assert not server._reader.is_alive()
        assert ended(children.values())
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((host, port))
            again.listen()
        assert [line for line in server.lines if line.get("event") == "raw"] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_the_server_in_order(root, number):
    with serving(root, group=True) as server:
        server.ready()
        children = up(server)
        os.killpg(server.process.pid, number)
        assert server.process.wait(60) == 0
        server._reader.join(60)
        events = [line["event"] for line in server.lines]
        assert events[-1] == "stopped"
        assert "front_end_gone" not in events
        assert "raw" not in events
        assert ended(children.values())


@pytest.mark.slow
def test_a_second_signal_ends_the_front_ends_too_whatever_they_wait_for(tmp_path):
    root = with_front_ends(support.write_root(tmp_path / "root"), 2)
    edit(root, "[server]\n", "[server]\ndrain_timeout_s = 600\nread_timeout_s = 600\n")
    with serving(root, group=True) as server:
        server.ready()
        children, url = up(server), urlsplit(server.public)
        with socket.create_connection((url.hostname, url.port)) as half:
            half.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{")
            os.killpg(server.process.pid, signal.SIGTERM)
            server.said("draining")
            _refused(url)
            server.process.terminate()
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
            assert ended(children.values())
            half.settimeout(PATIENCE_S)
            assert half.recv(100).startswith(b"HTTP/1.1 503 ")


def _refused(url) -> None:
    """Wait until nobody accepts connections any more."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            socket.create_connection((url.hostname, url.port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    raise AssertionError("connections are still accepted")


def test_one_log_and_one_scrape_tell_of_every_front_end(root):
    with serving(root) as server:
        server.ready()
        connections = [httpx.Client(base_url=server.public, timeout=PATIENCE_S) for _ in range(8)]
        for n, http in enumerate(connections):
            body = {"context": {"history": ["i1"]}, "k": 1, "request_id": f"r{n}"}
            assert http.post("/v1/recommend", json=body).status_code == 200
            assert http.post("/v1/recommend", json={**body, "k": 0}).status_code == 422
            http.close()
        for kind in ('outcome="ok",policy="base"', 'outcome="invalid",policy="none"'):  # each tells ten times a second
            name = f"widebeam_requests_total{{{kind}}}"
            server.until(lambda name=name: server.metric(name) == 8, f"{kind} counted")
        assert server.status()["counters"]["executed"] == 8
        server.until(lambda: sum(line.get("route") == "/v1/recommend" for line in server.lines) == 16, "logged")
        lines = [line for line in server.lines if line.get("outcome") == "ok" and line["route"] == "/v1/recommend"]
        assert {line["request_id"] for line in lines} == {f"r{n}" for n in range(8)}
        edit(root, "front_ends = 2", "front_ends = 1")
        try:
            server.until(lambda: server.status()["deployment"]["restart"] == ["server.front_ends"], "seen")
        finally:
            edit(root, "front_ends = 1", "front_ends = 2")


async def test_cutovers_and_edits_through_two_front_ends_fail_no_request_and_mix_nothing(tmp_path):
    root = with_front_ends(world(tmp_path), 2)
    async with live_server(root) as server:
        load = Load(server, Truth(root))
        await load.begun()
        weights(root, "v2", 1)
        await server.settles(active("v2", "v1"))
        before = (await server.status())["active"]["snapshot"]
        (root / "policies" / "third.yaml").write_text("widebeam: 1\nwidths: [2, 2, 2]\n")
        await server.settles(lambda status: "third" in status["policies"])
        weights(root, "v3", 2)
        await server.settles(active("v3", "v1"))
        assert (await server.recommend("a1", policy="third"))["versions"]["weights"] == "v3"
        await load.sees(lambda: load.seen[-1] == ("v3", "v1"))
        seen = await load.end()
        assert before
        assert set(seen) <= {("v1", "v1"), ("v2", "v1"), ("v3", "v1")}
        for order in load.of_client:
            assert order == sorted(order)
        status = await server.settles(lambda status: status["counters"]["executed"] >= load.answers)
        assert status["counters"]["failed"] == status["counters"]["refused"] == 0


async def test_a_real_model_answers_and_explains_through_a_front_end_as_without(tmp_path):
    root = world(tmp_path)
    asked = [
        {},
        {"policy": "narrow", "seed": 7},
        {"exclude": ["a2", "a3", "never-heard-of"], "user_id": "u"},
        {"explain": {"why": ["a1", "never-heard-of"]}},
    ]
    found = []
    for number in (0, 1):
        if number:
            with_front_ends(root, number)
        async with live_server(root) as server:
            answers = [await server.recommend("a1", "a5", request_id=f"r{n}", **one) for n, one in enumerate(asked)]
            refused = [await ask(server.public, {"context": {"tokens": [1]}, "k": k}) for k in (1, 10**6)]
        for answer in answers:
            del answer["timings_ms"]
        found.append((answers, [(one.status, one.json()) for one in refused]))
    assert len(found[0][0][3]["explain"]) == 3 + 2
    assert found[0][1][0][0] == 422
    assert found[1] == found[0]


def test_a_program_of_the_same_name_in_the_working_directory_is_not_taken_for_it(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    code = (
        "from app.cli import front_end; import socket; a, b = socket.socketpair(), socket.socketpair();"
        "p = front_end.start(a[0].fileno(), b[0].fileno()); [s.close() for s in (*a, *b)]; raise SystemExit(p.wait())"
    )
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(here)},
                          check=False, timeout=60)  # fmt: skip
    assert done.returncode == 0  # it found its engine gone, and ended
