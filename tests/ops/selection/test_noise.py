"""`noise.cuh` as a C++ compiler has it: the numbers are those of `app/policies/noise.py`, bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from app.ops.selection import launch
from app.policies import choose, noise

COMPILER = shutil.which("c++")
BEFORE = """
#include <cmath>
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
using std::fmax;
using std::fmin;
#define __device__
#define __forceinline__ inline
"""
BEHIND = """
extern "C" void draw(const i64* by, const i64* code, i64 n, u32 stream, float* uniform, float* gumbel) {
    for (i64 i = 0; i < n; i++, by += 3) {
        const Drawing row = {(u32)by[0], (u32)(by[0] >> 32), (u32)by[1], (u32)(by[1] >> 32), (u32)by[2]};
        uniform[i] = uniform_of(row, (int)code[i], stream), gumbel[i] = gumbel_of(row, (int)code[i], stream);
    }
}
extern "C" void condition(const float* drawn, const float* top, const float* parent, i64 n, float* out) {
    for (i64 i = 0; i < n; i++) out[i] = conditioned(drawn[i], top[i], parent[i]);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("noise")
    text = launch.SOURCE.with_name("noise.cuh").read_text()
    (folder / "noise.cpp").write_text(BEFORE + text + BEHIND)
    command = [
        COMPILER,
        "-O2",
        "-std=c++17",
        "-w",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-o",
        "noise.so",
        "noise.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "noise.so"))


def at(values):
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.ctypes.data)


@pytest.mark.parametrize("stream", [noise.GUMBEL, noise.UNIFORM])
def test_a_kernel_draws_the_numbers_of_the_program(library, stream):
    rng, n, step = np.random.default_rng(stream), 200_000, 3
    seed, code = rng.integers(-(2**63), 2**63 - 1, n), rng.integers(0, 2**16, n)
    prefix = torch.from_numpy(rng.integers(0, 8192, (n, step - 1)))
    by = np.stack([seed, noise.prefix_hash(prefix).numpy(), np.full(n, step)], axis=1)
    uniform, gumbel = np.empty(n, np.float32), np.empty(n, np.float32)
    library.draw(at(by), at(code), ctypes.c_longlong(n), ctypes.c_uint(stream), at(uniform), at(gumbel))
    given = torch.from_numpy(seed), prefix, torch.from_numpy(code)[:, None], step, stream
    assert np.array_equal(uniform, noise.uniform(*given)[:, 0].numpy())
    assert np.array_equal(gumbel, noise.gumbel(*given)[:, 0].numpy())


def test_a_kernel_conditions_a_row_as_the_program_does(library):
    generator = torch.Generator().manual_seed(1)
    score, parent = torch.randn(200, 500, generator=generator) * 4 - 9, torch.randn(200, 1, generator=generator)
    drawn = noise.gumbel(
        torch.arange(200), torch.empty(200, 0, dtype=torch.int64), torch.arange(500).expand(200, 500), 1
    )
    raw = torch.add(score, drawn)
    top, limit = (one.expand(raw.shape).contiguous().numpy() for one in (raw.amax(1, keepdim=True), parent))
    out = np.empty(raw.shape, np.float32)
    library.condition(at(raw.numpy()), at(top), at(limit), ctypes.c_longlong(raw.numel()), at(out))
    assert np.array_equal(out, choose.stochastic(score, drawn, parent).numpy())
    best = np.take_along_axis(out, raw.argsort(dim=1).numpy(), axis=1)
    assert (np.diff(best, axis=1) >= 0).all()  # so a chunk's best rank is that of the largest number
    assert np.array_equal(best[:, -1:], parent.numpy())
