"""A server over a real root, in this process: the whole way from a file to an answer."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from app.cli.compose import Overrides, Service, compose
from app.cli.serve import run
from app.policies.plan import Plan
from app.runtime.live import Live
from app.runtime.snapshot import Snapshot
from tests import said
from tests.api.support import PATIENCE_S, Reply, ask, get, until


@dataclass
class LiveServer:
    """One running server. Answers are documents; whatever is not a 200 fails the test that asked."""

    root: Path
    public: str
    admin: str
    service: Service
    logged: io.BytesIO | LogFile
    made: list[Live]

    @property
    def live(self) -> Live:
        return self.made[0]

    async def recommend(self, *history: str, **fields: object) -> dict:
        body = {"context": {"history": list(history)}, "k": 50, **fields}
        reply = await ask(self.public, body, path="/v1/recommend")
        assert reply.status == 200, reply.body
        return reply.json()

    async def status(self) -> dict:
        return (await get(self.admin, "/admin/v1/status")).json()

    async def policies(self) -> dict:
        return (await get(self.admin, "/admin/v1/policies")).json()

    async def post(self, path: str, body: object = None) -> Reply:
        return await ask(self.admin, body, path=f"/admin/v1/{path}")

    async def ready(self) -> None:
        await self.settles(lambda status: status["ready"])

    async def settles(self, condition, seconds: float = PATIENCE_S) -> dict:
        """Poll the status until a condition holds."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition(status := await self.status()):
            assert asyncio.get_running_loop().time() < end, json.dumps(status, indent=1)
            await asyncio.sleep(0.02)
        return status

    async def sees(self, look, seconds: float = PATIENCE_S) -> None:
        """Ask until an answer is what a test waits for: often at first, then so that the asking takes no core."""
        end, pause = asyncio.get_running_loop().time() + seconds, 0.005
        while not await look(self):
            assert asyncio.get_running_loop().time() < end, look
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def events(self, name: str) -> list[dict]:
        return [line for line in map(json.loads, self.logged.getvalue().splitlines()) if line["event"] == name]


class LogFile(io.FileIO):
    """A log on the disk, for servers that write much of it and whose memory is looked at."""

    def getvalue(self) -> bytes:
        return Path(str(self.name)).read_bytes()


@asynccontextmanager
async def live_server(root: Path, *, ready: bool = True, log: Path | None = None) -> AsyncIterator[LiveServer]:
    """A server over a root, on ports of its own; stopped and drained at the end. log: in a file, not in memory."""
    logged = LogFile(log, "wb") if log else io.BytesIO()
    stop = asyncio.Event()
    service, made = compose(root, Overrides(device="cpu"), logged, tolerant=True), []

    def build(runtime):
        made.append(real(runtime))
        return made[0]

    real, service = service.live, replace(service, live=build)
    addresses: asyncio.Future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run(service, root, addresses.set_result, stop))
    await asyncio.wait((addresses, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    server = LiveServer(root, *addresses.result(), service, logged, made)
    said.listen(f"server on {root.name}", lambda: logged.getvalue().decode("utf-8", "replace"), lambda: not task.done())
    try:
        if ready:
            await server.ready()
        yield server
    finally:
        stop.set()
        await task
    assert server.events("loop_died") == [], server.events("loop_died")
    for name in ("policy_update_failed", "artifact_update_failed", "takedown_update_failed"):
        assert server.events(name) == [], server.events(name)
    if isinstance(logged, LogFile):
        logged.close()


class Resources(NamedTuple):
    """What a process holds. files: open descriptors · rss: bytes · objects: snapshots and plans that are alive."""

    files: int
    threads: int
    tasks: int
    rss: int
    objects: int

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        kinds = (Snapshot, Plan)
        alive = sum(type(one) in kinds for one in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        names = [thread.name for thread in threading.enumerate() if "asyncio" not in thread.name]  # the executor's own
        return cls(
            len(list(Path("/proc/self/fd").iterdir())), len(names), len(asyncio.all_tasks()),
            pages * os.sysconf("SC_PAGE_SIZE"), alive,
        )  # fmt: skip


__all__ = ["LiveServer", "Resources", "live_server", "until"]
