"""A step's expressions as C say what its program computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.policies.generated import Generated
from app.policies.plan import Plan, StepInputs
from tests.policies.batches import CATALOGUE, CONDITIONS, case, with_gumbels
from tests.policies.c_expressions import compute, definitions, noise, rank_of, stays
from tests.policies.contracts import plan_of
from tests.policies.test_choose import ON, PARAMS, policy

EXPRESSIONS = {
    "weighted": ["score: parent + 0.8 * logp"],
    "bent": ["rank: where(logp > -1.5, score, 2 * score) - max(logp, -2) / 3"],
    "columns": ["rank: score - param.g * prior.popularity + where(boosted.campaign, param.d, 0) + user.age / 100"],
    "labels": [
        'rank: score + where(attr.genre in ["drama", "crime"], 1, 0) - where(attr.genre != "crime", attr.age, 0)'
    ],
    "seen": ["rank: score - where(seen and not attr.cold, 1000, 0)"],
    "context": [f"score: parent + logp * where({CONDITIONS[0]} or {CONDITIONS[1]}, param.p, 1)"],
    "steps": ["rank: score / step ** 2 + width ** -1"],
    "functions": ["rank: score + log(attr.age - 5) + sqrt(attr.age - 2) * abs(logp) + min(logp, -1, user.age)"],
    "clipped": ["rank: clip(score, -param.d, prior.popularity) + (attr.age + 1) ** 3"],
    "probable": ["rank: score - prob * sigmoid(user.age) + exp(logp / 2) ** 0.5 + (attr.age + 1) ** 0.3"],
    "temperature": ["logits: logit / param.p"],
    "min_p": ["keep:", "  - min_p(param.p)"],
    "top_k": ["keep:", "  - top_k(2)"],
    "heads and floors": ["keep:", "  - top_k(3)", "  - min_p(0.3)", "  - top_k(4)", "rank: score - 0.5 * attr.age"],
    "floors": ["keep:", "  - epsilon(0.3)", "  - min_p(0.9)", "rank: score - 0.5 * attr.age"],
    "same": ["score: parent + logp * 1"],
    "noisy": ["rank: score + param.d * gumbel"],
    "two kinds of noise": ["rank: where(uniform < 0.4, score, score - prior.popularity) + gumbel / (1 + uniform)"],
    "stochastic": ["select: stochastic()"],
    "stochastic of some": ["keep:", "  - top_k(3)", "select: stochastic()"],
    "stochastic of few": ["keep:", "  - min_p(0.3)", "score: parent + 0.5 * logp", "select: stochastic()"],
}
CLOSE = {"functions", "probable"}
NORMED = {"stochastic": "valid", "stochastic of few": "valid", "stochastic of some": "valid"}


def own(plan: Plan) -> Generated:
    found = plan.structure.steps[1].generated
    assert found is not None, plan.structure.steps[1].unfit
    return found


def step_inputs(plan: Plan, rng: np.random.Generator, c: int, f: int) -> StepInputs:
    """One request's random step, without bad logits."""
    whole = with_gumbels(case(rng, plan, 2, c, f, PARAMS), rng)
    grid = whole.grid
    uses = plan.structure.steps[1].uses
    extra = {name: torch.from_numpy(value) for name, value in grid.extra.items() if name in uses}
    extra = {name: one[:, 0] if name.startswith(("user.", "ctx.")) else one for name, one in extra.items()}
    rows = len(grid.parent)
    return StepInputs(
        logits=torch.from_numpy(np.nan_to_num(grid.logits, nan=-1, posinf=-1, neginf=-1)),
        log_norm=None,
        code=torch.from_numpy(grid.code),
        legal=torch.from_numpy(grid.legal),
        trie=None,
        seen=torch.from_numpy(grid.seen),
        excluded=None,
        parent=torch.from_numpy(grid.parent),
        params=torch.tensor([[PARAMS[name] for name in plan.structure.params]] * rows).reshape(rows, -1),
        step=2,
        width=torch.full((rows,), float(grid.width)),
        request=torch.zeros(rows, dtype=torch.int64),
        order=torch.from_numpy(grid.order),
        widths=(grid.width,),
        rows=(len(grid.parent),),
        prefix=torch.from_numpy(grid.prefix),
        seed=torch.full((rows,), whole.seed),
        carry=torch.from_numpy(grid.carry),
        extra=extra,
    )


