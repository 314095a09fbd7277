"""cuBLASLt's calls: against a library that writes down what it is asked, and the real one where torch has it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from app.ops.product import lt
from app.ops.product.lt import Algorithm, Failed, Product, Shape

SHAPE = Shape(0, torch.bfloat16, 2000, 896, 448, 512, 448, 2688)
EIGHT = SHAPE._replace(dtype=torch.float8_e4m3fn)


class Library:
    """Every descriptor is a number; attributes and products are kept."""

    def __init__(self):
        self.alive, self.made, self.layouts, self.attributes, self.products = set(), 0, [], {}, []
        self.refuses = 0

    def create(self, place):
        self.made += 1
        place._obj.value = self.made
        self.alive.add(self.made)
        return 0

    def destroy(self, what):
        self.alive.remove(what.value)
        return 0

    def cublasLtMatmulDescCreate(self, place, compute, scale):
        assert (compute.value, scale.value) == (68, 0)
        return self.create(place)

    def cublasLtMatrixLayoutCreate(self, place, *what):
        self.layouts.append(what)
        return self.create(place)

    def cublasLtMatmulPreferenceCreate(self, place):
        return self.create(place)

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = destroy

    def cublasLtMatmulDescSetAttribute(self, _desc, attribute, value, size):
        assert ctypes.sizeof(value._obj) == size
        self.attributes[attribute] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, _what, attribute, value, size):
        assert ctypes.sizeof(value._obj) == size
        self.attributes["preference", attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *asked):
        found, count = asked[-2:]
        found[0].algo.data[0], found[0].workspace = 11, 0
        found[1].state = 15  # not for this one
        found[2].algo.data[0], found[2].workspace = 33, 4096
        count._obj.value = 3
        return 0

    def cublasLtMatmul(self, *asked):
        scales = self.attributes.get(17), self.attributes.get(18)
        self.products.append((asked, scales))
        return self.refuses


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(lt, "_handle", lambda *_: ctypes.c_void_p(5))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return Library()


def test_rows_and_matrix_are_described_as_columns(library):
    made = Product(library, SHAPE)
    assert library.layouts == [(14, 448, 896, 448), (14, 448, 2000, 512), (14, 896, 2000, 2688)]
    assert library.attributes == {3: 1}
    Product(library, EIGHT)
    assert library.layouts[3:] == [(28, 448, 896, 448), (28, 448, 2000, 512), (14, 896, 2000, 2688)]
    assert library.attributes == {3: 1, 25: 1, 31: 3, 32: 3}
    del made


def test_descriptors_go_with_their_product(library):
    made = Product(library, SHAPE)
    made.algorithms(0)
    assert len(library.alive) == 5
    del made
    assert not library.alive


def test_algorithms_are_those_that_serve_with_the_workspace_that_they_need(library):
    made = Product(library, SHAPE)
    first, second = made.algorithms(1 << 20)
    assert (first.data[0], first.workspace, len(first.data)) == (11, 0, 64)
    assert (second.data[0], second.workspace) == (33, 4096)
    wanted = {1: 1 << 20, 3: 0, 5: 16, 6: 16, 7: 16, 8: 16}
    assert {key[1]: value for key, value in library.attributes.items() if isinstance(key, tuple)} == wanted


def test_an_algorithm_that_is_refused_is_not_asked_again_and_what_breaks_is_said(library):
    made, one, other = Product(library, SHAPE), Algorithm(bytes([1]), 0), Algorithm(bytes([2]), 0)
    assert made.launched(one, 100, 200, 300, onto=False)
    library.refuses = 15
    assert not made.launched(other, 100, 200, 300, onto=False)
    library.refuses = 0
    assert not made.launched(other, 100, 200, 300, onto=False)
    assert made.launched(one, 100, 200, 300, onto=True)
    assert [asked[12] for asked, _ in library.products] == [bytes([1]), bytes([2]), bytes([1])]
    library.refuses = 14
    with pytest.raises(Failed, match="status 14"):
        made.launched(one, 100, 200, 300, onto=False)


@pytest.mark.parametrize("onto", [False, True])
def test_a_product_gives_the_operands_in_their_places(library, onto):
    made = Product(library, SHAPE)
    made.launch(Algorithm(bytes([7]), 0), 100, 200, 300, onto=onto)
    [(asked, _)] = library.products
    handle, desc, alpha, a, a_is, b, b_is, beta, c, c_is, d, d_is, algorithm, space, size, stream = asked
    assert (handle.value, desc.value, a_is.value, b_is.value, c_is.value, d_is.value) == (5, 1, 2, 3, 4, 4)
    assert (a, b, c, d) == (200, 100, 300, 300)
    assert (alpha._obj.value, beta._obj.value) == (1.0, float(onto))
    assert (algorithm, space, size, stream) == (bytes([7]), None, 0, 70)
    library.refuses = 13
    with pytest.raises(Failed, match="status 13"):
        made.launch(Algorithm(bytes([7]), 0), 100, 200, 300, onto=onto)


def test_in_8_bits_each_product_has_its_own_scales(library):
    made = Product(library, EIGHT)
    for rows, channels in ((1000, 2000), (3000, 4000)):
        made.algorithms(1 << 20)
        made.launch(Algorithm(bytes([7]), 0), 100, 200, 300, onto=True, scales=(rows, channels))
    assert [scales for _, scales in library.products] == [(2000, 1000), (4000, 3000)]


@pytest.mark.skipif(lt.library() is None, reason="torch has no cuBLASLt here")
def test_the_real_library_takes_the_descriptions():
    assert lt.version() > 0
    for shape in (SHAPE, EIGHT, SHAPE._replace(dtype=torch.float16)):
        assert lt.product(shape) is lt.product(shape)


def test_without_a_library_there_is_no_version_and_no_product(monkeypatch):
    monkeypatch.setattr(lt, "library", lambda: None)
    assert lt.version() == 0
    with pytest.raises(Failed):
        lt.product(SHAPE._replace(n=3))
    with pytest.raises(OSError, match="libnone"):
        lt.opened("libnone.so.1")
