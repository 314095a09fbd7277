"""An edited deployment.toml, live: what is refused leaves nothing behind, what never stands still stops nobody."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from app.runtime import artifact_updates
from tests import support
from tests.api.support import ask
from tests.live_support import live_server, until
from tests.runtime.test_cutover import Load, Truth, edit, serving, state_of, weights, world


def stored(root):
    return {path.stem for path in (root / "contracts").iterdir()}


async def test_a_declaration_that_is_refused_leaves_no_contract_and_one_that_serves_does(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        before = stored(root)
        text = (root / "deployment.toml").read_text()
        for name in ("alpha", "beta", "gamma"):
            declared = f'{text}\n[attributes]\n{name} = {{of = "nobody", as = "max"}}\n'
            support.replace_text(root / "deployment.toml", declared)
            status = await server.settles(lambda status, n=name: n in str(status["deployment"].get("reason")))
            assert status["deployment"]["state"] == "rejected"
            assert stored(root) == before
        support.replace_text(root / "deployment.toml", text.replace("batch = 16", "batch = 8"))
        status = await server.settles(lambda status: status["deployment"]["state"] == "in force")
        await server.sees(lambda _: asyncio.to_thread(lambda: stored(root) == before | {status["active"]["contract"]}))
        await until(lambda: server.events("contract_stored"))  # the thread that writes it says so after it
        assert [line["contract"] for line in server.events("contract_stored")] == [status["active"]["contract"]]


async def test_what_is_refused_under_a_contract_of_its_own_leaves_no_state_memory(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        runtime = server.live._runtime
        serves, warm, tried = runtime.active.contract.id, runtime.warm, []

        async def fails(snapshot, plans, **how):
            if snapshot.contract.id == serves:
                return await warm(snapshot, plans, **how)
            tried.append(snapshot.contract.id in runtime._steps._lanes)
            return {"base": "boom"}

        monkeypatch.setattr(runtime, "warm", fails)
        edit(root, "batch = 16", "batch = 8")
        await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert set(tried) == {True}
        await until(lambda: set(runtime._steps._lanes) == {serves})


@pytest.mark.parametrize("front_ends", [0, 1])
async def test_the_largest_k_is_that_of_the_limits_in_force(tmp_path, front_ends):
    root = world(tmp_path)
    edit(root, "[limits]\n", "[limits]\nk = 5\n")
    edit(root, "[server]\n", f"[server]\nfront_ends = {front_ends}\n")

    async def most(server, k):
        reply = await ask(server.public, {"context": {"history": ["i1"]}, "k": k + 1})
        error = reply.json()["error"]
        assert (reply.status, error["path"]) == (422, "$.k")
        assert f"1 to {k} are possible (limits.k)" in error["message"]
        assert len((await server.recommend("i1", k=k))["items"]) == k

    async with live_server(root) as server:
        await most(server, 5)
        for old, new in ((5, 9), (9, 3)):
            before = (await server.status())["active"]["contract"]
            edit(root, f"k = {old}\n", f"k = {new}\n")
            await server.settles(lambda status, before=before: status["active"]["contract"] != before)
            await most(server, new)


@asynccontextmanager
async def edited_for_ever(root, every_s):
    """Somebody saves deployment.toml, another one each time, without a pause. Yields the last text's batch."""
    text, last, held = (root / "deployment.toml").read_text(), [16], asyncio.Event()

    async def go_on():
        while not held.is_set():
            last[0] = 2 + (last[0] - 1) % 14
            new = text.replace("batch = 16", f"batch = {last[0]}")
            beside = root / ".deployment.toml.swp"
            beside.write_text(new)
            beside.replace(root / "deployment.toml")
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await held.wait()

    task = asyncio.create_task(go_on())
    try:
        yield last
    finally:
        held.set()
        await task


async def test_an_overlay_that_is_edited_for_ever_does_not_keep_newer_versions_from_serving(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "RESTLESS_S", 0.5)
    root = world(tmp_path)
    async with live_server(root) as server:
        first = (await server.status())["active"]["contract"]
        async with edited_for_ever(root, 0.15) as last:
            weights(root, "v2", 1)
            status = await server.settles(serving("v2"))
            status = await server.settles(lambda status: status["active"]["contract"] != first)
            assert status["ready"]
        await server.settles(lambda _: server.live._runtime.active.contract.limits.batch == last[0])
        assert (await server.status())["deployment"]["state"] == "in force"


async def test_an_overlay_that_never_stands_still_at_all_is_not_believed_and_versions_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(artifact_updates, "RESTLESS_S", 0.3)
    monkeypatch.setattr(artifact_updates, "MOST_RESTLESS_S", 0.6)
    root, count = world(tmp_path), [0]
    async with live_server(root) as server:
        await server.settles(lambda status: status["desired"])  # the first look believes what it sees
        load = Load(server, Truth(root), clients=2)
        first = (await server.status())["active"]["contract"]
        real = artifact_updates.survey

        def restless(*args):  # as if it was saved between any two looks
            count[0] += 1
            return real(*args)._replace(deployment=b"%d" % count[0])

        with monkeypatch.context() as patch:
            patch.setattr(artifact_updates, "survey", restless)
            weights(root, "v2", 1)
            status = await server.settles(serving("v2"))
            assert (status["active"]["contract"], status["deployment"]["state"]) == (first, "in force")
            assert state_of(status, "weights", "v2")["state"] == "active"
        edit(root, "batch = 16", "batch = 8")
        await server.settles(lambda status: status["active"]["contract"] != first)
        load.going = False
        await asyncio.gather(*load.tasks)
