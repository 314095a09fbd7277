import pytest
import torch
from torch.nn import functional

from app.ops.gdn import causal_convolution, window_convolution


def positions(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prompts_are_convolved_as_torch_does_and_do_not_see_each_other(size):
    lengths, d = [1, 9, 2, 3, 30], 6
    start = torch.tensor([0, *lengths]).cumsum(0)
    x, weight = torch.randn(sum(lengths), d), torch.randn(d, size)
    y, tail = causal_convolution(x, weight, start, positions(lengths))
    for r, one in enumerate(x.split(lengths)):
        padded = torch.cat([torch.zeros(size - 1, d), one])
        expected = functional.silu(functional.conv1d(padded.T[None], weight[:, None], groups=d)[0].T)
        torch.testing.assert_close(y[start[r] : start[r + 1]], expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(tail[r], padded[len(padded) - size + 1 :])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rows_window_is_the_end_of_its_own_sequence(size, compact, first):
    lengths, d, rows = [1, 2, 8], 5, 9
    start = torch.tensor([0, *lengths]).cumsum(0)
    x, weight = torch.randn(sum(lengths), d), torch.randn(d, size)
    _, tail = causal_convolution(x, weight, start, positions(lengths))
    request = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    slots = torch.randn(6, 12, d)
    for t in range(1 + first, 6):
        ancestry = torch.arange(rows).unsqueeze(1).expand(-1, t - 1) if compact else torch.randint(0, 12, (rows, t - 1))
        own = torch.randn(rows, d)
        y = window_convolution(
            own, weight, tail, slots, request=request, ancestry=ancestry, first=first, compact=compact
        )
        for n in range(rows):
            r = int(request[n])
            written = [slots[j, ancestry[n, j]] for j in range(first, t - 1)]
            whole = torch.stack([*x[start[r] : start[r + 1]], *written, own[n]])
            padded = torch.cat([torch.zeros(size, d), whole])[-size:]
            torch.testing.assert_close(y[n], functional.silu((padded * weight.T).sum(0)), atol=1e-6, rtol=1e-5)


def test_keys_go_where_they_are_kept():
    x, weight, slots, key = torch.randn(5, 24), torch.randn(24, 4), torch.randn(3, 5, 24), torch.zeros(5, 6)
    how = {"request": torch.zeros(5, dtype=torch.int64), "ancestry": torch.randint(0, 5, (5, 2))}
    y = window_convolution(x, weight, torch.zeros(1, 3, 24), slots, **how)
    window_convolution(x, weight, torch.zeros(1, 3, 24), slots, key=key, **how)
    assert torch.equal(key, y[:, 6:12])


def test_sixteen_bit_inputs_are_summed_in_float32():
    x, weight = torch.randn(40, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    start, place = torch.tensor([0, 40]), torch.arange(40)
    y, tail = causal_convolution(x, weight, start, place)
    exact, _ = causal_convolution(x.float(), weight.float(), start, place)
    assert y.dtype == tail.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
