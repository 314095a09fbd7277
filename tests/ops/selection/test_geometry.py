"""Layouts of the selection kernels are decided on any machine; tests/gpu runs them."""

from itertools import product

import pytest
import torch

from app.ops.selection.geometry import MOST, STATIC, geometry, requests

H200, A100, RTX = 227 * 1024, 163 * 1024, 99 * 1024


def test_requests_count_rows_and_survivors():
    of = requests([0, 3, 3, 10], [4, 0, 9], torch.device("cpu"))
    assert (of.widest, of.most, of.rows, of.total) == (7, 9, 10, 13)
    assert of.out_start.tolist() == [0, 4, 4, 13]
    assert requests((0, 3, 3, 10), (4, 0, 9), torch.device("cpu")) is of
    assert requests([0], [], torch.device("cpu"))[3:] == (0, 0, 0, 0)


@pytest.mark.parametrize(("shared", "clusters"), [(H200, True), (A100, False), (RTX, False)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_layout_covers_its_rows_and_fits(shared, clusters, itemsize):
    shapes = product((1, 12, 32, 200), (1, 40, 512, 1024), (1, 300, 512, 1024), (1, 100, 8191, 8192, 65536))
    found = 0
    for count, widest, most, codes in shapes:
        shape = geometry(count, widest, most, codes, itemsize, clusters=clusters, shared=shared)
        if shape is None:
            continue
        found += 1
        size = 16 // itemsize if shape.small else shape.units * 512 // itemsize
        assert shape.chunks * size >= codes
        assert shape.chunks % 4 == 0
        assert shape.scores * shape.cluster >= widest * shape.chunks
        assert shape.scores % 4 == shape.places % 2 == shape.room % 2 == 0
        assert shape.places >= most // shape.cluster + MOST
        assert shape.room * shape.cluster >= most
        needed = 8 * (shape.places + shape.room) + 4 * (shape.scores + shape.lines) + 4 * widest
        assert needed <= shape.memory <= shared - STATIC
        assert shape.keys >= most
        assert shape.keys.bit_count() == 1
        assert 8 * shape.keys + 4 * most + 4 * widest <= shape.memory <= shared - STATIC
        assert shape.cluster == 1 or clusters
    assert found > 200


def test_the_shapes_of_the_figures_have_one():
    for requests_, width in product((4, 8, 16, 32), (512, 1024)):
        shape = geometry(requests_, width, width, 8192, 2, clusters=True, shared=H200)
        assert shape is not None
        assert not shape.small
        assert shape.chunks == 32


def test_few_rows_are_cut_into_small_chunks():
    shape = geometry(4, 1, 512, 8192, 2, clusters=True, shared=H200)
    assert shape is not None
    assert (shape.small, shape.chunks) == (True, 1024)


@pytest.mark.parametrize(
    ("widest", "most", "codes"), [(0, 1, 8), (1, 1, 0), (1 << 16, 1, 8), (1 << 15, 1, 1 << 17), (512, 60000, 8192)]
)
def test_what_does_not_fit_has_none(widest, most, codes):
    assert geometry(1, widest, most, codes, 2, clusters=True, shared=H200) is None
