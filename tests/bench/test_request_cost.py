"""The cost of a request by thread, on a small root."""

from __future__ import annotations

import pytest

from bench.request_cost import LOOP, SHAPE, Effort, measure
from bench.rest import write_root


@pytest.mark.slow
def test_what_requests_cost_the_loop_and_the_engine_is_told(tmp_path):
    shape = SHAPE._replace(context=8, items=500)
    cost = measure(write_root(tmp_path / "root", shape, 4, "float32"), shape, Effort(20, 4, 5))
    assert cost[LOOP] > 0
    assert cost["widebeam-engine"] > 0
