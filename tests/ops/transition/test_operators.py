"""The transition as a node of torch's graphs, on a device without our kernel."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from app.ops.transition import advance, reference
from tests.ops import nodes


def survivors(rows=9, many=14, depth=3):
    made = torch.Generator().manual_seed(rows)
    parent = torch.randint(-1, rows, (many,), generator=made)
    code = torch.randint(0, 9000, (many,), generator=made).masked_fill(parent < 0, -1)
    sids = torch.randint(0, 9000, (rows, depth - 1), generator=made)
    return parent, code, sids, torch.randint(0, rows, (rows, depth - 1), generator=made, dtype=torch.int32)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_node_is_the_definition_and_without_an_index_gives_none(depth):
    given = survivors(depth=depth)
    expected = reference.advance(*given)
    found = torch.ops.widebeam.advance(*given)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    made, codes, index = torch.ops.widebeam.advance(*given[:3], None)
    assert torch.equal(made, expected.sids)
    assert torch.equal(codes, expected.codes)
    assert (index.shape, index.dtype) == ((14, 0), torch.int32)


@pytest.mark.parametrize("many", [0, 1, 14])
def test_torch_finds_it_to_be_what_it_says(many):
    given = survivors(many=many)
    nodes.check("advance", *given)
    nodes.check("advance", *given[:3], None)


def two_steps(parent, code, sids, index):
    first = advance(parent, code, sids, index)
    assert first.ancestry is not None
    return first, advance(parent % 3, first.codes.long(), first.sids, None)


def two_defined(parent, code, sids, index):
    first = reference.advance(parent, code, sids, index)
    return first, reference.advance(parent % 3, first.codes.long(), first.sids, None)


def test_an_export_and_a_compiled_graph_have_one_node_a_step():
    rows, many = (Dim(name, min=1, max=1 << 20) for name in ("rows", "many"))
    dynamic = ({0: many}, {0: many}, {0: rows}, {0: rows})
    assert nodes.exported(two_steps, survivors(), dynamic, two_defined) == ["advance", "advance"]
    assert nodes.compiled(two_steps, survivors(), two_defined) == ["advance", "advance"]
