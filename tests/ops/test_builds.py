"""What is made beforehand is all that launches ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.ops import cuda, fp8, grouped, selection, transition, trie
from app.ops.attention import context
from app.ops.attention import launch as attention_launch
from app.ops.builds import GPUS, Needs, by_torch, needed, of_expressions, sources
from app.ops.cuda import Build, Kernel
from app.ops.gated import operators as gated
from app.ops.gated import product
from app.ops.gdn import around
from app.ops.gdn import launch as gdn_launch
from app.ops.norm import operators as norm
from app.ops.selection import launch, radix
from app.ops.selection.geometry import DEEPEST
from app.ops.selection.geometry import requests as requests_of

SIZES, WIDTH, BATCH = (64, 300, 8192), 512, 48
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OVER_LOGITS = given(
    arch=st.sampled_from(sorted(GPUS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    requests=st.integers(1, BATCH),
    widest=st.integers(1, WIDTH),
    keep=st.integers(1, WIDTH),
    codes=st.sampled_from(SIZES),
    normalize=st.sampled_from(["step", "valid", "none", "given"]),
    masked=st.booleans(),
)


@pytest.fixture(scope="module")
def asked():
    """The builds that launches ask for, on a GPU that there is not; its architecture is the key "arch"."""
    found: list[Build] = []

    def load(source, name, device, *, memory=0, arch="", **define):
        found.append(Build.of(source, arch, **define))
        return Kernel(None, 0, memory)

    seen = SimpleNamespace(builds=found, arch="sm_90")

    def limits(_):
        gpu = GPUS[seen.arch]
        return gpu.clusters, gpu.block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "load", load)
        patch.setattr(
            cuda, "entry", lambda build, name, device, memory=0: found.append(build) or Kernel(None, 0, memory)
        )
        patch.setattr(cuda, "unfit", lambda _: None)
        patch.setattr(Kernel, "launch", lambda *_, early=False: None)
        patch.setattr(launch, "limits", limits)
        patch.setattr(radix, "limits", limits)
        yield seen


def missing(asked, dtype, **changes):
    """The builds that were asked for since the last time, and not made beforehand."""
    same = {"heads": frozenset({64}), "delta": frozenset(), "sizes": SIZES, "width": WIDTH, "batch": BATCH}
    made = needed(Needs(dtype, **{**same, **changes}), asked.arch)
    found = set(asked.builds) - set(made)
    assert asked.builds
    asked.builds.clear()
    return found


@MANY
@OVER_LOGITS
def test_selection_from_logits_asks_for_nothing_else(
    asked, arch, dtype, requests, widest, keep, codes, normalize, masked
):
    asked.arch = arch
    starts = [0, widest, *range(widest + 1, widest + requests)]
    n = starts[-1]
    logits = torch.empty(n, codes, dtype=dtype)
    if not selection.one_read(logits, starts, [keep] * requests):
        return
    mask = torch.empty(n, (codes + 31) // 32 * 4, dtype=torch.uint8) if masked else None
    selection.select_logits(
        logits, torch.empty(n), torch.empty(n, dtype=torch.int64), starts, [keep] * requests, normalize=normalize,
        mask=mask, norm=torch.empty(n) if normalize == "given" else None,
    )  # fmt: skip
    assert missing(asked, dtype) == set()


@MANY
@OVER_LOGITS
def test_ranks_by_expressions_ask_for_what_their_policy_added(
    asked, arch, dtype, requests, widest, keep, codes, normalize, masked
):
    asked.arch = arch
    starts = [0, widest, *range(widest + 1, widest + requests)]
    n, kept = starts[-1], [keep] * requests
    logits = torch.empty(n, codes, dtype=dtype)
    text = "#define RANK_NORMED 1\n"
    given = {"normalize": normalize, "definitions": text}
    if not selection.one_read(logits, starts, kept):
        assert not selection.ranked_ready(logits, starts, kept, **given)
        return
    assert not selection.ranked_ready(logits, starts, kept, **given)
    mask = torch.empty(n, (codes + 31) // 32 * 4, dtype=torch.uint8) if masked else None
    chosen, broken, rank = selection.select_ranked(
        logits, torch.empty(n), torch.empty(n, dtype=torch.int64), starts, kept, normalize=normalize, mask=mask,
        norm=torch.empty(n), ranked=selection.Ranked(text, torch.empty(n, 2), (torch.empty(n, codes),)),
    )  # fmt: skip
    assert (len(chosen.code), len(broken), len(rank)) == (requests * keep, n, 0)
    needs = Needs(dtype, frozenset(), frozenset(), SIZES, WIDTH, BATCH)
    assert set(asked.builds) <= set(of_expressions(needs, arch, [(codes, normalize, text)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "is_ready", lambda build, _: build in asked.builds)
        assert selection.ranked_ready(logits, starts, kept, **given)
    asked.builds.clear()


@MANY
@given(
    arch=st.sampled_from(sorted(GPUS)),
    requests=st.integers(1, BATCH),
    widest=st.integers(1, WIDTH),
    keep=st.one_of(st.integers(1, WIDTH), st.integers(1, DEEPEST)),
    columns=st.integers(1, max(SIZES)),
)
def test_selection_from_ranks_asks_for_nothing_else_whatever_the_number_of_candidates(
    asked, arch, requests, widest, keep, columns
):
    asked.arch = arch
    starts = [0, widest, *range(widest + 1, widest + requests)]
    rank = torch.empty(starts[-1], columns)
    order = torch.empty(starts[-1], dtype=torch.int64)
    selection.select_top(rank, torch.empty(0), order, columns, starts, [keep] * requests)
    assert missing(asked, torch.bfloat16) == set()
    of = requests_of(starts, [keep] * requests, rank.device)
    radix.select(rank, order, of)
    assert missing(asked, torch.bfloat16) == set()


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_tries_ask_for_nothing_else(asked, wide):
    first, code, node = torch.tensor([0, 1, 2], dtype=wide), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])
    trie.children(first, code, node, 2)
    trie.dense(first, code, node, 2, 64)
    trie.contains(torch.tensor([1]), node.view(1, 1), node, 3)
    selection.child_of(first, code, node, node, node, 2)
    row = torch.zeros(1, dtype=torch.int32)
    selection.count_bad(row, [row], torch.zeros(1), torch.tensor([0, 1], dtype=torch.int32))
    transition.advance(node, node, node.view(1, 1), row.view(1, 1))
    selection.children_bits(first, code, node, 2, 64, dead=torch.empty(0, dtype=torch.int64), request=node, nodes=3)
    selection.pack(None, torch.ones(1, 64, dtype=torch.bool), 64)
    assert missing(asked, torch.bfloat16) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [1, 3, 8])
def test_prefixes_ask_for_nothing_else(asked, dtype, positions):
    attention_launch._shape.cache_clear()
    for compact in (False, True):
        attention_launch._shape(torch.device("cuda:0"), 64, 4, positions, bf16=dtype == torch.bfloat16, compact=compact)
    attention_launch._shape.cache_clear()
    assert missing(asked, dtype) == set()


@pytest.mark.parametrize("dim", context.HEADS)
def test_contexts_ask_for_nothing_else(asked, dim):
    asked.arch = "sm_90"
    context._kernel.__wrapped__(torch.device("cuda:0"), dim, bf16=True)
    assert missing(asked, torch.bfloat16, heads=frozenset({dim})) == set()


def test_what_no_kernel_takes_is_said_by_name_and_makes_no_build():
    needs = Needs(torch.bfloat16, frozenset({36, 96}), frozenset({(64, 128), (128, 128)}), SIZES, WIDTH, BATCH,
                  positions=9)  # fmt: skip
    assert by_torch(needs, "sm_90") == {
        "prefix attention": "head dim 36; multiples of 8 up to 256 are served; 9 positions; at most 8 are served",
        "context attention": "head dim 36; 64 and 128 are served; head dim 96; 64 and 128 are served",
        "replay of records": "K 64, V 128; K 128 or 256 and V a multiple of 128 are served",
    }
    built = {(one.source.parent.name, one.source.name, *dict(one.define).values()) for one in needed(needs, "sm_90")}
    assert {one[2:] for one in built if one[:2] == ("attention", "kernel.cu")} == {(1, 96)}
    assert not any(one[:2] == ("attention", "context.cu") for one in built)
    assert [arch for arch in GPUS if any(one.source == product.SOURCE for one in needed(needs, arch))] == ["sm_90"]
    served = Needs(torch.bfloat16, frozenset({64}), frozenset(), SIZES, WIDTH, BATCH, positions=4)
    assert by_torch(served, "sm_90") == {}
    assert by_torch(served, "sm_80") == {"context attention": "sm_80; its products are those of sm_90"}
    assert by_torch(Needs(torch.float32, frozenset({36}), frozenset(), SIZES, WIDTH, BATCH), "sm_90") == {}


@pytest.mark.parametrize("arch", sorted(GPUS))
@pytest.mark.parametrize("k", [128, 256])
def test_replays_ask_for_nothing_else(asked, monkeypatch, arch, k):
    about = SimpleNamespace(shared_memory_per_multiprocessor=GPUS[arch].processor, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    asked.arch = arch
    for out32 in (False, True):
        gdn_launch._compiled.__wrapped__(torch.device("cuda:0"), k, 256, bf16=True, out32=out32, wgmma=arch == "sm_90")
    for size in (2, 3, 4):
        around._kernel("window_convolution", torch.empty(1, dtype=torch.bfloat16), size)
    assert missing(asked, torch.bfloat16, delta=frozenset({(k, 256)})) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_and_experts_ask_for_nothing_else(asked, dtype):
    asked.arch = "sm_90"
    x = torch.ones(2, 16, dtype=dtype)
    gated._gated(x, x)  # a CPU's own tensors do not come to it
    product._kernel.__wrapped__(torch.device("cuda:0"), bf16=dtype == torch.bfloat16)
    expert, weight = grouped.choose(x, None, 2, sigmoid=False, normalise=True, factor=1.0)
    grouped.dispatch(x, expert, 16)
    grouped.combine(torch.ones(4, 16, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32), weight, x)
    assert missing(asked, dtype) == set()


def test_rows_in_8_bits_ask_for_nothing_else(asked):
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    fp8.quantise_rows(x)
    fp8.quantise_gated(x, x)
    fp8.quantise_normed(x, x[0], 1e-6)
    assert missing(asked, torch.bfloat16, eight=True) == set()


@pytest.mark.parametrize("width", [8, 264, 896, 1032, 4096])
def test_norms_ask_for_nothing_else(asked, width):
    x = torch.ones(2, width, dtype=torch.bfloat16)
    norm._rms_norm(x, x[0], 1e-6)
    assert missing(asked, torch.bfloat16) == set()


def test_every_build_names_a_source_that_is_there():
    made = needed(Needs(torch.float16, frozenset({8, 64}), frozenset({(128, 128)}), SIZES, WIDTH, BATCH), "sm_90")
    assert all(source.is_file() for source in sources(made))
    assert len(set(made)) == len(made)
