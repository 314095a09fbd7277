"""The selection's operators, and those around it, as nodes of torch's graphs, on a device without our kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from app.ops import cuda
from app.ops.cuda import Kernel
from app.ops.selection import (
    Ranked,
    child_of,
    children_bits,
    count_bad,
    launch,
    pack,
    reference,
    select_logits,
    select_ranked,
    select_top,
)
from app.ops.selection.geometry import requests
from tests.ops import nodes

CODES, WIDEST = 38, 5
START, KEEP = (0, 3, 3, 8), (4, 2, 9)
ROWS = Dim("rows", min=1, max=1 << 20)


def tree():
    """first, code, node [8]"""
    first = torch.tensor([0, 3, 3, 8, 8, 8, 8, 8, 8], dtype=torch.int32)
    code = torch.tensor([1, 5, 9, 0, 2, 5, 6, 37], dtype=torch.int32)
    return first, code, torch.tensor([0, 1, 2, -1, 2, 0, 1, 2])


def candidates():
    """code [8, 5], legal [8, 5]"""
    made = torch.Generator().manual_seed(1)
    code = torch.stack([torch.randperm(CODES, generator=made)[:WIDEST].sort().values for _ in range(8)])
    return code, torch.rand(code.shape, generator=made) < 0.6


def step():
    """logits [8, CODES], parent [8], order [8]"""
    made = torch.Generator().manual_seed(2)
    order = torch.cat([torch.randperm(width, generator=made) for width in (3, 0, 5)])
    logits, parent = torch.randn(8, CODES, generator=made), torch.randn(8, generator=made)
    logits[1, 2], logits[4, 5], parent[6] = torch.nan, torch.inf, -torch.inf
    return logits, parent, order


def wrong():
    """bad [8], broken [2, 8], score [8], row_start"""
    made = torch.Generator().manual_seed(3)
    bad, *broken = torch.randint(0, 9, (3, 8), generator=made, dtype=torch.int32)
    score = step()[1]
    return bad, broken, score, torch.tensor(START, dtype=torch.int32)


@pytest.mark.parametrize("rows", [0, 8])
def test_torch_finds_them_to_be_what_they_say(rows):
    first, edges, node = tree()
    code, legal = (one[:rows] for one in candidates())
    nodes.check("pack_bits", legal, code, CODES)
    nodes.check("pack_bits", legal, None, 70)
    request, dead = torch.arange(rows) // 4, torch.tensor([2, 8, 10, 13])
    for keys in (dead, dead[:0]):
        nodes.check("children_bits", first, edges, node[:rows], WIDEST, CODES, keys, request, 9)
    parent, wanted = torch.tensor([3, 0, -1, 7])[:rows], torch.tensor([5, 9, 1, 37])[:rows]
    nodes.check("child_of", first, edges, node, parent, wanted, WIDEST)
    bad, broken, score, start = wrong()
    for counted, lists in ((bad, broken), (bad, broken[:1]), (None, broken), (bad, [])):
        nodes.check("count_bad", score, counted, lists, start)


def test_torch_finds_selections_to_be_what_they_say():
    logits, parent, order = step()
    of = requests(START, KEEP, logits.device)
    sizes = (*of[:3], of.widest, of.most, of.total)
    nodes.check("select_top", logits.nan_to_num(posinf=0), order, *sizes)
    mask, norm, slots = pack(*candidates(), CODES), torch.randn(8), order.int().unsqueeze(1)
    for normalize in ("step", "valid", "given", "none"):
        nodes.check("select_logits", logits, mask, norm, parent, order, slots, *sizes, normalize)
    nodes.check("select_logits", logits, None, None, parent, order, None, *sizes, "step")


def around(first, edges, node, code, legal, parent, wanted, bad, one, other, score, start):
    """What a step asks for beside its selection."""
    request, dead = torch.div(torch.arange(node.shape[0]), 4, rounding_mode="floor"), torch.tensor([2, 8, 10, 13])
    bits = children_bits(first, edges, node, WIDEST, CODES, dead=dead, request=request, nodes=edges.shape[0] + 1)
    found = child_of(first, edges, node, parent, wanted, WIDEST)
    return pack(code, legal, CODES) | bits, found, count_bad(bad, [one, other], score, start)


def test_an_export_and_a_compiled_graph_have_one_node_each():
    bad, broken, score, start = wrong()
    parent, wanted = torch.tensor([3, 0, -1, 7]), torch.tensor([5, 9, 1, 37])
    given = (*tree(), *candidates(), parent, wanted, bad, *broken, score, start)
    rows, many = {0: ROWS}, {0: Dim("many", min=1, max=1 << 20)}
    dynamic = (None, None, rows, rows, rows, many, many, rows, rows, rows, rows, None)
    names = ["children_bits", "child_of", "pack_bits", "count_bad"]
    assert nodes.exported(around, given, dynamic, around) == names
    assert nodes.compiled(around, given, around) == names


def both(logits, parent, order, slots):
    """The best by the logits, and by the logits themselves as ranks."""
    chosen = select_logits(logits, parent, order, START, KEEP, normalize="step", ancestry=slots)
    code = torch.arange(CODES).expand(logits.shape)
    return chosen, select_top(logits.nan_to_num(posinf=0), code, order, CODES, START, KEEP)


def both_defined(logits, parent, order, slots):
    chosen = reference.select_logits(logits, None, None, parent, order, slots, START, KEEP, "step")
    code = torch.arange(CODES).expand(logits.shape)
    return chosen, reference.select_top(logits.nan_to_num(posinf=0), code, order, CODES, START, KEEP)


def test_selections_are_one_node_each_and_their_requests_constants_of_the_graph():
    logits, parent, order = step()
    given = (logits, parent, order, order.int().unsqueeze(1))
    assert nodes.exported(both, given, (None,) * 4, both_defined) == ["select_logits", "select_top"]
    assert nodes.compiled(both, given, both_defined) == ["select_logits", "select_top"]
    kept = requests(START, KEEP, logits.device)
    assert all(type(one) is torch.Tensor for one in kept[:3]), "a tracer's are not kept for others"


@pytest.fixture
def launched(monkeypatch):
    """Kernels that a GPU would be given; they compute nothing here."""
    seen = []
    monkeypatch.setattr(cuda, "unfit", lambda _: None)
    monkeypatch.setattr(cuda, "entry", lambda _, name, __, *, memory=0: Kernel(name, 0, memory))
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *_, early=False: seen.append(kernel.function))
    monkeypatch.setattr(launch, "limits", lambda _: (True, 227 << 10))
    return seen


def ranked(logits, parent, order, norm, values, column, noise, *, wanted=True, normalize="given"):
    how = Ranked("definitions", values, (column,), noise, wanted)
    return select_ranked(logits, parent, order, START, KEEP, normalize=normalize, ranked=how, mask=None, norm=norm)


def operands():
    return (*step(), torch.randn(8), torch.randn(8, 2), torch.randn(8, CODES), torch.zeros(8, 3, dtype=torch.int64))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_selection_by_expressions_has_the_shapes_of_what_is_launched(launched, wanted):
    given = operands()
    real = ranked(*given, wanted=wanted)
    assert launched == ["rank_scan", "tail"]
    with FakeTensorMode() as mode:
        fake = ranked(*(mode.from_tensor(one) for one in given), wanted=wanted)
    assert launched == ["rank_scan", "tail"], "no data, no launch"
    for one, two in zip((*real[0], *real[1:]), (*fake[0], *fake[1:]), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride())


def test_a_selection_by_expressions_is_one_node_and_a_cpu_says_that_it_computes_none():
    logits, *rest = operands()
    names: list[str] = []

    def keep(module, _):
        names.extend(nodes.ours(module.graph))
        return module.forward

    torch.compiler.reset()
    with pytest.raises(ValueError, match=r"select_ranked: cpu is no NVIDIA GPU.*by the policy's program"):
        torch.compile(ranked, backend=keep, fullgraph=True)(logits, *rest)
    assert names == ["select_ranked"]
    with pytest.raises(ValueError, match="select_ranked: cpu is no NVIDIA GPU"):
        ranked(logits, *rest)


@pytest.mark.parametrize("normalize", ["step", "valid", "none"])
def test_a_log_sum_exp_that_is_not_read_is_not_written_to(launched, monkeypatch, normalize):
    given, seen = operands(), []
    right = launch.select
    monkeypatch.setattr(launch, "select", lambda logits, scores, *x, **how: seen.append(scores) or right(logits, scores, *x, **how))  # noqa: E501  # fmt: skip
    ranked(*given, normalize=normalize)
    select_logits(*given[:3], START, KEEP, normalize=normalize, norm=given[3])
    assert [one.norm for one in seen] == [None, None]
    ranked(*given)
    select_logits(*given[:3], START, KEEP, normalize="given", norm=given[3])
    assert all(one.norm is given[3] for one in seen[2:])