@pytest.mark.parametrize("mask", ["trie", "not blocked.ads"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_text_computes_what_the_program_does(name, mask):
    plan = policy(*EXPRESSIONS[name], mask=mask, normalize=NORMED.get(name, "none"))
    program, made, rng = plan.structure.steps[1], own(plan), np.random.default_rng(7)
    for _ in range(20):
        c = int(rng.integers(2, 8))
        inputs = step_inputs(plan, rng, c, int(rng.integers(1, c + 1)))
        scored = program.run(inputs)
        lines = definitions(made.definitions)
        assert (int(lines["RANK_VALUES"]), int(lines["RANK_COLUMNS"])) == (len(made.values), len(made.columns))
        assert lines["RANK_NORMED"] == str(int(name in NORMED))
        values = [one[:, None] for one in made.table(inputs, plan.structure.params).numpy().T]
        dense = made.dense(inputs, children=program.children)
        columns = [one.gather(1, inputs.code).numpy() for one in dense]
        names = {"logit": inputs.logits.gather(1, inputs.code).numpy(), "parent": inputs.parent[:, None].numpy()}
        names["logp"] = (
            compute(lines["RANK_LOGIT"], names, values, columns) if "RANK_LOGIT" in lines else names["logit"]
        )
        shape = inputs.code.shape
        found = program.legal(inputs) if program.legal else None
        legal = np.ones(shape, bool) if found is None else found.numpy()
        if name in NORMED:
            over = torch.from_numpy(np.where(legal, names["logp"], np.float32(-np.inf)))
            names["logp"] = names["logp"] - torch.logsumexp(over, 1, keepdim=True).numpy()
        if made.noisy:
            names |= noise(lines, made.noise(inputs).numpy(), inputs.code.numpy())
        score = compute(lines["RANK_SCORE"], names, values, columns)
        names["score"] = score = np.broadcast_to(score, shape).astype(np.float32)
        good = stays(lines, names, values, legal) & np.isfinite(score)
        rank = np.broadcast_to(rank_of(lines, names, values, columns, good), shape).astype(np.float32)
        good &= np.isfinite(rank)
        assert (scored.carry is not None) == made.carries
        assert np.array_equal(good, scored.rank.numpy() > -np.inf)
        same = np.testing.assert_allclose if name in CLOSE else np.testing.assert_array_equal
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if name in CLOSE else {}
        same(rank[good], scored.rank.numpy()[good], **tolerance)
        same(score[good], scored.score.numpy()[good], **tolerance)


def test_an_edit_of_parameters_changes_no_text():
    text = "widebeam: 1\nparams:\n  w: {value: %s, range: [0, 9]}\nsteps:\n  all:\n"
    text += "    rank: score - param.w * prior.popularity\n"
    one, other = (own(plan_of(text % value, ON, CATALOGUE)) for value in ("0.5", "2"))
    assert one == other
    assert one.values == ("param.w",)
    assert one.columns == ("prior.popularity",)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["rank: score - 0.3 * sibling"], "`sibling` is not computed inside the kernels"),
        (["rank: score + gumbel - sibling"], "`sibling` is not computed inside the kernels"),
        (["keep:", "  - top_k(2)", "  - top_p(0.5)"], "top_p works on all ranks"),
        (["prune:", "  - within_parent(1)", "quota:", "  - cap(parent, 2)"], "prune and quota work on all ranks"),
        (["prune:", "  - within(param.d)", "rank: score * 2"], "prune works on all ranks"),
        (["select: explore(share=0.4)"], "explore works on all ranks"),
        (
            ["rank: score + prior.popularity + attr.age + where(attr.cold, 1, 0) + where(boosted.campaign, 1, 0)"],
            "it reads 4 numbers of a candidate, and kernels 3",
        ),
    ],
)
def test_what_has_no_text_says_why(lines, why):
    step = policy(*lines).structure.steps[1]
    assert step.generated is None
    assert step.legal is None
    assert step.unfit == why


def test_a_sample_of_what_has_no_text_has_none():
    step = policy("keep:", "  - top_p(0.2)", "select: stochastic()", normalize="valid").structure.steps[1]
    assert (step.generated, step.unfit) == (None, "top_p works on all ranks")


def test_what_follows_the_logits_needs_no_text():
    step = policy("select: top()").structure.steps[1]
    assert (step.generated, step.unfit) == (None, "")
    assert step.legal is not None


def test_floors_of_changed_logits_have_no_text():
    step = policy("logits: logit / param.p", "keep:", "  - min_p(0.5)").structure.steps[1]
    assert step.unfit == "keep works on changed logits"
