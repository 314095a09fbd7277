"""Every kind of plan selects on a GPU what it selects on a CPU: equal survivors and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.ops.selection import select_top
from app.policies.plan import Plan, StepInputs
from app.policies.reference import sanitise
from tests.policies.batches import Case, case, with_groups, with_gumbels
from tests.policies.test_choose import DIVERSE, PARAMS, PLANS, STOCHASTIC

ALL = {**PLANS, "diverse": DIVERSE, "stochastic": STOCHASTIC}


def inputs(plan: Plan, t: int, cases: list[Case], device: str) -> tuple[StepInputs, list[int], list[int]]:
    grids = [one.grid for one in cases]
    rows = [len(grid.parent) for grid in grids]

    def all_of(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(grid, name) for grid in grids])).to(device)

    def per_row(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(np.repeat(values, rows), dtype=dtype, device=device)

    uses = plan.structure.steps[t - 1].uses
    extra = {
        name: torch.from_numpy(np.concatenate([grid.extra[name] for grid in grids])).to(device)
        for name in uses
        if "." in name
    }
    params = [[grid.params.get(name, 0.0) for name in plan.structure.params] for grid in grids]
    table = torch.tensor(params, dtype=torch.float32).repeat_interleave(torch.tensor(rows), dim=0).to(device)
    return (
        StepInputs(
            logits=torch.from_numpy(np.concatenate([sanitise(grid.logits)[0] for grid in grids])).to(device),
            log_norm=None,
            code=all_of("code"),
            legal=all_of("legal"),
            trie=all_of("trie"),
            seen=all_of("seen"),
            excluded=all_of("excluded"),
            parent=all_of("parent"),
            params=table.reshape(sum(rows), -1),
            step=t,
            width=per_row([grid.width for grid in grids], torch.float32),
            request=per_row(list(range(len(grids))), torch.int64),
            order=all_of("order"),
            widths=tuple(grid.width for grid in grids),
            rows=tuple(rows),
            prefix=all_of("prefix"),
            seed=per_row([one.seed for one in cases], torch.int64),
            carry=None if grids[0].carry is None else all_of("carry"),
            extra={name: column[:, 0] if name.startswith("user.") else column for name, column in extra.items()},
        ),
        [0, *np.cumsum(rows).tolist()],
        [grid.width for grid in grids],
    )


@pytest.mark.parametrize("name", ALL)
def test_survivors_on_a_gpu_are_those_on_a_cpu(name):
    rng = np.random.default_rng(11)
    for trial in range(12):
        t, c = 2 + trial % 2, int(rng.integers(2, 8))
        f = int(rng.integers(1, c + 1))
        given = [case(rng, ALL[name], t, c, f, PARAMS) for _ in range(3)]
        if name == "diverse":
            given = [with_groups(one, rng, 2) for one in given]
        if name == "stochastic":
            given = [with_gumbels(one, rng) for one in given]
        found = {}
        for device in ("cpu", "cuda"):
            step, start, keep = inputs(ALL[name], t, given, device)
            scored = ALL[name].structure.steps[t - 1].run(step)
            best = select_top(scored.rank, step.code, step.order, c, start, keep)
            found[device] = (scored, best)
        (here, mine), (there, theirs) = found["cpu"], found["cuda"]
        if name != "stochastic":  # its numbers are sums over a row
            assert torch.equal(here.rank, there.rank.cpu())
        assert torch.equal(here.bad, there.bad.cpu())
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other.cpu())
