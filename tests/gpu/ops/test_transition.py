"""The transition on a GPU: the kernel against the definition, and that it writes nothing else."""

from __future__ import annotations

import pytest
import torch

from app.ops import cuda
from app.ops.transition import advance, reference

DEVICE = torch.device("cuda:0")
MARK = 77


def case(depth, rows, survivors, dead=0.2):
    generator = torch.Generator(DEVICE).manual_seed(depth * 1000 + rows)
    sids = torch.randint(0, 1 << 40, (rows, depth - 1), device=DEVICE, generator=generator)
    index = torch.randint(0, 1 << 30, (rows, depth - 1), device=DEVICE, generator=generator, dtype=torch.int32)
    parent = torch.randint(0, rows, (survivors,), device=DEVICE, generator=generator)
    code = torch.randint(0, 1 << 17, (survivors,), device=DEVICE, generator=generator)
    tombstones = torch.rand(survivors, device=DEVICE, generator=generator) < dead
    return parent.masked_fill_(tombstones, -1), code.masked_fill_(tombstones, -1), sids, index


def same(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None)
        assert one is None or (one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two))


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize(("rows", "survivors"), [(1, 1), (1, 7), (3, 1), (32, 32), (300, 1000), (32768, 32768)])
def test_the_kernel_is_the_definition_and_changes_nothing_that_it_reads(depth, rows, survivors):
    given = case(depth, rows, survivors)
    kept = [one.clone() for one in given]
    same(advance(*given), reference.advance(*given))
    same(advance(*given[:3], None), reference.advance(*given[:3], None))
    same(given, kept)


def test_where_all_are_tombstones_they_are_children_of_row_0():
    parent, code, sids, index = case(3, 40, 100, dead=2)
    found = advance(parent, code, sids, index)
    assert found.sids.tolist() == [[*sids[0].tolist(), 0]] * 100
    assert found.ancestry.tolist() == [[*index[0].tolist(), 0]] * 100
    assert not found.codes.any()


def test_rows_that_lie_apart_are_taken():
    parent, code, sids, index = case(5, 90, 200)
    apart = [torch.stack((one, one), -1)[..., 0] for one in (parent, code, sids, index)]
    assert not any(one.is_contiguous() for one in apart)
    same(advance(*apart), reference.advance(parent, code, sids, index))


@pytest.mark.parametrize("depth", [1, 4])
def test_nothing_beside_the_output_is_written(depth):
    given, n, guard = case(depth, 50, 257), 257, 64
    zones = []
    for size, dtype in ((n * depth, torch.int64), (n, torch.int32), (n * depth, torch.int32)):
        zones.append(torch.full((size + 2 * guard,), MARK, dtype=dtype, device=DEVICE))
    into = [zone[guard:-guard] for zone in zones]
    kernel = cuda.load(cuda._OPS / "transition" / "kernel.cu", "advance", DEVICE)
    at = [one.data_ptr() for one in (*given, *into)]
    kernel.launch(-(-n * depth // 256), 256, *at, n, depth)
    expected = reference.advance(*given)
    for zone, two in zip(zones, (expected.sids, expected.codes, expected.ancestry), strict=True):
        assert (zone[:guard] == MARK).all()
        assert (zone[-guard:] == MARK).all()
        assert torch.equal(zone[guard:-guard], two.flatten())


def test_a_captured_launch_follows_what_it_reads():
    first, second = (case(4, 60, 128, dead) for dead in (0.0, 0.5))
    given = [one.clone() for one in first]
    advance(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = advance(*given)
    for one in (first, second):
        for mine, new in zip(given, one, strict=True):
            mine.copy_(new)
        graph.replay()
        same(found, reference.advance(*one))
