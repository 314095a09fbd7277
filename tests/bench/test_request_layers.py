"""The cost of a request by layer, on a small root."""

from __future__ import annotations

import asyncio

import pytest

from bench.request_layers import SHAPE, Effort, measure
from bench.rest import write_root


def test_layers_add_up_to_what_a_request_costs(tmp_path):
    shape = SHAPE._replace(context=8, items=500)
    cost = asyncio.run(measure(write_root(tmp_path / "root", shape, 4, "float32"), shape, Effort(2, 64, 6, 5)))
    together, behind, new = cost.pop("together"), cost.pop("front ends"), cost.pop("new ids")
    assert sum(cost.values()) == pytest.approx(together)
    assert min(cost["protocol"], cost["decode"], cost["encode"], together - cost["runtime"], behind, new) > 0
