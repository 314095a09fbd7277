import pytest
import torch

from app.ops.gdn import chunked_delta_rule, plan_chunks
from app.ops.gdn.chunked import _solved
from app.ops.gdn.reference import delta_rule
from tests.no_wait import NoWait
from tests.ops.gdn.cases import Shape, tokens


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize(
    "shape", [Shape(2, 2, 8, 8), Shape(2, 6, 8, 12), Shape(1, 4, 16, 4)], ids=lambda s: "x".join(map(str, s))
)
def test_chunks_give_what_the_recurrence_gives(size, shape):
    lengths = [17, 1, 64, 0, 4, 65, 130]
    start = torch.tensor([0, *lengths]).cumsum(0)
    x = tokens(sum(lengths), shape, seed=size)
    o, state = chunked_delta_rule(*x, plan_chunks(start, size))
    expected, states = delta_rule(x.q, x.k, x.v, x.alpha, x.beta, start, torch.float64)
    assert state.dtype == torch.float32
    torch.testing.assert_close(o.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state.double(), states, atol=5e-6, rtol=1e-5)
    assert not state[3].any(), "an empty prompt leaves an empty state"


def test_strong_and_weak_decay_stay_finite():
    shape, start = Shape(1, 2, 8, 8), torch.tensor([0, 200])
    x = tokens(200, shape, seed=1)
    log_alpha = torch.stack([torch.full((200,), -60.0), torch.full((200,), -1e-6)], 1)
    o, state = chunked_delta_rule(x.q, x.k, x.v, log_alpha, x.beta, plan_chunks(start))
    expected, states = delta_rule(x.q, x.k, x.v, log_alpha.exp(), x.beta, start, torch.float64)
    torch.testing.assert_close(o.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state.double(), states, atol=2e-5, rtol=1e-4)


def test_a_prompt_full_of_nan_stays_alone():
    shape, start = Shape(1, 2, 8, 8), torch.tensor([0, 5, 12, 20])
    x = tokens(20, shape, seed=2)
    alone, state = chunked_delta_rule(*x, plan_chunks(start, 8))
    for tensor in x:
        tensor[5:12] = torch.nan
    o, other = chunked_delta_rule(*x, plan_chunks(start, 8))
    keep = [*range(5), *range(12, 20)]
    assert torch.equal(o[keep], alone[keep])
    assert torch.equal(other[[0, 2]], state[[0, 2]])


def test_a_plan_cuts_every_prompt_on_its_own():
    plan = plan_chunks(torch.tensor([0, 3, 3, 8]), 4)
    assert plan.rounds == ((0, 2), (2, 1))
    assert plan.rank.tolist() == [1, 2, 0], "prompts of many chunks in front"
    assert plan.token.tolist() == [[3, 4, 5, 6], [0, 1, 2, 2], [7, 7, 7, 7]]
    assert plan.real.sum(1).tolist() == [4, 3, 1]
    assert plan.place.tolist() == [4, 5, 6, 0, 1, 2, 3, 8]


@pytest.mark.parametrize("lengths", [[3, 0, 5], [0, 0], [17, 1, 64, 0, 4, 65, 130]])
def test_a_plan_of_lengths_that_the_host_knows_waits_for_no_device(lengths):
    start = torch.tensor([0, *lengths]).cumsum(0)
    with NoWait():
        plan = plan_chunks(start, 4, lengths)
    for one, other in zip(plan, plan_chunks(start, 4), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("size", [8, 32, 64])
def test_repeated_tokens_that_forget_nothing_are_solved_as_exactly_as_by_substitution(size):
    """All keys alike, beta near 1: the powers of such a system grow most."""
    below = torch.full((2, size, size), 0.97).tril(-1) * torch.tensor([1.0, 0.5]).view(2, 1, 1)
    right = torch.randn(2, size, 5)
    exact = torch.linalg.solve_triangular(below.double(), right.double(), upper=False, unitriangular=True)
    torch.testing.assert_close(_solved(below, right).double(), exact, atol=1e-5, rtol=0)
