"""The selection kernels give what their definition gives, to the bit, with the kernel's own log-sum-exp."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from app.ops.selection import (
    child_of,
    children_bits,
    count_bad,
    geometry,
    launch,
    pack,
    radix,
    select_logits,
    select_top,
)
from app.ops.selection import reference as definition

INF = float("inf")
DEVICE = torch.device("cuda:0")


class Case(NamedTuple):
    """Inputs of a selection: rows of requests laid end to end."""

    logits: Tensor
    legal: Tensor | None
    parent: Tensor
    order: Tensor
    row_start: list[int]
    keep: list[int]


def case(
    kind: str, widths: list[int], codes: int, keep: list[int], *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Case:
    torch.manual_seed(seed)
    logits, parent, legal = values(kind, sum(widths), codes)
    order = torch.cat([torch.randperm(width, device=DEVICE) for width in widths])
    start = [0, *torch.tensor(widths).cumsum(0).tolist()]
    return Case(logits.to(dtype), legal, parent, order, start, keep)


def values(kind: str, rows: int, codes: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits [n, C], parents [n] and what may be selected."""
    logits = torch.randn(rows, codes, device=DEVICE) * 2
    parent = torch.randn(rows, device=DEVICE)
    chance = torch.rand(rows, codes, device=DEVICE)
    legal = None
    match kind:
        case "wide":
            return logits / 2, parent * 1.5, None
        case "integers":
            logits, parent = logits.round(), parent.round()
        case "equal":
            logits, parent = torch.zeros_like(logits), torch.zeros_like(parent)
        case "sorted" | "rising":
            return logits.flatten().sort(descending=kind == "sorted").values.view(rows, codes), parent, None
        case "one row":
            parent[rows // 2] += 60
        case "one column":
            logits[:, codes // 3] += 30
        case "far":
            parent *= 1e4
        case "sparse" | "few":
            legal = chance < (0.02 if kind == "sparse" else 3 / codes)
            legal[:: max(1, rows // 3)] = False
        case "nothing":
            legal = torch.zeros_like(chance, dtype=torch.bool)
        case "bad":
            logits[(chance > 0.5) & (chance < 0.51)] = -INF
            logits[chance < 0.001], logits[chance > 0.999] = float("nan"), INF
            legal = torch.rand_like(chance) < 0.5
        case "zeros":
            return torch.randint(-1, 2, (rows, codes), device=DEVICE) * -0.0, parent * 0, None
        case "dead":
            parent[torch.rand(rows, device=DEVICE) < 0.5] = -INF
    return logits, parent, legal


def scored(x: Case, norm: Tensor | None, *, plain: bool) -> Tensor:
    """Scores [n, C] as the definition has them, -inf where nothing may be selected."""
    logits = definition.sanitise(x.logits)[0]
    if plain:
        score = logits
    else:
        score = torch.add(x.parent[:, None], logits if norm is None else torch.sub(logits, norm[:, None]))
        score = torch.where((logits > -INF) & (x.parent > -INF)[:, None], score, -INF)
    return score if x.legal is None else torch.where(x.legal, score, -INF)


def check(x: Case, normalize: str = "step", *, shape: geometry.Geometry | None = None, early: bool = False) -> None:
    """Compare one launch with the definition; `normalize` "rank" selects by the logits themselves."""
    plain = normalize == "rank"
    of = geometry.requests(x.row_start, x.keep, DEVICE)
    shape = shape or launch.layout(x.logits.shape[1], x.logits.element_size(), of, DEVICE)
    assert shape is not None
    norm = torch.randn(len(x.parent), device=DEVICE) + 10
    mask = None if x.legal is None else pack(None, x.legal, x.logits.shape[1])
    scores = launch.Scores(mask, norm, None if plain else x.parent, "none" if plain else normalize)
    ancestry = torch.randint(0, 99, (len(x.parent), 2), dtype=torch.int32, device=DEVICE)
    slots = torch.full((of.total, 3), -5, dtype=torch.int32, device=DEVICE)
    got = launch.select(x.logits, scores, x.order, of, shape, ancestry=ancestry, ancestry_out=slots, early=early)
    if normalize in {"step", "valid"}:
        compare_norm(x, normalize, norm)
    score = scored(x, None if normalize in {"none", "rank"} else norm, plain=plain)
    codes = torch.arange(score.shape[1], device=DEVICE).expand_as(score)
    best = definition.select_top(score, codes, x.order, score.shape[1], x.row_start, x.keep)
    assert torch.equal(got.n_valid, best.n_valid)
    assert torch.equal(got.row, best.parent)
    assert torch.equal(got.code, best.column)
    assert torch.equal(got.order, best.order)
    at, dead = best.parent.clamp(min=0), best.parent < 0
    assert torch.equal(got.score, score[at, best.column.clamp(min=0)].masked_fill(dead, -INF))
    assert torch.equal(slots, torch.cat((ancestry[at], at.int()[:, None]), 1))
    wrong = definition.sanitise(x.logits)[1]
    assert wrong is not None
    alive = torch.ones_like(x.parent, dtype=torch.bool) if plain else x.parent > -INF
    assert torch.equal(got.bad.long(), wrong * alive)


def compare_norm(x: Case, normalize: str, norm: Tensor) -> None:
    """The kernel's log-sum-exp against double precision."""
    logits = definition.sanitise(x.logits)[0].double()
    if normalize == "valid" and x.legal is not None:
        logits = torch.where(x.legal, logits, -INF)
    exact = torch.logsumexp(torch.where((x.parent > -INF)[:, None], logits, -INF), 1)
    some = exact > -INF
    assert torch.equal(norm == -INF, ~some)
    torch.testing.assert_close(norm[some].double(), exact[some], rtol=1e-6, atol=5e-6)


KINDS = ["random", "wide", "integers", "equal", "sorted", "rising", "one row", "one column", "far", "sparse", "few",
         "nothing", "bad", "zeros", "dead"]  # fmt: skip


@pytest.mark.parametrize("normalize", ["step", "valid", "given", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_real_shapes(kind: str, normalize: str) -> None:
    check(case(kind, [128] * 3, 8192, [128] * 3), normalize)
    check(case(kind, [512] * 2, 8192, [512] * 2, dtype=torch.float16), normalize)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_requests_and_odd_codes(kind: str, dtype: torch.dtype) -> None:
    for codes in (8191, 1000, 257, 24, 3, 1):
        check(case(kind, [1, 70, 0, 300, 7], codes, [50, 128, 0, 300, 1], dtype=dtype))
        check(case(kind, [1, 70, 0, 300, 7], codes, [50, 128, 0, 300, 1], dtype=dtype), "none")


@pytest.mark.parametrize("kind", KINDS)
def test_given_ranks(kind: str) -> None:
    for codes, widths, keep in (
        (8192, [256] * 2, [256] * 2),
        (300, [1, 40, 9], [64, 500, 3]),
        (4096, [1] * 4, [512] * 4),
    ):
        x = case(kind, widths, codes, keep, dtype=torch.float32)
        plain = Case(definition.sanitise(x.logits)[0], x.legal, x.parent, x.order, x.row_start, x.keep)
        check(plain, "rank")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [1, 20])
def test_first_steps_and_many_survivors(kind: str, requests: int) -> None:
    check(case(kind, [1] * requests, 8192, [512] * requests))
    check(case(kind, [1] * requests, 65536, [1024] * requests))
    check(case(kind, [8] * requests, 8192, [512] * requests))
    check(case(kind, [40] * requests, 4096, [2048] * requests))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cluster", [1, 2, 3, 4, 8])
def test_every_cluster(kind: str, cluster: int) -> None:
    x = case(kind, [96] * 2, 8192, [200] * 2)
    of = geometry.requests(x.row_start, x.keep, DEVICE)
    shape = launch.layout(8192, 2, of, DEVICE)
    assert shape is not None
    check(x, shape=geometry.fitted(shape._replace(cluster=cluster), 96, 200, 200 * 1024))


def test_a_small_graphics_card_gets_a_layout_that_is_right() -> None:
    for kind in KINDS:
        x = case(kind, [512], 8192, [512])
        shape = geometry.geometry(1, 512, 512, 8192, 2, clusters=False, shared=99 * 1024)
        assert shape is not None
        check(x, shape=shape)


def test_large_beams_and_vocabularies() -> None:
    check(case("random", [1024] * 2, 8192, [1024] * 2))
    check(case("wide", [1024] * 2, 8192, [1024] * 2))
    check(case("random", [512], 65536, [512]))
    check(case("random", [300], 50001, [512]))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_begin_before_the_one_before_them_ends(kind: str) -> None:
    for _ in range(5):
        check(case(kind, [128] * 3, 8192, [128] * 3), early=True)
        check(case(kind, [1, 70, 0, 300, 7], 1000, [50, 128, 0, 300, 1], dtype=torch.float32), early=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_radix_pair(kind: str) -> None:
    for codes, widths, keep in (
        (8192, [256] * 2, [256] * 2), (300, [1, 40, 0, 9], [64, 500, 0, 3]), (4096, [1] * 4, [512] * 4), (7, [3], [30]),
        (9000, [20, 3], [100, 2]), (30000, [5], [512]),
    ):  # fmt: skip
        x = case(kind, widths, codes, keep, dtype=torch.float32)
        rank = scored(x._replace(logits=definition.sanitise(x.logits)[0]), None, plain=True)
        code = torch.arange(codes, device=DEVICE).expand(rank.shape)
        best = definition.select_top(rank, code, x.order, codes, x.row_start, x.keep)
        got = radix.select(rank, x.order, geometry.requests(x.row_start, x.keep, DEVICE))
        assert all(torch.equal(one, two) for one, two in zip(got, best, strict=True))


def test_the_operators_give_what_their_definitions_give() -> None:
    x = case("few", [3, 200, 1], 500, [40, 300, 9], dtype=torch.float32)
    rank = scored(x, None, plain=True)
    code = torch.arange(500, device=DEVICE).expand(rank.shape) * 2 + 1
    for one, two in zip(
        select_top(rank, code, x.order, 1001, x.row_start, x.keep),
        definition.select_top(rank, code, x.order, 1001, x.row_start, x.keep),
        strict=True,
    ):
        assert torch.equal(one, two)
    x = case("bad", [3, 200, 1], 500, [40, 300, 9])
    assert x.legal is not None
    mask, norm = pack(None, x.legal, 500), torch.randn(204, device=DEVICE)
    slots = torch.randint(0, 9, (204, 1), dtype=torch.int32, device=DEVICE)
    got = select_logits(
        x.logits, x.parent, x.order, x.row_start, x.keep, normalize="given", mask=mask, norm=norm, ancestry=slots
    )
    best = definition.select_logits(x.logits, mask, norm, x.parent, x.order, slots, x.row_start, x.keep, "given")
    assert all(torch.equal(one, two) for one, two in zip(got, best, strict=True))


def test_bits_of_candidates_and_nodes_of_survivors() -> None:
    torch.manual_seed(1)
    code = torch.stack([torch.randperm(1000, device=DEVICE)[:70].sort().values for _ in range(50)])
    legal = torch.rand(50, 70, device=DEVICE) < 0.5
    assert torch.equal(pack(code, legal, 1000).cpu(), pack(code.cpu(), legal.cpu(), 1000))
    dense = torch.rand(9, 77, device=DEVICE) < 0.5
    assert torch.equal(pack(None, dense, 77).cpu(), pack(None, dense.cpu(), 77))
    first = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE)
    edges = torch.tensor([1, 5, 9, 0, 2, 5, 6, 7], dtype=torch.int32, device=DEVICE)
    node = torch.tensor([0, 0, 1, 2, 2, -1, 2, 0], device=DEVICE)
    wanted = torch.tensor([5, 6, 5, 0, 7, 5, -1, 9], device=DEVICE)
    expected = [2, -1, -1, 4, 8, -1, -1, 3]
    parent = torch.arange(8, device=DEVICE)
    assert child_of(first.long(), edges, node, parent, wanted, 5).tolist() == expected
    request, dead = torch.arange(8, device=DEVICE) % 2, torch.tensor([2, 7, 9 + 1, 9 + 8], device=DEVICE)
    for keys in (dead, dead[:0]):
        mask = children_bits(first, edges, node, 5, 10, dead=keys, request=request, nodes=9)
        one, two, three = first.cpu(), edges.cpu(), node.cpu()
        host = children_bits(one, two, three, 5, 10, dead=keys.cpu(), request=request.cpu(), nodes=9)
        assert torch.equal(mask.cpu(), host)
    assert child_of(first, edges, node, parent, wanted, 5).tolist() == expected
    parent, wanted = torch.randint(-1, 8, (2, 4000), device=DEVICE)
    host = child_of(first.cpu(), edges.cpu(), node.cpu(), parent.cpu(), wanted.cpu(), 5)
    assert child_of(first, edges, node, parent, wanted, 5).tolist() == host.tolist()


@pytest.mark.parametrize("widths", [[1], [7, 0, 300, 1], [1024] * 32, [0, 65000]])
def test_what_was_wrong_is_counted_by_request(widths: list[int]) -> None:
    generator = torch.Generator(DEVICE).manual_seed(len(widths))
    start = torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device=DEVICE)
    n = sum(widths)
    bad, broken = torch.randint(0, 2**31 - 1, (2, n), dtype=torch.int32, device=DEVICE, generator=generator)
    score = torch.randn(n, device=DEVICE, generator=generator)
    score[torch.rand(n, device=DEVICE, generator=generator) < 0.3] = -INF
    given = [bad, broken, score, start]
    kept = [one.clone() for one in given]
    for wrong in ([broken], [broken[:0]], []):
        found = count_bad(bad, wrong, score, start)
        assert found.dtype == torch.int64
        assert found.tolist() == count_bad(bad.cpu(), [one.cpu() for one in wrong], score.cpu(), start.cpu()).tolist()
    assert count_bad(bad.long(), [broken, broken], score, start).tolist()[:-1] == found.tolist()[:-1]
    assert all(torch.equal(one, two) for one, two in zip(given, kept, strict=True))


def test_small_cases_in_bulk() -> None:
    generator = torch.Generator().manual_seed(3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for seed in range(400):
        widths = [number(0, 9) for _ in range(number(1, 6))]
        if not sum(widths):
            continue
        keep = [number(0, 40) for _ in widths]
        if not sum(keep):
            continue
        kind = KINDS[number(0, len(KINDS))]
        dtype = [torch.bfloat16, torch.float16, torch.float32][number(0, 3)]
        codes = [1, 2, 7, 8, 9, 31, 64][number(0, 7)]
        check(case(kind, widths, codes, keep, dtype=dtype, seed=seed), ["step", "valid", "given", "none"][number(0, 4)])


def test_nothing_beside_the_buffers_is_written_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[tuple[Tensor, Tensor, int]] = []
    real = torch.empty

    def guarded(*size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], tuple) else size
        count = torch.Size(shape).numel()
        whole = torch.full((count + 256,), 77, dtype=dtype, device=device)
        guards.append((whole, whole.clone(), count))
        return whole[128 : 128 + count].view(shape)

    for kind in ("random", "equal", "few", "bad"):
        x = case(kind, [5, 33, 130], 8191 if kind == "bad" else 1024, [60, 128, 300])
        around = torch.full((x.logits.numel() + 512,), 1e30, dtype=x.logits.dtype, device=DEVICE)
        around[256:-256] = x.logits.flatten()
        inside = x._replace(logits=around[256:-256].view(x.logits.shape))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guarded)
            check(inside)
        assert guards
        for whole, before, count in guards:
            for own in (slice(0, 128), slice(128 + count, None)):
                assert torch.equal(whole[own], before[own])
        guards.clear()
    assert torch.empty is real


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_can_be_captured(early: bool) -> None:
    x = case("random", [200] * 3, 4096, [256] * 3)
    of = geometry.requests(x.row_start, x.keep, DEVICE)
    shape = launch.layout(4096, 2, of, DEVICE)
    assert shape is not None
    logits = x.logits.clone()
    scores = launch.Scores(None, torch.empty_like(x.parent), x.parent, "step")
    launch.select(logits, scores, x.order, of, shape, early=early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch.select(logits, scores, x.order, of, shape, early=early)
    for seed in (1, 2):
        fresh = case("random" if seed == 1 else "equal", [200] * 3, 4096, [256] * 3, seed=seed)
        logits.copy_(fresh.logits)
        graph.replay()
        again = launch.select(logits, scores, x.order, of, shape, early=early)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_rows_of_a_case_are_what_the_helper_says() -> None:
    x = case("random", [2, 0, 3], 4, [1, 1, 1])
    assert x.row_start == [0, 2, 2, 5]
    assert [b - a for a, b in pairwise(x.row_start)] == [2, 0, 3]
