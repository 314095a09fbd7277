from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from app.policies.noise import EXPLORE, GUMBEL, UNIFORM, gumbel, philox, prefix_hash, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, words):
    """Known answers of Random123, philox4x32-10."""
    tensors = tuple(torch.tensor([one], dtype=torch.int64) for one in counter)
    keys = tuple(torch.tensor([one], dtype=torch.int64) for one in key)
    assert " ".join(f"{int(one):08x}" for one in philox(tensors, keys)) == words


def rows(n: int, f: int, prefix: list[int], seed: int = 7):
    return (
        torch.full((n,), seed),
        torch.tensor([prefix] * n, dtype=torch.int64).reshape(n, -1),
        torch.arange(f).repeat(n, 1),
    )


def test_noise_belongs_to_seed_prefix_code_and_step_and_not_to_the_row():
    one = gumbel(*rows(1, 5, [3, 4]), 3)
    three = gumbel(*rows(3, 5, [3, 4]), 3)
    assert torch.equal(one.expand(3, 5), three)
    seed, prefix, code = rows(1, 5, [3, 4])
    assert torch.equal(gumbel(seed, prefix, code.flip(1), 3), one.flip(1))
    for other in (
        gumbel(*rows(1, 5, [4, 3]), 3),
        gumbel(*rows(1, 5, [3, 4], seed=8), 3),
        gumbel(*rows(1, 5, [3, 4], seed=7 + 2**40), 3),
        gumbel(*rows(1, 5, [3, 4]), 2),
        gumbel(*rows(1, 5, [3, 4]), 3, EXPLORE),
    ):
        assert not torch.equal(other, one)


def test_uniform_is_inside_the_open_interval_and_flat():
    values = uniform(*rows(20, 10_000, []), 1).numpy()[0]
    assert values.min() > 0 and values.max() < 1
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 45  # chi-square, 19 degrees: p = 0.0007


def test_gumbel_has_its_mean_and_variance():
    values = gumbel(*rows(1, 50_000, [1]), 2, GUMBEL).double()
    assert math.isclose(values.mean().item(), 0.5772, abs_tol=0.03)
    assert math.isclose(values.var().item(), math.pi**2 / 6, rel_tol=0.05)
    assert torch.isfinite(values).all()
    assert not torch.equal(values, uniform(*rows(1, 50_000, [1]), 2, UNIFORM).double())


def test_prefixes_that_differ_hash_differently():
    codes = torch.cartesian_prod(torch.arange(30), torch.arange(30), torch.arange(30))
    assert len(torch.unique(prefix_hash(codes))) == 27_000
