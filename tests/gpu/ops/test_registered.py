"""What torch.compile makes of the operators on a GPU: one node each, which gives the bits of the functions."""

from __future__ import annotations

import pytest
import torch

from app.ops import fp8, trie
from app.ops.product import product, product_into, product_onto
from app.ops.selection import Ranked, child_of, children_bits, count_bad, pack, select_logits, select_ranked, select_top
from app.ops.transition import advance
from tests.gpu import test_trie
from tests.gpu.ops import test_selection, test_transition
from tests.gpu.policies import test_generated
from tests.ops import nodes

DEVICE = torch.device("cuda:0")
WIDEST, CODES = 9, 64


def walk(first, code, node, keys, request):
    some = trie.children(first, code, node, WIDEST)
    gone = trie.contains(keys, some.node, request, code.shape[0] + 1)
    return some, gone, trie.dense(first, code, node, WIDEST, CODES)


def test_a_trie():
    first, code, node = test_trie.tree(torch.int32)
    request = torch.arange(len(node), device=DEVICE) // 100
    keys = request[::3] * (len(code) + 1) + node[::3].clamp(min=1)
    given = (first, code, node, keys.sort().values, request)
    assert nodes.compiled(walk, given, walk) == ["trie_children", "trie_contains", "trie_nodes"]
    nodes.check("trie_children", first, code, node, WIDEST, checks=nodes.GRAPHS)
    nodes.check("trie_nodes", first, code, node, WIDEST, CODES, checks=nodes.GRAPHS)


def test_a_transition():
    given = test_transition.case(3, 40, 100)
    assert nodes.compiled(advance, given, advance) == ["advance"]
    for index in (given[3], None):
        nodes.check("advance", *given[:3], index, checks=nodes.GRAPHS)


def around(first, code, node, legal, parent, wanted, bad, broken, score, start):
    request = torch.div(torch.arange(node.shape[0], device=node.device), 100, rounding_mode="floor")
    dead = torch.tensor([2, 8, 10, 13], device=node.device)
    bits = children_bits(first, code, node, WIDEST, CODES, dead=dead, request=request, nodes=code.shape[0] + 1)
    found = child_of(first, code, node, parent, wanted, WIDEST)
    return bits, pack(None, legal, CODES), found, count_bad(bad, [broken], score, start)


def test_what_surrounds_a_selection():
    first, code, node = test_trie.tree(torch.int64)
    n = len(node)
    legal, score = torch.rand(n, CODES, device=DEVICE) < 0.5, torch.randn(n, device=DEVICE)
    parent, wanted = torch.randint(-1, n, (77,), device=DEVICE), torch.randint(-1, CODES, (77,), device=DEVICE)
    bad, broken = torch.randint(0, 9, (2, n), dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, 100, 100, n], dtype=torch.int32, device=DEVICE)
    given = (first, code, node, legal, parent, wanted, bad, broken, score, start)
    assert nodes.compiled(around, given, around) == ["children_bits", "child_of", "pack_bits", "count_bad"]


def test_selections():
    x = test_selection.case("random", [20, 0, 3], 700, [40, 0, 5])
    slots = torch.zeros(23, 1, dtype=torch.int32, device=DEVICE)

    def both(logits, parent, order, slots):
        chosen = select_logits(logits, parent, order, x.row_start, x.keep, normalize="step", ancestry=slots)
        code = torch.arange(700, device=logits.device).expand(logits.shape)
        return chosen, select_top(logits.float(), code, order, 700, x.row_start, x.keep)

    given = (x.logits, x.parent, x.order, slots)
    assert nodes.compiled(both, given, both) == ["select_logits", "select_top"]
    plan = test_generated.EXACT["weighted"]
    own = plan.structure.steps[1].generated
    inputs = test_generated.inputs(plan, 23, 700, 700, dtype=torch.bfloat16)
    values = own.table(inputs, plan.structure.params)

    def ranked(logits, parent, order, values):
        how = Ranked(own.definitions, values)
        return select_ranked(logits, parent, order, x.row_start, x.keep, normalize="step", ranked=how)

    assert nodes.compiled(ranked, (x.logits, x.parent, x.order, values), ranked) == ["select_ranked"]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="8 bits are those of compute capability 9.0",
)
def test_8_bits_and_products():
    x, added = (torch.randn(3000, 192, device=DEVICE).bfloat16() for _ in range(2))
    weight, scale = fp8.quantise_rows(torch.randn(384, 192, device=DEVICE))
    norm, plain = torch.rand(192, device=DEVICE).bfloat16(), torch.randn(192, 192, device=DEVICE).bfloat16()

    def layer(x, added, weight, scale, norm, out):
        rows = fp8.quantise_normed(x, norm, 1e-6, added)
        inner = fp8.quantise_gated(*fp8.linear(rows, weight, scale).chunk(2, 1))
        fp8.linear_into(out[:, 8:392], fp8.quantise_rows(x), weight, scale)
        return inner, fp8.quantise_normed(x, norm, 1e-6)

    out = torch.zeros(3000, 400, device=DEVICE).bfloat16()
    names = ["fp8_summed", "fp8_linear", "fp8_gated", "fp8_rows", "fp8_linear_into", "fp8_normed"]
    assert nodes.compiled(layer, (x, added, weight, scale, norm, out), layer) == names

    def products(x, weight, out):
        product_into(out[:, 8:200], x, weight)
        return product_onto(product(x, weight), x, weight)

    assert nodes.compiled(products, (x, plain, out), products) == ["product_into", "product", "product_onto"]
