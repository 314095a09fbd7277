"""Live weights, vocab, take-downs and contracts under load: every answer is the one of the versions that it names."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import threading
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file

from app.cli.compose import read_deployment
from app.engine.slots import Slots
from app.errors import Rejected
from app.runtime import memory, preparing, state_dir
from app.runtime.contracts import Contracts
from app.runtime.desired import Option
from app.runtime.loader import bind, load_contract
from app.runtime.reading import read_weights
from app.vocab.artifact import load_vocab
from app.vocab.manifest import read_manifest
from app.vocab.publish import commit, draft
from tests import support
from tests.api.support import ask
from tests.engine import tiny
from tests.live_support import LiveServer, live_server, until

SIZES = (4, 5, 6)
HISTORIES = ("i1", "i2"), ("i7",), ("i20", "i3", "i11")


def items(prefix):
    """The same SIDs in every version, other ids: an answer shows which item map made it."""
    sids = support.random_sids(SIZES, 40).tolist()
    return [{"id": f"{prefix}{n}", "sid": sid} for n, sid in enumerate(sids)] + [
        {"id": f"i{n}", "sid": sid} for n, sid in enumerate(sids)
    ]


def weights(root, version, seed, requires: Mapping[str, list[str]] | None = None, **spoil):
    """Weights whose scores show which they are."""
    config = support.onerec_config(SIZES)
    tensors = {**support.onerec_weights(config, seed), **spoil}
    with draft(root, "weights") as made:
        made.write("config.json", [json.dumps(config).encode()])
        made.write("model.safetensors", [support.save(tensors)])
        commit(made, "weights", version, "tests", requires or {})


def takedown(root, version, ids):
    with draft(root, "takedowns") as made:
        made.write("items.txt", ["".join(f"{one}\n" for one in ids).encode()])
        commit(made, "takedowns", version, "tests", {})


def world(tmp_path, **kwargs):
    """weights/v1, vocab/v1 with ids a0.., and two policies."""
    return support.write_root(
        tmp_path / "root", SIZES, items("a"), {"narrow": "widebeam: 1\nwidths: [3, 3, 3]\n"}, **kwargs
    )


class Truth:
    """What each set of versions must answer, computed without a server."""

    def __init__(self, root):
        self.root, self.known = root, {}

    def of(self, weights_version, vocab_version, policy, history):
        key = weights_version, vocab_version, policy, history
        if key not in self.known:
            deployment = read_deployment(self.root)
            places = [
                (self.root / "weights" / weights_version, "weights"),
                (self.root / "vocab" / vocab_version, "vocab"),
            ]
            options = [Option.of(read_manifest(place, kind)) for place, kind in places]
            engine = read_weights(places[0][0], deployment, torch.device("cpu"), Contracts(self.root))
            parts = bind(deployment, engine, options[0], load_vocab(places[1][0], SIZES), options[1])
            text = (self.root / "policies" / f"{policy}.yaml").read_text()
            plans = {policy: support.plan_of(parts.contract, text, name=policy)}
            snapshot = parts.snapshot(support.Policies(plans, policy))
            ranked = support.run_batch([support.job_of(snapshot, deployment, history, k=10, policy=policy)])[0]
            self.known[key] = snapshot.vocab.ids(ranked.items), ranked.scores.tolist()
        return self.known[key]

    def check(self, answer, history):
        versions = answer["versions"]
        ids, scores = self.of(versions["weights"], versions["vocab"], versions["policy"], history)
        assert [item["id"] for item in answer["items"]] == ids, versions
        assert [item["score"] for item in answer["items"]] == pytest.approx(scores, abs=1e-4), versions
        return versions["weights"], versions["vocab"]


class Contracted:
    """The truth where deployment.toml is edited: an answer is that of the contract that it names. roots: which differ
    in their deployment.toml, and have one contract each; what is seen are (contract, weights, vocab)"""

    def __init__(self, *roots):
        self.truths = {load_contract(root, read_deployment(root)).id: Truth(root) for root in roots}

    def check(self, answer, history):
        contract = answer["versions"]["contract"]
        return contract, *self.truths[contract].check(answer, history)


class Load:
    """Clients without pause. Every answer is checked against the truth; `seen` are the pairs as they came."""

    def __init__(self, server, truth, clients=4, policies=("base", "narrow")):
        self.server, self.truth, self.policies = server, truth, policies
        self.going, self.seen, self.answers = True, [], 0
        self.of_client = [[] for _ in range(clients)]
        self.tasks = [asyncio.create_task(self.run(n)) for n in range(clients)]

    async def run(self, n):
        history, policy = HISTORIES[n % 3], self.policies[n % len(self.policies)]
        while self.going:
            before = self.sending()
            answer = await self.server.recommend(*history, k=10, policy=policy)
            pair = self.truth.check(answer, history)
            self.received(pair, before)
            self.answers += 1
            for order in (self.seen, self.of_client[n]):
                if order[-1:] != [pair]:
                    order.append(pair)

    def sending(self):
        """Somebody is about to ask: whatever `received` is to know of this moment."""

    def received(self, pair, before):
        """Somebody has an answer. before: what `sending` gave"""

    async def sees(self, condition):
        """Wait for what clients are to see; a client that has failed says so at once."""
        await until(lambda: condition() or any(task.done() for task in self.tasks))
        for task in self.tasks:
            if task.done():
                task.result()

    async def begun(self):
        """Each client has had an answer."""
        await self.sees(lambda: all(self.of_client))

    async def more(self, number):
        """So many answers from now on, all of them right."""
        wanted = self.answers + number
        await self.sees(lambda: self.answers >= wanted)

    async def end(self):
        self.going = False
        await asyncio.gather(*self.tasks)
        return self.seen


async def nobody_failed(server):
    """Every request that was ever asked has been answered."""
    counters = (await server.status())["counters"]
    assert counters["failed"] == counters["refused"] == 0, counters


def in_force(status):
    """Whether deployment.toml as it lies there is what serves."""
    return status["deployment"]["state"] == "in force"


def serving(weights=None, vocab=None):
    """Whether the active snapshot has these versions."""

    def look(status):
        active = status["active"]
        return (weights in {None, active["weights"]["version"]}) and (vocab in {None, active["vocab"]["version"]})

    return look


def problem(code):
    """Whether what is asked for cannot be had for this reason."""
    return lambda status: status["desired"].get("problem", {}).get("code") == code


def state_of(status, kind, version):
    return next(
        (one for one in status["artifacts"] if (one["kind"], one["version"]) == (kind, version)), {"state": None}
    )


async def test_weights_vocab_and_pairs_cut_over_under_load_without_a_mixed_answer(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        truth = Truth(root)
        load = Load(server, truth)
        await load.begun()
        weights(root, "v2", 1)
        await server.settles(serving("v2", "v1"))
        await load.sees(lambda: ("v2", "v1") in load.seen)
        support.write_vocab(root, SIZES, items("b"), version="v2")
        await server.settles(serving("v2", "v2"))
        await load.sees(lambda: ("v2", "v2") in load.seen)
        weights(root, "v3", 2, {"vocab": ["v3"]})
        status = await server.settles(lambda status: state_of(status, "weights", "v3")["state"] == "waiting")
        assert serving("v2", "v2")(status)
        support.write_vocab(root, SIZES, items("c"), version="v3")
        status = await server.settles(serving("v3", "v3"))
        await load.sees(lambda: all(order[-1] == ("v3", "v3") for order in load.of_client) and load.answers > 20)
        seen = await load.end()
        assert seen[0] == ("v1", "v1")
        for order in load.of_client:  # what is sent after an answer was received is never older than it
            assert order == sorted(order)
        assert set(seen) <= {("v1", "v1"), ("v2", "v1"), ("v2", "v2"), ("v3", "v3")}
        await nobody_failed(server)
        causes = [cutover["cause"] for cutover in status["history"]]
        assert causes == ["start", "newest", "newest", "newest"]
        assert all(cutover["hold_ms"] is not None for cutover in status["history"][1:3])


async def test_rollback_and_promote_are_instant_pinned_and_idempotent(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        weights(root, "v2", 1)
        status = await server.settles(serving("v2"))
        old, new = status["history"][0]["to"], status["active"]["snapshot"]
        assert {one["state"] for one in status["snapshots"]} == {"active", "ready"}
        for _ in range(2):
            reply = await server.post(f"snapshots/{old}:rollback")
            assert (reply.status, reply.json()["state"], reply.json()["pin"]) == (
                200,
                "active",
                {"weights": "v1", "vocab": "v1"},
            )
            assert serving("v1")(await server.status())
        weights(root, "v3", 2)  # pinned: it prepares, and waits
        status = await server.settles(lambda status: state_of(status, "weights", "v3")["state"] == "ready")
        assert serving("v1")(status)
        assert json.loads((root / "state" / "pin.json").read_text()) == {"weights": "v1", "vocab": "v1"}
        assert (await server.post("snapshots/nope:promote")).status == 422
        assert (await server.post("snapshots:unpin")).json() == {"pin": None}
        assert (await server.post("snapshots:unpin")).status == 200
        await server.settles(serving("v3"))
        reply = await server.post("snapshots:promote?wait=60", {"weights": "v2"})
        assert (reply.status, reply.json()["state"]) == (200, "active"), reply.body
        assert serving("v2")(await server.status())
        await load.end()
        assert new is not None


async def test_a_decision_that_cannot_be_kept_or_carried_out_changes_nothing(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        old = (await server.settles(serving("v2")))["history"][0]["to"]

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(state_dir, "write", full)
            reply = await server.post(f"snapshots/{old}:rollback")
            assert (reply.status, "No space" in reply.json()["error"]["message"]) == (503, True)
            assert (await server.post("kill", {"kill": ["narrow"]})).status == 503
        assert serving("v2")(await server.status())
        assert (await server.status())["killed"] == []

        async def refuse(*_):
            raise Rejected("no_default_policy", "the default policy cannot serve with it")

        with monkeypatch.context() as patch:
            patch.setattr(server.live._artifacts.stage, "promote", refuse)
            reply = await server.post(f"snapshots/{old}:rollback")
            assert (reply.status, reply.json()["error"]["code"]) == (422, "no_default_policy")
            assert not (root / "state" / "pin.json").exists()
        assert serving("v2")(await server.status())
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        assert serving("v1")(await server.status())


async def test_a_pin_outlives_the_server_and_release_json_is_followed(tmp_path):
    root = world(tmp_path)
    weights(root, "v2", 1)
    async with live_server(root) as server:
        (root / "release.json").write_text('{"weights": "v1"}')
        status = await server.settles(serving("v1"))
        assert (status["desired"]["asked"], status["desired"]["by"]) == ({"weights": "v1"}, "release.json")
        (root / "release.json").write_text('{"weights": "v7"}')
        status = await server.settles(problem("no_such_version"))  # a text that is half written is one, too
        assert serving("v1")(status)
        (root / "release.json").write_text("{")
        status = await server.settles(problem("bad_json"))
        assert serving("v1")(status)
        assert (await server.post("snapshots:promote?wait=60", {"weights": "v2"})).status == 200
    async with live_server(root, ready=False) as server:
        await server.settles(lambda status: status["reasons"] != ["starting: artifacts are being loaded"])
        (root / "release.json").write_text('{"weights": "v1"}')
        await server.ready()
        assert serving("v2")(await server.status())


def spoiled(live, version, how):
    """A weights version that is wrong in one way, from the moment on that it is there."""
    root = live.parent / "aside"
    config = support.onerec_config(SIZES)
    good = support.onerec_weights(config, 1)
    name = next(iter(good))
    if how == "missing":
        support.write_weights(root, config, {k: v for k, v in good.items() if k != name}, version)
    elif how == "nan":
        support.write_weights(root, config, {**good, name: good[name] * torch.nan}, version)
    elif how == "shape":
        support.write_weights(root, config, {**good, name: good[name][:1].clone()}, version)
    elif how == "extra":
        support.write_weights(root, config, {**good, "nobody.asked": torch.ones(1)}, version)
    elif how in {"pickle", "header"}:
        data = pickle.dumps(good) if how == "pickle" else (1 << 40).to_bytes(8, "little") + b"{}"
        with draft(root, "weights") as made:
            made.write("config.json", [json.dumps(config).encode()])
            made.write("model.safetensors", [data])
            commit(made, "weights", version, "tests", {})
    elif how == "outside":
        support.write_weights(root, config, good, version)
        file = root / "weights" / version / "model.safetensors"
        shutil.move(file, live.parent / f"{version}.safetensors")
        file.symlink_to(live.parent / f"{version}.safetensors")
    else:
        support.write_weights(root, config, good, version)
        file = root / "weights" / version / "model.safetensors"
        data = bytearray(file.read_bytes())
        if how == "flipped":
            data[-1] ^= 1
        elif how == "short":
            data = data[: len(data) // 2]
        file.write_bytes(bytes(data))
    (root / "weights" / version).rename(live / "weights" / version)


BAD = {
    "missing": "missing_tensors",
    "nan": "not_finite",
    "shape": "bad_shape",
    "extra": "unknown_tensors",
    "flipped": "file_digest",
    "short": "file_size",
    "pickle": "bad_safetensors",
    "header": "bad_safetensors",
    "outside": "path_escape",
}


async def test_bad_versions_are_refused_with_the_same_reason_and_the_next_good_one_goes_live(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        for number, (how, code) in enumerate(BAD.items()):
            spoiled(root, f"v{10 + number}", how)
            version = f"v{10 + number}"
            status = await server.settles(
                lambda status, v=version: state_of(status, "weights", v)["state"] == "rejected"
            )
            assert state_of(status, "weights", version)["reason"]["code"] == code
            assert state_of(status, "weights", version)["reason"]["location"].startswith(f"weights/{version}/")
            assert serving("v1")(status)
            reasons = {(await server.post("snapshots:promote?wait=60", {"weights": version})).body for _ in range(2)}
            assert len(reasons) == 1
            assert json.loads(reasons.pop())["error"]["code"] == code
        weights(root, "v20", 2)
        await server.settles(serving("v20"))
        await load.end()
        rejected = [line["version"] for line in server.events("artifact_rejected")]
        assert rejected == [f"v{10 + number}" for number in range(len(BAD))]


class Slow:
    """Loading of some versions waits for permission."""

    def __init__(self, monkeypatch, *versions):
        self.versions, self.entered, self.go = versions, threading.Event(), threading.Event()
        real = preparing.read_weights

        def read(directory, *rest):
            if directory.name in versions:
                self.entered.set()
                assert self.go.wait(100)
            return real(directory, *rest)

        monkeypatch.setattr(preparing, "read_weights", read)

    async def begun(self):
        """A load has come to where it waits."""
        await until(self.entered.is_set)


async def test_a_slow_older_load_never_replaces_a_newer_version(tmp_path, monkeypatch):
    root, slow = world(tmp_path), Slow(monkeypatch, "v3")
    async with live_server(root) as server:
        load = Load(server, Truth(root), clients=2)
        weights(root, "v3", 1)
        await slow.begun()
        weights(root, "v4", 2)
        slow.go.set()
        await server.settles(serving("v4"))
        for order in load.of_client:
            assert order == sorted(order)
        await load.end()
        status = await server.status()
        assert serving("v4")(status)
        assert [one["weights"]["version"] for one in status["snapshots"]] == ["v4", "v3"]


async def test_rollbacks_edits_kills_and_take_downs_do_not_wait_for_a_load(tmp_path, monkeypatch):
    root, slow = world(tmp_path), Slow(monkeypatch, "v3")
    async with live_server(root) as server:
        weights(root, "v2", 1)
        old = (await server.settles(serving("v2")))["history"][0]["to"]
        weights(root, "v3", 2)
        await slow.begun()
        assert state_of(await server.status(), "weights", "v3")["state"] == "loading"
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200
        assert serving("v1")(await server.status())
        (root / "policies" / "narrow.yaml").write_text("widebeam: 1\nwidths: [2, 2, 2]\n")
        assert (await server.post("policies:reload")).status == 200
        assert len((await server.recommend("i1", policy="narrow"))["items"]) == 2
        assert (await server.post("kill", {"kill": ["narrow"]})).status == 200
        assert len((await server.recommend("i1", policy="narrow"))["items"]) > 2
        takedown(root, "v1", ["i1"])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v1")
        slow.go.set()  # and what was being loaded does not serve against the pin
        status = await server.settles(lambda status: state_of(status, "weights", "v3")["state"] == "ready")
        assert serving("v1")(status)


async def test_a_server_ends_although_a_load_goes_on(tmp_path, monkeypatch):
    root, slow = world(tmp_path), Slow(monkeypatch, "v3")
    began = None
    async with live_server(root):
        weights(root, "v3", 1)
        await slow.begun()
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 60  # the load waits for longer
    slow.go.set()


async def test_what_does_not_fit_is_refused_before_it_is_read_and_rollbacks_make_room_first(tmp_path, monkeypatch):
    root, left = world(tmp_path), [1 << 40]
    monkeypatch.setattr(memory, "free", lambda device: left[0])
    async with live_server(root) as server:
        weights(root, "v2", 1)
        assert len((await server.settles(serving("v2")))["snapshots"]) == 2
        left[0] = memory.SPARE
        weights(root, "v3", 2)
        status = await server.settles(serving("v3"))
        assert [one["weights"]["version"] for one in status["snapshots"]] == ["v3", "v2"], "v1 has made room"
        monkeypatch.setattr(memory, "needed", lambda *_: 1 << 40)
        monkeypatch.setattr(Slots, "bound", lambda *_: None)  # a free slot that fits takes no memory
        weights(root, "v4", 3)
        status = await server.settles(lambda status: state_of(status, "weights", "v4")["state"] == "rejected")
        assert state_of(status, "weights", "v4")["reason"]["code"] == "no_memory"
        assert [one["weights"]["version"] for one in status["snapshots"]] == ["v3"]
        assert serving("v3")(status)


async def test_a_model_that_fails_its_made_up_request_never_serves(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        real = server.live._runtime.warm

        async def warm(snapshot, plans, **rest):
            return {"base": "it broke"} if snapshot.weights.version == "v2" else await real(snapshot, plans, **rest)

        monkeypatch.setattr(server.live._runtime, "warm", warm)
        weights(root, "v2", 1)
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
        assert state_of(status, "weights", "v2")["reason"]["code"] == "canary_failed"
        assert serving("v1")(status)


async def test_a_served_version_that_is_overwritten_or_removed_serves_on_and_is_reported(tmp_path):
    root = world(tmp_path)
    whole = shutil.copytree(root, tmp_path / "whole")  # what is damaged in the one is read from the other
    weights(whole, "v2", 1)
    async with live_server(root) as server:
        await server.settles(lambda status: status["desired"])  # what comes after the first look is a change
        load = Load(server, Truth(whole), clients=3)
        await load.begun()
        file = root / "weights" / "v1" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
        status = await server.settles(lambda status: "reason" in state_of(status, "weights", "v1"))
        found = state_of(status, "weights", "v1")
        assert (found["state"], found["reason"]["code"]) == ("active", "changed_on_disk")
        await load.more(10)
        shutil.rmtree(root / "vocab" / "v1")
        (root / "vocab" / "v9").mkdir()  # whoever has seen this has seen that the other is gone
        (root / "vocab" / "v9" / "MANIFEST.json").write_text("{")
        status = await server.settles(lambda status: state_of(status, "vocab", "v9")["state"] == "rejected")
        await load.more(10)
        assert serving("v1", "v1")(status)
        assert status["ready"]
        weights(root, "v2", 1)
        await server.settles(serving("v2", "v1"))
        await load.sees(lambda: all(order[-1] == ("v2", "v1") for order in load.of_client))
        await load.end()
        assert load.of_client == 3 * [[("v1", "v1"), ("v2", "v1")]]
        await nobody_failed(server)


async def test_take_downs_are_live_at_the_next_admission_and_split_no_batch(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        first = [item["id"] for item in (await server.recommend("i1", k=100))["items"]]
        takedown(root, "v1", [first[0], first[3], "never heard of"])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v1")
        answer = await server.recommend("i1", k=100)
        left = [item["id"] for item in answer["items"]]
        # an SID gives its next item: `a7` and `i7` are one SID
        assert not {first[0], first[3]} & set(left)
        excluded = [item["id"] for item in (await server.recommend("i1", k=100, exclude=[left[1]]))["items"]]
        assert not {first[0], first[3], left[1]} & set(excluded)
        context = await server.recommend(first[0], k=5)  # still a context
        assert context.get("unknown") is None
        takedown(root, "v2", [])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v2")
        assert [item["id"] for item in (await server.recommend("i1", k=100))["items"]] == first
        (root / "takedowns" / "v3").mkdir()
        (root / "takedowns" / "v3" / "MANIFEST.json").write_text("{")
        status = await server.settles(lambda status: state_of(status, "takedowns", "v3")["state"] == "rejected")
        assert status["active"]["takedowns"]["version"] == "v2"
        assert state_of(status, "takedowns", "v1")["state"] == "retired"
        support.write_vocab(root, SIZES, items("b"), version="v2")  # take-downs go on under a new vocab
        takedown(root, "v4", ["b0"])
        await server.settles(
            lambda status: status["active"]["takedowns"]["version"] == "v4" and serving("v1", "v2")(status)
        )
        assert "b0" not in [item["id"] for item in (await server.recommend("i1", k=100))["items"]]
        manifest = root / "takedowns" / "v4" / "MANIFEST.json"
        text = manifest.read_bytes()
        manifest.write_bytes(b"{")  # of the list in force: the copy in memory is good
        for version in ("v1", "v3"):
            shutil.rmtree(root / "takedowns" / version)
        status = await server.settles(
            lambda status: (
                state_of(status, "takedowns", "v4").get("reason", {}).get("code") == "changed_on_disk"
                and state_of(status, "takedowns", "v1")["state"] is state_of(status, "takedowns", "v3")["state"] is None
            )
        )
        assert state_of(status, "takedowns", "v4")["state"] == "active"
        manifest.write_bytes(text)
        await server.settles(lambda status: "reason" not in state_of(status, "takedowns", "v4"))
        assert "b0" not in [item["id"] for item in (await server.recommend("i1", k=100))["items"]]


async def test_an_equal_list_under_a_new_name_is_the_one_in_force(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        takedown(root, "v1", ["a1"])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v1")
        takedown(root, "v2", ["a1"])
        status = await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v2")
        states = [state_of(status, "takedowns", version)["state"] for version in ("v1", "v2")]
        assert states == ["retired", "active"]
        shutil.rmtree(root / "takedowns" / "v2")  # what is gone stays in force, and an older name does not come back
        status = await server.settles(lambda status: state_of(status, "takedowns", "v1")["state"] == "retired")
        assert status["active"]["takedowns"]["version"] == "v2"
        assert "a1" not in [item["id"] for item in (await server.recommend("i1", k=100))["items"]]
    async with live_server(root) as server:
        assert (await server.status())["active"]["takedowns"]["version"] in {"v1", "v2"}
        assert "a1" not in [item["id"] for item in (await server.recommend("i1", k=100))["items"]]


@pytest.mark.parametrize("file", ["items.txt", "MANIFEST.json"])
async def test_a_list_that_is_damaged_on_the_disk_brings_nothing_back_not_even_after_a_restart(file, tmp_path):
    root = world(tmp_path)

    async def ids(server):
        return [item["id"] for item in (await server.recommend("i1", k=100))["items"]]

    def says(code):
        return lambda status: state_of(status, "takedowns", "v2").get("reason", {}).get("code") == code

    async with live_server(root) as server:
        first = await ids(server)
        takedown(root, "v1", [first[0]])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v1")
        takedown(root, "v2", first[:2])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v2")
        await until(lambda: any(line["version"] == "v2" for line in server.events("takedowns_live")))  # and is kept
        place = root / "takedowns" / "v2" / file
        text = place.read_bytes()
        place.write_bytes(b"#" + text[1:])
        await server.settles(says("changed_on_disk"))
        assert not set(first[:2]) & set(await ids(server))
    async with live_server(root) as server:
        await server.settles(says("changed_on_disk"))
        assert not set(first[:2]) & set(await ids(server))
        place.write_bytes(text)
        await server.settles(says(None))
        place.write_bytes(b"#" + text[1:])
        takedown(root, "v3", first[2:3])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "v3")
        await until(lambda: any(line["version"] == "v3" for line in server.events("takedowns_live")))  # and is kept
        assert first[:2] == [one for one in first[:3] if one in await ids(server)]
    shutil.rmtree(root / "takedowns" / "v3")  # taken back on purpose
    async with live_server(root) as server:
        assert first[1:3] == [one for one in first[:3] if one in await ids(server)]


def edit(root, old, new):
    file = root / "deployment.toml"
    assert old in file.read_text()
    support.replace_text(file, file.read_text().replace(old, new))


async def test_limits_change_live_under_load_without_a_mixed_answer_and_the_rest_needs_a_restart(tmp_path):
    root = world(tmp_path)
    smaller, narrower = (shutil.copytree(root, tmp_path / name) for name in ("smaller", "narrower"))
    edit(smaller, "batch = 16", "batch = 8")
    edit(narrower, "batch = 16", "batch = 8")
    edit(narrower, "widths = [64, 64, 64]", "widths = [2, 2, 2]")
    async with live_server(root) as server:
        truth = Contracted(root, smaller, narrower)
        first, second, third = truth.truths
        load = Load(server, truth, clients=2)
        await load.begun()
        edit(root, "batch = 16", "batch = 8")
        status = await server.settles(lambda status: status["active"]["contract"] == second)
        assert serving("v1", "v1")(status)
        await load.sees(lambda: all(order[-1][0] == second for order in load.of_client))
        assert (await server.settles(in_force))["deployment"] == {"state": "in force", "restart": []}
        edit(root, "port = 0", "port = 1")
        status = await server.settles(lambda status: status["deployment"]["state"] == "needs restart")
        assert "server.port" in status["deployment"]["restart"]
        edit(root, "batch = 8", "batch = 8\nnope = 1")
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert "nope" in status["deployment"]["reason"]["message"]
        edit(root, "\nnope = 1", "")
        await server.settles(lambda status: status["deployment"]["state"] == "needs restart")
        await load.more(10)
        await load.end()
        assert load.of_client == 2 * [[(first, "v1", "v1"), (second, "v1", "v1")]]
        load = Load(server, truth, policies=("base",))
        await load.begun()
        edit(root, "widths = [64, 64, 64]", "widths = [2, 2, 2]")  # `narrow` asks for 3: it cannot serve there
        status = await server.settles(lambda status: status["policies"]["narrow"]["state"] == "rejected")
        assert status["policies"]["narrow"]["errors"][0]["code"] == "K003"
        await load.sees(lambda: all(order[-1][0] == third for order in load.of_client))
        await load.end()
        assert load.of_client == 4 * [[(second, "v1", "v1"), (third, "v1", "v1")]]
        await nobody_failed(server)


async def test_an_edited_overlay_is_in_force_only_after_its_cutover(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        slow, before = Slow(monkeypatch, "v1"), await server.status()
        edit(root, "batch = 16", "batch = 8")
        status = await server.settles(lambda status: status["deployment"]["state"] != "in force")
        assert status["deployment"] == {"state": "preparing", "restart": []}
        assert status["active"]["contract"] == before["active"]["contract"]
        slow.go.set()
        status = await server.settles(lambda status: status["deployment"]["state"] == "in force")
        assert status["active"]["contract"] != before["active"]["contract"]
        said = [(line["state"], line["restart"]) for line in server.events("deployment")]
        assert said == [("preparing", []), ("in force", [])]


async def test_a_context_beyond_the_positions_of_the_model_is_refused_and_what_served_goes_on(tmp_path):
    sizes, bases = (8, 8, 8), (10, 18, 26)
    root = tmp_path / "root"
    (root / "policies").mkdir(parents=True)
    (root / "policies" / "base.yaml").write_text(support.BASE)
    (root / "deployment.toml").write_text(
        f'family = "qwen3"\ndevice = "cpu"\n[sid]\nsizes = {list(sizes)}\ntoken_base = {list(bases)}\n'
        "[limits]\nwidths = [8, 8, 8]\nrows = 64\nbatch = 4\ncontext = 24\n"
        '[server]\nport = 0\nadmin_port = 0\nadmin_auth = "none"\ndrain_delay_s = 0.05\nthreads = 1\n'
    )
    tiny.write(tmp_path / "exported", "qwen3", max_position_embeddings=64)
    config = tiny.config("qwen3", max_position_embeddings=64)
    support.write_weights(root, config, load_file(tmp_path / "exported" / "model.safetensors"))
    support.write_vocab(root, sizes)
    async with live_server(root) as server:
        before = await server.status()
        edit(root, "context = 24", "context = 63")
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        reason = status["deployment"]["reason"]
        assert (reason["code"], reason["location"]) == ("unsupported_config", "config.json: max_position_embeddings")
        assert "64 positions are too few" in reason["message"]
        assert status["active"] == before["active"]
        assert (await server.recommend("i0"))["items"]
        edit(root, "context = 63", "context = 62")
        status = await server.settles(lambda status: status["deployment"]["state"] == "in force")
        assert status["active"]["contract"] != before["active"]["contract"]


async def test_what_is_retired_gives_its_memory_back(tmp_path):
    import gc
    import weakref

    root = world(tmp_path)
    async with live_server(root) as server:
        runtime = server.live._runtime
        engine = weakref.ref(runtime.active.engine)
        contract = runtime.active.contract.id
        edit(root, "batch = 16", "batch = 8")
        await server.settles(lambda status: status["active"]["contract"] != contract)
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        weights(root, "v3", 2)
        status = await server.settles(serving("v3"))
        assert state_of(status, "weights", "v1")["state"] == "retired"
        assert [one["state"] for one in status["snapshots"]] == ["active", "ready"]  # limits.rollback is 1

        def gone():
            gc.collect()
            return engine() is None and contract not in runtime._steps._lanes

        await until(gone)
        assert set(runtime._steps._lanes) == {status["active"]["contract"]}


async def test_a_server_that_starts_with_nothing_or_bad_becomes_ready_without_a_touch(tmp_path):
    root = world(tmp_path)
    shutil.move(root / "weights" / "v1", tmp_path / "v1")
    async with live_server(root, ready=False) as server:
        status = await server.settles(lambda status: any(one.startswith("no_weights") for one in status["reasons"]))
        assert (status["active"], status["deployment"]["state"]) == (None, "preparing")
        spoiled(root, "v0", "flipped")
        await server.settles(lambda status: any(one.startswith("file_digest") for one in status["reasons"]))
        assert (await ask(server.public, {"context": {"history": []}, "k": 1}, path="/v1/recommend")).status == 503
        shutil.move(tmp_path / "v1", root / "weights" / "v1")
        await server.ready()
        assert (await server.status())["deployment"] == {"state": "in force", "restart": []}
        assert isinstance(server, LiveServer)
        assert serving("v1", "v1")(await server.status())
        weights(root, "v2", 1)
        await server.settles(serving("v2"))


async def test_events_tell_the_way_of_a_version(tmp_path):
    from tests.api.support import get

    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        events = (await get(server.admin, "/admin/v1/events")).json()["events"]
        await server.recommend("i1")
        ready, held = server.events("snapshot_ready")[0], server.events("cutover")[-1]
        assert (ready["weights"], ready["prepare_ms"] > 0) == ("v2", True)
        assert (held["to"], held["cause"], held["hold_ms"] >= 0) == (ready["snapshot"], "newest", True)
        way = [one["state"] for one in events if one["event"] == "artifact" and one.get("version") == "v2"]
        assert way == ["discovered", "verifying", "loading", "validating", "warming", "ready", "active"]
        last = events[-1]["number"]
        assert (await get(server.admin, f"/admin/v1/events?after={last}")).json()["events"] == []
        assert (await get(server.admin, "/admin/v1/events?after=x")).status == 422


async def test_every_swap_of_the_history_is_an_event_whatever_caused_it(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        takedown(root, "t1", ["a1"])
        await server.settles(lambda status: status["active"]["takedowns"]["version"] == "t1")
        (root / "policies" / "narrow.yaml").write_text("widebeam: 1\nwidths: [4, 4, 4]\n")
        await server.settles(lambda status: status["history"][-1]["cause"] == "policies")
        await server.post("kill", {"kill": ["narrow"]})
        history = (await server.status())["history"][1:]  # the first is the start
        assert [one["cause"] for one in history] == ["newest", "takedowns", "policies", "kill"]
        events = [one for one in server.live.events(0) if one["event"] == "cutover"]
        assert [(one["before"], one["snapshot"], one["cause"]) for one in events] == [
            (one["from"], one["to"], one["cause"]) for one in history
        ]
