"""Long runs (`make soak`): nothing grows. SOAK_SECONDS sets the length of the load (default 120)."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from pathlib import Path

import httpx

from tests import support
from tests.served.process import serving

SECONDS = float(os.environ.get("SOAK_SECONDS", "120"))
CLIENTS = 16


def resources(pid: int) -> dict[str, int]:
    """Resident KiB, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"kib": int(fields["VmRSS"].split()[0]), "files": files, "threads": int(fields["Threads"])}


async def client(server, random_: random.Random, until: float, seen: dict[str, int]) -> None:
    async with httpx.AsyncClient(base_url=server.public, timeout=30) as http:
        while time.monotonic() < until:
            body = {
                "context": {"history": [f"i{random_.randrange(60)}" for _ in range(random_.randrange(60))]},
                "k": 20,
            }
            kind = random_.random()
            if kind < 0.1:  # a client that gives up
                with suppress(httpx.ReadTimeout):
                    await http.post("/v1/recommend", json=body, timeout=httpx.Timeout(5, read=0.002))
                seen["left"] = seen.get("left", 0) + 1
                continue
            if kind < 0.15:
                name, allowed = "nowhere", {404}
                answer = await http.get(f"/{random_.random()}")
            elif kind < 0.2:
                name, allowed = "no policy", {422}
                answer = await http.post(
                    "/v1/recommend", json={**body, "user_id": str(random_.random()), "policy": "no"}
                )
            elif kind < 0.3:
                name, allowed = "in a hurry", {200, 503, 504}
                answer = await http.post("/v1/recommend", json={**body, "deadline_ms": random_.randrange(1, 30)})
            else:
                name, allowed = "200", {200}
                answer = await http.post("/v1/recommend", json=body)
            assert answer.status_code in allowed, (name, answer.status_code, answer.text)
            seen[name] = seen.get(name, 0) + 1


def load(server, seconds: float, seed: int) -> dict[str, int]:
    seen: dict[str, int] = {}

    async def everybody():
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(server, random.Random(f"{seed}/{n}"), until, seen) for n in range(CLIENTS)))

    asyncio.run(everybody())
    return seen


def test_nothing_grows_under_load_departures_and_nonsense(tmp_path):
    items = [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(support.random_sids((8, 8, 8), 60).tolist())]
    with serving(support.write_root(tmp_path / "root", (8, 8, 8), items)) as server:
        server.ready()
        golden = server.items("i1", "i2", k=30)
        load(server, SECONDS / 4, seed=0)
        before, series = resources(server.process.pid), len(server.client.get("/metrics").text.splitlines())
        seen = load(server, SECONDS, seed=1)
        server.until(lambda: server.status()["queue"]["in_flight"] == 0, "idle")
        after = resources(server.process.pid)
        assert seen["200"] > 100, seen
        assert after["kib"] < 1.05 * before["kib"] + 4096
        assert after["files"] <= before["files"] + CLIENTS
        assert after["threads"] <= before["threads"]
        assert len(server.client.get("/metrics").text.splitlines()) <= series + 20
        assert server.metric("widebeam_in_flight") == server.metric("widebeam_queue_depth") == 0
        assert server.items("i1", "i2", k=30) == golden
        assert server.stop() == 0
