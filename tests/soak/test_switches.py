"""Pairs that are switched to and fro under many clients, and an operator who does anything in any order (`make soak`).

SOAK_SWITCHES says how many switches, SOAK_ACTS how many things each operator does.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.live_support import live_server
from tests.runtime.test_cutover import Slow, world
from tests.runtime.test_switches import operated, pairs

SWITCHES = int(os.environ.get("SOAK_SWITCHES", "21"))
ACTS = int(os.environ.get("SOAK_ACTS", "100"))
CLIENTS = 16


@pytest.mark.timeout(1800)
async def test_switches_under_sixteen_clients_mix_in_no_answer(tmp_path, monkeypatch):
    answers, switches = await pairs(world(tmp_path), Slow(monkeypatch, "v98"), SWITCHES // 3, CLIENTS)
    sys.stdout.write(f"switches: {switches}, {answers} answers\n")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_operators_who_do_anything_in_any_order_harm_no_answer(tmp_path, seed):
    root = world(tmp_path)
    async with live_server(root, log=tmp_path / "log") as server:
        load, operator = await operated(root, server, seed, ACTS)
        sys.stdout.write(f"operator {seed}: {load.answers} answers, {operator.did}\n")
