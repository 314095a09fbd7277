"""What the kernels compute of a policy's expressions is what its program computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from app.ops.selection import geometry, launch, pack
from app.ops.selection import reference as definition
from app.policies import noise
from app.policies.plan import Plan, StepInputs
from tests.policies.test_choose import PLANS, policy

INF = float("inf")
DEVICE = torch.device("cuda:0")
EXACT = {
    "weighted": policy("score: parent + 0.8 * logp", normalize="full"),
    "bent": policy("rank: where(logp > -9, score, 2 * score) - max(logp, -7) / 3", normalize="full"),
    "columns": policy(
        "rank: score - param.g * prior.popularity + where(boosted.campaign, param.d, 0) + user.age / 100",
        normalize="full",
    ),
    "labels": policy(
        'rank: score + where(attr.genre in ["drama", "crime"], 1, 0) - where(attr.genre != "crime", attr.age, 0) / 7',
        normalize="full",
    ),
    "seen last": policy("rank: score - where(seen, 1000, 0)", normalize="full"),
    "all codes": policy("rank: score + abs(attr.age - 4) ** 2 - width", mask="not blocked.ads", normalize="full"),
    "of rows": policy(
        'score: parent + logp * where(ctx.country == "BR", param.p, 1)', "rank: 0 - score", normalize="full"
    ),
    "unlikely": policy("rank: where(logp > -9, score, 2 * score) - user.age / 100", normalize="full"),
    "likely": policy("keep:", "  - min_p(param.p)", normalize="full"),
    "likely enough": policy("keep:", "  - epsilon(0.02)", "  - min_p(0.2)", "rank: score - attr.age", normalize="full"),
    "some": policy("keep:", "  - top_k(100)", "rank: 0 - score", normalize="full"),
    "many": policy("keep:", "  - top_k(300)", "rank: 0 - score", normalize="full"),
    "one of a row": policy("keep:", "  - top_k(1)", "rank: score - attr.age", normalize="full"),
    "some that are likely": policy(
        "keep:",
        "  - top_k(40)",
        "  - min_p(0.1)",
        "rank: 0 - logp",
        mask="not blocked.ads",
        normalize="full",
    ),
    "not a number": policy("rank: score + log(attr.age - 5) + sqrt(attr.age - 2)", normalize="full"),
}  # the last is of logarithms of few whole numbers
DRAWN = {
    "noisy": policy("rank: score + param.d * gumbel", normalize="full"),
    "two kinds of noise": policy(
        "keep:",
        "  - min_p(0.05)",
        "rank: where(uniform < 0.4, score, score + prior.popularity) + gumbel",
        normalize="full",
    ),
    "all codes by chance": policy("rank: uniform - attr.age", mask="not blocked.ads", normalize="full"),
    "noise alone": policy("score: 0 * parent", "rank: score + gumbel", normalize="full"),
    "stochastic": policy("select: stochastic()", normalize="valid"),
    "stochastic of all": policy("select: stochastic()", mask="not seen", normalize="valid"),
    "stochastic of some": policy("keep:", "  - top_k(50)", "select: stochastic()", normalize="valid"),
    "stochastic of few": policy(
        "keep:", "  - min_p(param.p)", "score: parent + 0.5 * logp", "select: stochastic()", normalize="valid"
    ),
}
CLOSE = {
    "probable": policy("rank: score - param.d * prob", normalize="full"),
    "sigmoid": policy("rank: score * sigmoid(prior.popularity) + exp(logp / 2) ** 0.5", normalize="full"),
    "temperature": policy("logits: logit / param.p", normalize="step"),
    "debiased": policy("logits: logit - log(param.d)", "rank: score - 0.1 * prior.popularity", normalize="step"),
}


def inputs(plan: Plan, rows: int, codes: int, f: int, *, dtype: torch.dtype) -> StepInputs:
    """Random rows; logits are of 16 bit, and hold NaN and infinities."""
    program = plan.structure.steps[1]
    logits = (torch.randn(rows, codes, device=DEVICE) * 2).to(dtype)
    chance = torch.rand(rows, codes, device=DEVICE)
    logits[chance < 0.002], logits[chance > 0.998] = float("nan"), -INF
    logits[(chance > 0.5) & (chance < 0.501)] = INF
    if program.children:
        code = torch.rand(rows, codes, device=DEVICE).topk(f, dim=1).indices.sort(1).values
    else:
        f, code = codes, torch.arange(codes, device=DEVICE).expand(rows, codes)

    def flags(share: float) -> Tensor:
        return torch.rand(rows, f, device=DEVICE) < share

    extra = {
        "attr.genre": torch.randint(-1, 3, (rows, f), device=DEVICE),
        "attr.cold": flags(0.3),
        "attr.age": torch.randint(0, 10, (rows, f), device=DEVICE).float(),
        "prior.popularity": -torch.rand(rows, f, device=DEVICE),
        "blocked.ads": flags(0.2),
        "boosted.campaign": flags(0.2),
        "user.age": torch.randint(0, 90, (rows,), device=DEVICE).float(),
        'ctx.country == "BR"': torch.rand(rows, device=DEVICE) < 0.5,
    }
    parent = torch.randn(rows, device=DEVICE)
    parent[torch.rand(rows, device=DEVICE) < 0.1] = -INF
    legal = flags(0.7)
    legal[:: max(2, rows // 3)] = False
    return StepInputs(
        logits=logits,
        log_norm=None,
        code=code,
        legal=legal & (parent > -INF)[:, None],
        trie=None,
        seen=flags(0.3),
        excluded=flags(0.1),
        parent=parent,
        params=torch.rand(rows, max(1, len(plan.structure.params)), device=DEVICE) + 0.5,
        step=2,
        width=torch.randint(1, 9, (rows,), device=DEVICE).float(),
        prefix=torch.randint(0, codes, (rows, 1), device=DEVICE),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), device=DEVICE),
        carry=torch.randn(rows, device=DEVICE) if program.carries else None,
        extra={name: value for name, value in extra.items() if name in program.uses},
    )


def same(given: StepInputs) -> StepInputs:
    """Rows that draw the same numbers."""
    assert given.prefix is not None and given.seed is not None
    return given._replace(prefix=torch.ones_like(given.prefix), seed=torch.ones_like(given.seed))


def free(given: StepInputs) -> StepInputs:
    """Rows of which every code may be selected."""
    alive = (given.parent > -INF)[:, None]
    return given._replace(legal=alive.expand(given.legal.shape), excluded=None)


def level(given: StepInputs) -> StepInputs:
    """Rows whose logits are equal, and some of them less."""
    logits = torch.where(given.logits > 1, 1, torch.where(given.logits > -INF, -0.0, -INF))
    return given._replace(logits=logits.to(given.logits.dtype))


def far(given: StepInputs) -> StepInputs:
    """Logits and parents of which sums overflow."""
    logits = torch.where(given.logits > 3, 3e38, torch.where(given.logits < -3, -3e38, given.logits.float()))
    parent = torch.where(given.parent > 1, 3e38, torch.where(given.parent < -0.8, -3e38, given.parent))
    return given._replace(logits=logits, parent=torch.where(given.parent > -INF, parent, given.parent))


def none(given: StepInputs) -> StepInputs:
    """Rows without a candidate."""
    return given._replace(legal=torch.zeros_like(given.legal))


def check(
    plan: Plan, widths: list[int], codes: int, keep: list[int], *, exact: bool, normalize: str = "step",
    dtype: torch.dtype = torch.bfloat16, change: Callable[[StepInputs], StepInputs] = lambda given: given,
    captured: bool = False,
) -> None:  # fmt: skip
    """One launch against the program's ranks, which are given the kernel's own log-sum-exp, or give it theirs."""
    program = plan.structure.steps[1]
    own = program.generated
    assert own is not None, program.unfit
    given = change(inputs(plan, sum(widths), codes, max(1, codes // 3), dtype=dtype))
    order = torch.cat([torch.randperm(width, device=DEVICE) for width in widths])
    number = torch.arange(len(widths), device=DEVICE).repeat_interleave(torch.tensor(widths, device=DEVICE))
    given = given._replace(request=number, order=order, widths=tuple(keep), rows=tuple(widths))
    start = [0, *torch.tensor(widths).cumsum(0).tolist()]
    of = geometry.requests(start, keep, DEVICE)
    shape = launch.layout(codes, given.logits.element_size(), of, DEVICE)
    assert shape is not None and program.legal is not None
    legal = program.legal(given)
    mask = None if legal is None else pack(given.code if program.children else None, legal, codes)
    ranked = launch.Ranked(
        own.definitions,
        own.table(given, plan.structure.params),
        own.dense(given, children=program.children),
        own.noise(given),
        own.carries,
    )
    norm = torch.randn(len(given.parent), device=DEVICE) + 9
    sane, bad = definition.sanitise(given.logits)
    if program.normalize == "valid" and normalize == "given":
        over = sane.gather(1, given.code) if program.children else sane
        norm = torch.logsumexp(over if legal is None else torch.where(legal, over, -INF), 1)
    scores = launch.Scores(mask, norm, given.parent, normalize, ranked)
    got = launch.select(given.logits, scores, order, of, shape, early=True)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = launch.select(given.logits, scores, order, of, shape, early=True)
        graph.replay()
    assert bad is not None
    assert torch.equal(got.bad, (bad * (given.parent > -INF)).int())
    scored = program.run(given._replace(logits=sane, log_norm=norm))
    best = definition.select_top(scored.rank, given.code, order, codes, start, keep)
    assert torch.equal(got.n_valid, best.n_valid)
    assert torch.equal(got.broken.long(), scored.bad)
    assert torch.equal(got.row < 0, best.parent < 0)
    at, dead = best.parent.clamp(min=0), best.parent < 0
    code = given.code[at, best.column.clamp(min=0)].masked_fill(dead, -1)
    score = scored.score[at, best.column.clamp(min=0)].masked_fill(dead, -INF)
    if own.carries:
        assert scored.carry is not None
        carried = scored.carry[at, best.column.clamp(min=0)].masked_fill(dead, -INF)
        torch.testing.assert_close(got.rank, carried, rtol=0, atol=0 if exact else 1e-4)
    if exact:
        assert torch.equal(got.row, best.parent)
        assert torch.equal(got.code, code)
        assert torch.equal(got.score, score)
        return
    rank = scored.rank
    if program.children:
        rank = torch.full((len(rank), codes), -INF, device=DEVICE).scatter_(1, given.code, scored.rank)
    mine = rank[got.row.clamp(min=0), got.code.clamp(min=0)].masked_fill(got.row < 0, -INF)
    torch.testing.assert_close(mine, scored.rank[at, best.column.clamp(min=0)].masked_fill(dead, -INF))
    keys = (got.row * codes + got.code)[got.row >= 0]
    assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize("name", EXACT)
def test_ranks_are_those_of_the_program_to_the_bit(name: str) -> None:
    exact = name != "not a number"
    for normalize in ("step", "valid", "given"):
        check(EXACT[name], [128] * 3, 8192, [128] * 3, exact=exact, normalize=normalize)
    for codes in (8191, 24):
        check(EXACT[name], [1, 70, 0, 30, 7], codes, [50, 128, 0, 300, 1], exact=exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["bent", "columns"])
def test_ranks_of_other_logits(name: str, dtype: torch.dtype) -> None:
    check(EXACT[name], [128] * 3, 8192, [128] * 3, exact=True, dtype=dtype)
    check(EXACT[name], [1, 70, 0, 30, 7], 1001, [50, 128, 0, 300, 1], exact=True, dtype=dtype)


@pytest.mark.parametrize("name", DRAWN)
def test_ranks_of_drawn_numbers_are_those_of_the_program_to_the_bit(name: str) -> None:
    sample = DRAWN[name].structure.steps[1].carries
    for normalize in ("given",) if sample else ("step", "valid", "given"):
        check(DRAWN[name], [128] * 3, 8192, [128] * 3, exact=True, normalize=normalize)
    for dtype in (torch.float16, torch.float32):
        check(DRAWN[name], [60] * 2, 2050, [128] * 2, exact=True, normalize="given", dtype=dtype)
    for codes in (8191, 24):
        check(DRAWN[name], [1, 70, 0, 30, 7], codes, [50, 128, 0, 300, 1], exact=True, normalize="given")
    check(DRAWN[name], [1] * 3, 8192, [512] * 3, exact=True, normalize="given")
    check(DRAWN[name], [40] * 2, 65536, [1024] * 2, exact=True, normalize="given")
    check(DRAWN[name], [512] * 2, 8192, [512] * 2, exact=True, normalize="given", captured=True)
    check(DRAWN[name], [9, 4], 100, [30, 9], exact=True, normalize="given", change=none)


@pytest.mark.parametrize("name", DRAWN)
def test_rows_that_draw_the_same_numbers_tie(name: str) -> None:
    check(DRAWN[name], [100] * 2, 8192, [300] * 2, exact=True, normalize="given", change=same)
    check(DRAWN[name], [9] * 3, 300, [64] * 3, exact=True, normalize="given", change=same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_drawn_where_there_is_no_mask(dtype: torch.dtype) -> None:
    plans = (
        policy("rank: score + gumbel", mask="none", normalize="full"),
        policy("select: stochastic()", mask="none", normalize="valid"),
    )
    for plan in plans:
        check(plan, [40] * 3, 8192, [128] * 3, exact=True, normalize="given", dtype=dtype, change=free)
        check(plan, [1, 6, 2], 1001, [1001, 40, 90], exact=True, normalize="given", dtype=dtype, change=free)


@pytest.mark.parametrize("name", [name for name, one in DRAWN.items() if one.structure.steps[1].carries])
def test_samples_of_other_log_sum_exps_are_close(name: str) -> None:
    check(DRAWN[name], [128] * 3, 8192, [128] * 3, exact=False, normalize="valid")
    check(DRAWN[name], [1, 70, 0, 30, 7], 1000, [50, 128, 0, 300, 1], exact=False, normalize="valid")


def test_numbers_are_those_of_a_cpu_to_the_bit() -> None:
    rows, codes = 64, 1024
    own = DRAWN["noise alone"].structure.steps[1].generated
    assert own is not None
    given = inputs(DRAWN["noise alone"], rows, codes, codes, dtype=torch.float32)
    given = given._replace(logits=torch.zeros_like(given.logits), parent=torch.zeros(rows, device=DEVICE))
    of = geometry.requests(range(rows + 1), [codes] * rows, DEVICE)
    shape = launch.layout(codes, 4, of, DEVICE)
    assert shape is not None
    ranked = launch.Ranked(own.definitions, own.table(given, ()), (), own.noise(given), wanted=True)
    scores = launch.Scores(None, given.parent, given.parent, "given", ranked)
    got = launch.select(given.logits, scores, torch.zeros_like(given.code[:, 0]), of, shape)
    assert given.seed is not None and given.prefix is not None
    drawn = noise.gumbel(given.seed.cpu(), given.prefix.cpu(), torch.arange(codes).expand(rows, codes), given.step)
    assert int(got.n_valid.sum()) == rows * codes
    assert torch.equal(got.rank.cpu(), drawn[got.row.cpu(), got.code.cpu()])


@pytest.mark.parametrize("name", CLOSE)
def test_ranks_are_close_to_those_of_the_program(name: str) -> None:
    check(CLOSE[name], [128] * 3, 8192, [128] * 3, exact=False)
    check(CLOSE[name], [1, 70, 0, 30, 7], 1000, [50, 128, 0, 300, 1], exact=False)


@pytest.mark.parametrize("name", ["unlikely", "bent", "weighted", "of rows", "columns"])
def test_scores_that_overflow_are_refused_as_the_program_refuses_them(name: str) -> None:
    check(EXACT[name], [60] * 2, 2050, [128] * 2, exact=True, normalize="given", dtype=torch.float32, change=far)
    check(
        EXACT[name], [1, 9, 0, 3], 300, [50, 40, 0, 30], exact=True, normalize="given", dtype=torch.float32, change=far
    )


def test_large_vocabularies_and_many_survivors() -> None:
    check(EXACT["bent"], [40] * 2, 65536, [1024] * 2, exact=True)
    check(EXACT["columns"], [64] * 3, 20000, [1500] * 3, exact=True)
    check(EXACT["weighted"], [1] * 3, 8192, [512] * 3, exact=True)


def test_heads_of_rows_of_few_numbers_go_by_their_places() -> None:
    for n in (1, 100, 128, 129):
        heads = policy("keep:", f"  - top_k({n})", "rank: 0 - logp", normalize="none")
        for codes in (8192, 2056, 100):
            check(heads, [6] * 2, codes, [200] * 2, exact=True, normalize="none", change=level)


def test_equal_ranks_go_by_their_places() -> None:
    flat = policy("rank: 0 * logp", normalize="full")
    check(flat, [100] * 2, 8192, [300] * 2, exact=True)
    check(
        policy("keep:", "  - top_k(30)", "score: parent * 0", normalize="none"),
        [9] * 3,
        300,
        [64] * 3,
        exact=True,
        normalize="none",
        change=level,
    )
    check(policy("score: parent * 0", normalize="none"), [9] * 3, 300, [64] * 3, exact=True, normalize="none")


@pytest.mark.parametrize("name", [name for name, one in PLANS.items() if one.structure.steps[1].generated is None])
def test_what_the_kernels_do_not_compute_says_why(name: str) -> None:
    program = PLANS[name].structure.steps[1]
    assert program.unfit or program.legal is not None
