"""What does not fit is refused before it is read: weights, catalogues and what is declared of them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from app.config import parse
from app.errors import Rejected
from app.runtime import memory, preparing
from app.runtime.memory import catalogue_needed, check_vocab_fits
from app.runtime.metrics import Metrics
from app.runtime.reading import read_fitting_vocab, read_vocab
from app.runtime.steps import StepLoop
from app.vocab.aggregates import side_data, sizes
from app.vocab.artifact import save_vocab
from app.vocab.items import Numbers, Strings, Table, Texts
from app.vocab.vocab import arrange
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import edit, serving, state_of, weights, world

CPU = torch.device("cpu")
SIZES = (64, 256, 256)
DECLARED = (
    f'family = "onerec"\n[sid]\nsizes = {list(SIZES)}\n[attributes]\n'
    'stock = {of = "stock", as = "mean"}\ngenre = {of = "genre", as = "same"}\nsome = {of = "stock", as = "any"}\n'
    '[priors]\npopularity = {of = "stock"}\n[lists]\nold = {of = "stock", most = 1}\n'
)


def catalogue(root, items):
    random = np.random.default_rng(0)
    codes = np.stack([random.integers(0, size, items) for size in SIZES], axis=1).astype(np.int32)
    stock = Numbers(random.integers(1, 9, items).astype(np.float32), np.ones(items, bool))
    genre = Texts(random.integers(0, 2, items).astype(np.int32), Strings.of([b"Drama", b"Comedy"]))
    ids = Strings.of([b"%08d" % number for number in range(items)])
    return save_vocab(
        arrange(Table(ids, codes, {"stock": stock, "genre": genre}), SIZES), SIZES, root, "v1", made_by="t"
    )


@pytest.mark.parametrize("declared", [False, True])
def test_what_a_catalogue_takes_is_known_before_it_is_read(tmp_path, monkeypatch, declared):
    directory = catalogue(tmp_path, 200_000).directory
    deployment = parse(DECLARED if declared else DECLARED.partition("[attributes]")[0])
    tracemalloc.start()
    vocab = read_vocab(directory, SIZES)
    side = side_data(vocab, deployment)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shared = len(vocab) if declared else 0  # the two columns of a list share what they say of items
    assert sizes(deployment, len(vocab), vocab.trie.nodes + 1)[0] == side.nbytes - shared
    asked = []
    monkeypatch.setattr(memory, "_check", lambda want, device: asked.append(want))
    check_vocab_fits(directory, deployment, CPU)
    assert 0.9 * peak < asked[0] < 2 * peak, (asked[0] / peak, peak)


def test_columns_by_node_are_what_a_device_gets():
    plain, declared = parse(DECLARED.partition("[attributes]")[0]), parse(DECLARED)
    _, without = catalogue_needed(1000, 1000, 1, plain)
    _, copied = catalogue_needed(1000, 1000, 1, declared)
    assert (without, copied - without) == (8000, (4 + 4 + 1 + 4 + 2) * 1000)
    assert catalogue_needed(1000, 1000, 0, plain) == (0, 0)


def test_a_file_that_is_no_catalogue_is_refused_as_such(tmp_path):
    directory = catalogue(tmp_path, 100).directory
    (directory / "items.safetensors").write_bytes(b"no")
    with pytest.raises(memory.Rejected) as caught:
        read_fitting_vocab(directory, parse(DECLARED), CPU)
    assert caught.value.code in {"file_size", "file_digest"}


def test_a_file_that_is_no_catalogue_and_larger_than_memory_is_not_read(tmp_path):
    directory = catalogue(tmp_path, 100).directory
    with (directory / "items.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: its header does not speak of it
    with pytest.raises(memory.Rejected) as caught:
        check_vocab_fits(directory, parse(DECLARED), CPU)
    assert caught.value.code == "no_memory"


async def test_a_catalogue_that_does_not_fit_is_refused_and_what_serves_goes_on(tmp_path, monkeypatch):
    root, left = world(tmp_path), [1 << 40]
    monkeypatch.setattr(memory, "free", lambda device: left[0])
    async with live_server(root) as server:
        left[0] = memory.SPARE
        support.write_vocab(root, (4, 5, 6), version="v2")
        status = await server.settles(lambda status: state_of(status, "vocab", "v2")["state"] == "rejected")
        assert state_of(status, "vocab", "v2")["reason"]["code"] == "no_memory"
        assert serving("v1", "v1")(status)


@pytest.mark.parametrize("kind", ["weights", "vocab"])
async def test_a_start_with_what_does_not_fit_is_alive_and_says_so(tmp_path, monkeypatch, kind):
    root = world(tmp_path)
    left = {"weights": memory.SPARE, "vocab": 1 << 40}
    monkeypatch.setattr(memory, "free", lambda device: left["weights"])
    if kind == "vocab":
        monkeypatch.setattr(memory, "needed", lambda *_: 0)
    async with live_server(root, ready=False) as server:
        status = await server.settles(lambda status: any(one.startswith("no_memory") for one in status["reasons"]))
        assert state_of(status, kind, "v1")["reason"]["code"] == "no_memory"
        left["weights"] = 1 << 40
        (root / kind / "v1" / "config.json").touch() if kind == "weights" else (root / "release.json").write_text("{}")
        support.write_vocab(root, (4, 5, 6), version="v0")
        await server.ready()


async def test_an_edit_of_what_is_declared_reads_no_weights_again(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        monkeypatch.setattr(preparing, "read_weights", None)
        monkeypatch.setattr(preparing, "read_fitting_vocab", None)
        before = (await server.status())["active"]
        edit(root, "[limits]", "[request.user]\nage = {default = 1}\n[limits]")
        status = await server.settles(lambda status: status["active"]["contract"] != before["contract"])
        assert status["deployment"]["state"] == "in force"
        kept, rest = server.live._artifacts.stage.residents
        assert kept.snapshot.engine is rest.snapshot.engine
        assert (await server.recommend("i1"))["versions"]["contract"] == status["active"]["contract"]


async def test_weights_whose_captured_steps_would_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    root = world(tmp_path)
    async with live_server(root) as server:
        slots = server.live._runtime.active.engine.slot.slots
        slots.beside = 1 << 30
        monkeypatch.setattr(memory, "free", lambda _: (1 << 30) + memory.SPARE)
        weights(root, "v2", 1)
        status = await server.settles(lambda status: state_of(status, "weights", "v2")["state"] == "rejected")
        assert state_of(status, "weights", "v2")["reason"]["code"] == "no_memory"
        assert serving("v1", "v1")(status)


@pytest.mark.parametrize("transition", ["ancestry", "compaction"])
@pytest.mark.parametrize("beside", [False, True])
def test_the_state_memory_of_a_contract_is_refused_before_it_is_taken_where_it_would_not_fit(
    monkeypatch, beside, transition
):
    deployment = support.deployment_of((4, 5, 6))
    engine = support.onerec_engine((4, 5, 6), deployment.limits)
    snapshot = support.snapshot_of(engine, support.catalogue(np.array([[1, 2, 3]]), (4, 5, 6)), deployment)
    arena = engine.new_arena(deployment.limits)
    scopes = {state.name: state.scope for state in snapshot.contract.states}
    often = {"request": 1 + beside, "row": 1 + (transition == "compaction")}
    needed = sum(often[scopes[name]] * tensor.nbytes for name, tensor in arena.items())
    if beside:  # step 1's slots, one a request; and the pad request of captured contexts
        requests = deployment.limits.batch
        needed += sum(one[0].nbytes for name, one in arena.items() if scopes[name] == "request")
        needed += sum(one[0, :requests].nbytes for name, one in arena.items() if scopes[name] == "row")
    left = [memory.SPARE + needed - 1]
    monkeypatch.setattr(memory, "free", lambda _: left[0])
    loop = StepLoop(lambda: 0.0, Metrics(), transition, beside=lambda _: beside)
    with pytest.raises(Rejected) as refused:
        loop.prepare(snapshot)
    assert refused.value.code == "no_memory"
    left[0] += 1
    loop.prepare(snapshot)
