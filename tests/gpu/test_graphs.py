"""Decode steps as CUDA graphs: the same answers, no wait between steps, fifty cutovers beside running batches."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from app.config import Deployment, parse
from app.core import History, Rows, StepOutput, TokenIds
from app.engine.context_graphs import PADS, ContextGraphs
from app.engine.cuda_graphs import CudaRecorder
from app.engine.graphs import Graphs, Shape
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.weights import load
from app.errors import Rejected, WidebeamError
from app.ops import cuda, gdn
from app.runtime.context_lane import own_arena
from app.runtime.contexts import batch_inputs
from app.runtime.engines import Engines
from app.runtime.job import Batch
from app.runtime.loader import load_root
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from app.runtime.steps import StepLoop
from tests import support
from tests.engine import hybrid, tiny
from tests.gpu.alike import POLICIES, USERS, K, assert_alike, root_of
from tests.gpu.test_families import LIMITS, WIDTHS, engine, write

CUDA = torch.device("cuda")


def static_rows(t, n=14, seed=3):
    generator = torch.Generator().manual_seed(seed)
    request = torch.arange(4).repeat_interleave(torch.tensor(WIDTHS))
    if t == 1:
        n, request = 4, torch.arange(4)
    code = torch.randint(0, tiny.SIZES[t - 2], (n,), generator=generator) if t > 1 else torch.zeros(n)
    start = torch.tensor([0, *request.bincount(minlength=4).cumsum(0).tolist()])
    own = torch.stack([request, *[torch.arange(n)] * (t - 2)], 1)[:, : t - 1]
    return Rows(*(x.to(CUDA, torch.int32) for x in (code, request, start, own)), False, True)


def without_the_last(rows):
    """A request less: 11 rows."""
    codes, request, start, ancestry, *how = rows
    return Rows(codes[:11], request[:11], start[:4], ancestry[:11], *how)


@pytest.mark.parametrize(
    "kind", ["onerec", "onerec_grouped", "onerec_experts", "qwen2", "qwen3", "qwen3_moe", "qwen3_5"]
)
def test_a_replay_is_the_step_bit_for_bit(kind, tmp_path):
    directory = tmp_path / "weights"
    if kind == "qwen3_5":  # as the replay's kernel takes it
        hybrid.write(directory, linear_key_head_dim=128, linear_value_head_dim=128)
    else:
        write(kind, directory)
    served = engine(kind, directory, "bfloat16", "cuda")
    arena, other = served.new_arena(LIMITS), served.new_arena(LIMITS)
    graphs = Graphs(arena, LIMITS, tiny.SIZES, CUDA, CudaRecorder(CUDA))
    taken = graphs.prepare(served)
    assert taken.graphs > 20
    generator = torch.Generator(CUDA).manual_seed(1)
    for name, tensor in arena.items():
        values = torch.randn(tensor.shape, generator=generator, device=CUDA) / 3
        if name.startswith("s_ctx"):
            values = gdn.pack(values, torch.bfloat16)
        tensor.copy_(values if tensor.dtype.is_floating_point else torch.full(tensor.shape, 5, device=CUDA))
        other[name].copy_(tensor)
    for t in range(served.first_step, 4):
        for seed in (3, 4):
            rows = static_rows(t, seed=seed)
            n = len(rows.codes)
            found = graphs.step(served, t, rows)
            logits, norm = found.logits.clone(), found.log_norm.clone() if served.log_norm else None
            assert logits.isfinite().all()
            shape = Shape(t, n, full=True)  # 14 and 4 rows are buckets
            same = served.step(t, graphs._rows.view(shape), other)
            assert torch.equal(logits, same.logits[:n])
            assert norm is None or torch.equal(norm, same.log_norm[:n])
            for spec in served.state_specs():
                if spec.scope == "row" and t < 3:
                    assert torch.equal(arena[spec.name][t - 1, :n], other[spec.name][t - 1, :n])
            few = without_the_last(rows) if t > 1 else rows
            padded = graphs.step(served, t, few).logits
            torch.testing.assert_close(padded.float(), logits[: len(few.codes)].float(), rtol=0.03, atol=0.03)


def test_what_is_run_before_a_capture_finds_what_was_asked_for_before_it():
    recorder, asked, found = CudaRecorder(CUDA), torch.zeros(8, device=CUDA), []
    torch.cuda.synchronize()

    def run():
        found.append(asked * 2)
        return StepOutput(found[-1], None, {})

    torch.cuda._sleep(200_000_000)  # a batch of another contract
    asked.fill_(1)
    recorder.record(run, fresh=True)
    recorder.end(fresh=True)
    torch.cuda.synchronize()
    assert found[0].tolist() == [2.0] * 8


@pytest.mark.parametrize("kind", ["onerec", "onerec_grouped", "qwen2", "qwen3", "qwen3_moe"])
def test_captured_contexts_are_those_of_the_batch_alone(kind, tmp_path):
    directory = tmp_path / "weights"
    write(kind, directory)
    served = engine(kind, directory, "bfloat16", "cuda")
    arena, stream = served.new_arena(LIMITS), torch.cuda.Stream()
    contract = SimpleNamespace(limits=LIMITS, states=served.state_specs())
    own = own_arena(arena, contract, first=False, pads=PADS)
    graphs = ContextGraphs(own, LIMITS, served.input_specs(), CUDA, CudaRecorder(CUDA))
    assert graphs.prepare(served).graphs >= 4
    generator = torch.Generator().manual_seed(1)
    for lengths in ((24, 1, 7, 20), (3,), (24,) * 4, (2, 1, 1), (30, 30)):
        inputs = [served.prepare(asked_for(kind, n, generator)) for n in lengths]
        with torch.cuda.stream(stream):
            there, found = graphs.encode(served, inputs)
        stream.synchronize()
        assert there
        same = served.encode(batch_inputs(served.input_specs(), inputs, CUDA), arena)
        assert (same is None) == (found is None)
        if same is not None:
            torch.testing.assert_close(found.logits.float(), same.logits.float(), rtol=0.03, atol=0.03)
            torch.testing.assert_close(found.log_norm, same.log_norm, rtol=0.03, atol=0.03)
        length = next(name for name in own if name.endswith("_length"))
        assert torch.equal(own[length][: len(lengths)], arena[length][: len(lengths)])
        for name in set(own) - {length}:
            for r, n in enumerate(arena[length][: len(lengths)].tolist()):
                torch.testing.assert_close(own[name][r, :n].float(), arena[name][r, :n].float(), rtol=0.03, atol=0.03)


def asked_for(kind, n, generator):
    """A context of n positions, or n items."""
    if kind.startswith("onerec"):
        return History(torch.randint(0, 5, (n, 3), generator=generator).numpy().astype("int32"))
    return TokenIds(tuple(torch.randint(0, 20, (min(n, 24),), generator=generator).tolist()))


def token_batches(kind, directory, device, **changes):
    """A snapshot around a tiny token model, and batches of prompts. changes: of a hybrid's config.json."""
    if changes:
        hybrid.write(directory / "weights", **changes)
    else:
        write(kind, directory / "weights")
    served = engine(kind, directory / "weights", "bfloat16", device)
    deployment = Deployment(family=kind, sid=tiny.SID, limits=LIMITS, precision="bfloat16")
    vocab = support.catalogue(support.random_sids(tiny.SIZES, 40), tiny.SIZES)
    snapshot = support.snapshot_of(served, vocab, deployment)
    prompts = [tuple(3 + (7 * n + i) % 17 for i in range(1 + 5 * n % 19)) for n in range(12)]
    jobs = [support.job_of(snapshot, deployment, k=16, context=TokenIds(prompt)) for prompt in prompts]
    return snapshot, [Batch(tuple(jobs[n : n + 1 + n % 4])) for n in range(9)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = root_of(tmp_path_factory.mktemp("root"), "bfloat16")
    deployment = msgspec.structs.replace(parse((root / "deployment.toml").read_text()), device="cuda")
    loaded = load_root(root, deployment, make_log(io.BytesIO()))
    assert loaded.reasons == ()
    return root, deployment, loaded.snapshot


def asked(deployment, snapshot):
    pairs = [(user, policy) for user in USERS for policy in POLICIES]
    return [
        support.job_of(snapshot, deployment, user["history"][: 5 + 9 * n], policy=policy, k=K, request_id=f"r{n}")
        for n, (user, policy) in enumerate(pairs)
    ]


def answers(loop, snapshot, jobs):
    served = {end.job.request.request_id: end.result for end in loop.serve(Batch(tuple(jobs)))}
    return {
        name: [(snapshot.vocab.id(item), float(score)) for item, score in zip(one.items, one.scores, strict=True)]
        for name, one in served.items()
    }


def counted(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def test_answers_with_graphs_are_those_without_and_nothing_is_captured_on_the_way(world):
    root, deployment, snapshot = world
    jobs, metrics = asked(deployment, snapshot), Metrics()
    loop, plain = StepLoop(time.monotonic, metrics), StepLoop(time.monotonic, Metrics(), recorder=lambda _: None)
    engines, device = Engines(root, metrics, make_log(io.BytesIO())), snapshot.engine.device
    engines.prepare(snapshot.contract, device)
    engines.prepare_plans(snapshot.contract, device, list(snapshot.policies.plans()))
    modules = counted(metrics, "widebeam_compiles_total", where="background")  # what tests before have not made
    taken = loop.prepare(snapshot)
    assert taken.graphs > 0
    assert counted(metrics, "widebeam_compiles_total", where="background") == modules + taken.graphs
    found = answers(loop, snapshot, jobs)
    assert_alike(found, answers(plain, snapshot, jobs), "bfloat16")
    assert answers(loop, snapshot, jobs) == found
    for n in range(1, len(jobs)):
        answers(loop, snapshot, jobs[:n])
    assert counted(metrics, "widebeam_engine_eager_steps_total") == 0
    assert counted(metrics, "widebeam_compiles_total", where="background") == modules + taken.graphs
    assert counted(metrics, "widebeam_compiles_total", where="request") == 0
    assert counted(metrics, "widebeam_step_seconds_count", step="1") == len(jobs) + 1


def test_a_kernel_that_nobody_has_made_before_its_batch_is_counted_as_made_on_its_way(world):
    _, deployment, snapshot = world
    metrics, source = Metrics(), Path(cuda.__file__).parent / "transition" / "kernel.cu"
    build = cuda.Build.of(source)._replace(given="// for this test alone\n")

    class Late:
        def __getattr__(self, name):
            return getattr(snapshot.engine, name)

        def step(self, t, rows, arena):
            cuda.entry(build, "advance", snapshot.engine.device)
            return snapshot.engine.step(t, rows, arena)

    late = replace(snapshot, engine=Late())
    loop, made = StepLoop(time.monotonic, metrics, recorder=lambda _: None), []
    for served in (snapshot, late, late):  # first what tests before have not made
        answers(loop, served, asked(deployment, served))
        made.append(counted(metrics, "widebeam_compiles_total", where="request"))
    assert made[1:] == [made[0] + 1] * 2


def launched_without_a_wait(loop, jobs):
    """How a batch ends; a wait for the device while it is launched is an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it does not see every wait yet
            torch.cuda.set_sync_debug_mode("error")
        flight = loop.launch(Batch(tuple(jobs)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for end in flight.served:
        raise end.result.__cause__ or end.result  # with the line that waits
    return loop.finish(flight)


def test_no_step_waits_for_the_device(world):
    _, deployment, snapshot = world
    loop = StepLoop(time.monotonic, Metrics())
    loop.prepare(snapshot)
    jobs = asked(deployment, snapshot)
    expected = answers(loop, snapshot, jobs)
    served = launched_without_a_wait(loop, jobs)
    assert len(served) == len(jobs)
    for end in served:
        assert not isinstance(end.result, WidebeamError), end.result.__cause__
        assert [snapshot.vocab.id(item) for item in end.result.items] == [
            item for item, _ in expected[end.job.request.request_id]
        ]


def test_batches_launched_behind_each_other_answer_as_alone(world):
    _, deployment, snapshot = world
    loop, jobs = StepLoop(time.monotonic, Metrics()), asked(deployment, snapshot)
    loop.prepare(snapshot)
    batches = [Batch(tuple(jobs[:n])) for n in range(1, len(jobs))]
    alone = [[end.result.items.tolist() for end in loop.serve(batch)] for batch in batches]
    flights = [loop.launch(batch) for batch in batches]
    with ThreadPoolExecutor(1) as another:
        together = [another.submit(loop.finish, flight).result() for flight in flights]
    assert [[end.result.items.tolist() for end in served] for served in together] == alone


def in_order(served, jobs):
    """Items and scores of each job."""
    found = {id(end.job): end.result for end in served}
    return [(found[id(job)].items.tolist(), found[id(job)].scores.tolist()) for job in jobs]


def test_step_1_beside_the_batch_before_answers_as_behind_it(world):
    _, deployment, snapshot = world
    loop, plain = StepLoop(time.monotonic, Metrics()), StepLoop(time.monotonic, Metrics(), beside=lambda _: False)
    assert loop.prepare(snapshot).graphs > plain.prepare(snapshot).graphs  # and contexts, padded: up to sums' order
    jobs = asked(deployment, snapshot)
    batches = [tuple(jobs[: 1 + 7 * n % len(jobs)]) for n in range(12)]
    alone = [in_order(loop.serve(Batch(batch)), batch) for batch in batches]
    for mine, batch in zip(alone, batches, strict=True):
        others = in_order(plain.serve(Batch(batch)), batch)
        assert_alike(*({n: list(zip(*one, strict=True)) for n, one in enumerate(given)} for given in (mine, others)),
                     "bfloat16")  # fmt: skip
    for _ in range(3):
        flights = [loop.launch(Batch(batch)) for batch in batches]
        found = [in_order(loop.finish(flight), batch) for flight, batch in zip(flights, batches, strict=True)]
        assert found == alone


def test_step_1_does_not_wait_for_the_batch_before(world):
    _, deployment, snapshot = world
    loop, jobs = StepLoop(time.monotonic, Metrics()), asked(deployment, snapshot)
    loop.prepare(snapshot)
    expected, decode = answers(loop, snapshot, jobs), loop._decode
    known, busy = torch.cuda.Event(), torch.cuda.Event()

    def noted(graphs, engine, t, rows, arena):
        output = decode(graphs, engine, t, rows, arena)
        if t == 1:
            known.record()
        return output

    loop._decode = noted
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)  # more than a second, where decodes are
    busy.record()
    flight = loop.launch(Batch(tuple(jobs)))
    known.synchronize()
    assert not busy.query()
    found = {end.job.request.request_id: end.result for end in loop.finish(flight)}
    assert {name: snapshot.vocab.ids(one.items) for name, one in found.items()} == {
        name: [item for item, _ in one] for name, one in expected.items()
    }


def test_fifty_batches_of_two_snapshots_in_turn_keep_their_own_step_1_and_the_memory(world):
    root, deployment, snapshot = world
    version, slots = next((root / "weights").glob("*/MANIFEST.json")).parent, Slots(2)
    pair = []
    for factor in (1.0, 0.7):
        kind, sid = family(deployment.family), deployment.sid
        made = load(version, kind, sid, deployment.limits, precision="bfloat16", device=CUDA, slots=slots)
        with torch.inference_mode():
            for parameter in made._family.parameters():
                parameter.mul_(factor)
        pair.append(replace(snapshot, engine=made))
    torch.cuda.synchronize()
    loop = StepLoop(time.monotonic, Metrics())
    for one in pair:
        assert loop.prepare(one).graphs > 0
    sets = [tuple(asked(deployment, one)[: 1 + 3 * n]) for n in range(4) for one in pair]
    expected = [in_order(loop.serve(Batch(jobs)), jobs) for jobs in sets]
    assert expected[0] != expected[1]
    before, used = loop.launch(Batch(sets[0])), []
    for n in range(1, 51):
        flight = loop.launch(Batch(sets[n % len(sets)]))  # two in flight, as in a server
        served = loop.finish(before)
        assert in_order(served, sets[(n - 1) % len(sets)]) == expected[(n - 1) % len(sets)]
        before = flight
        used.append(torch.cuda.memory_reserved())
    loop.finish(before)
    assert max(used[10:]) <= max(used[:10]) + 2**21, used


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_the_first_step_of_a_token_model_comes_from_the_lane_of_contexts(kind, tmp_path):
    snapshot, batches = token_batches(kind, tmp_path, "cuda")
    loop, plain = StepLoop(time.monotonic, Metrics()), StepLoop(time.monotonic, Metrics(), beside=lambda _: False)
    loop.prepare(snapshot)
    plain.prepare(snapshot)
    for _ in range(5):
        flights = [loop.launch(batch) for batch in batches]
        found = [loop.finish(flight) for flight in flights]
        for batch, served in zip(batches, found, strict=True):
            expected = plain.serve(batch)
            assert [end.result.items.tolist() for end in served] == [end.result.items.tolist() for end in expected]


def held():
    """Bytes of GPU memory that this process holds; of all processes, where the driver does not tell them apart."""
    if find_spec("pynvml"):
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        users = [one for device in devices for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)]
        own = [one.usedGpuMemory for one in users if one.pid == os.getpid()]
        if own and None not in own:
            return sum(own)
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_fifty_cutovers_beside_running_batches_leave_the_memory_as_it_is(world):
    root, deployment, snapshot = world
    version, slots = next((root / "weights").glob("*/MANIFEST.json")).parent, Slots(3)
    stop, wrong, done = threading.Event(), [], []
    loop = StepLoop(time.monotonic, Metrics())

    def loaded():
        kind, sid = family(deployment.family), deployment.sid
        made = load(version, kind, sid, deployment.limits, precision="bfloat16", device=CUDA, slots=slots)
        return replace(snapshot, engine=made)

    active = [loaded()]
    loop.prepare(active[0])
    expected = answers(loop, snapshot, asked(deployment, active[0]))

    def serve():
        while not stop.is_set():
            now = active[0]
            if answers(loop, now, asked(deployment, now)) != expected:
                wrong.append(1)
            done.append(1)
            del now

    thread = threading.Thread(target=serve)
    thread.start()
    used, captured = [], []
    try:
        for _ in range(50):
            before = len(done)
            while True:
                try:
                    fresh = loaded()
                    break
                except Rejected as error:
                    assert error.code == "no_slot"
                    time.sleep(0.001)
            with ThreadPoolExecutor(1) as thread_of_its_own:
                captured.append(thread_of_its_own.submit(loop.prepare, fresh).result().graphs)
            active[0] = fresh
            del fresh
            while len(done) < before + 2 and thread.is_alive():
                time.sleep(0.0005)
            used.append(held())
    finally:
        stop.set()
        thread.join()
        gc.collect()
    assert wrong == []
    assert sum(map(bool, captured)) <= 2  # the other slots, once each
    assert max(used[10:]) <= max(used[:10]) + 2**20, used
