"""What was chosen, and what is noted while nothing was."""

from __future__ import annotations

import torch

from app.ops.product.lt import Algorithm
from app.ops.product.table import LEAST, Chosen, Key, Table

KEY = Key(0, torch.bfloat16, 896, 896, onto=False)
ALGORITHM = Algorithm(bytes(64), 0)


def test_an_algorithm_serves_from_the_rows_on_that_it_was_chosen_for():
    table = Table()
    assert table.find(KEY, 1 << 14) is None
    table.put(KEY, Chosen(ALGORITHM, 4096))
    assert [table.find(KEY, rows) for rows in (LEAST, 4095, 4096, 1 << 20)] == [None, None, ALGORITHM, ALGORITHM]
    assert table.find(KEY._replace(onto=True), 1 << 14) is None
    assert table.find(KEY._replace(device=1), 1 << 14) is None


def test_what_was_not_chosen_for_is_noted_with_its_most_rows_and_only_when_asked_for():
    table, other = Table(), KEY._replace(m=2688)
    table.find(KEY, 5000)
    table.put(other, Chosen(None))
    with table.noting() as wanted:
        for rows in (2000, 9000, 3000, LEAST - 1):
            table.find(KEY, rows)
        table.find(KEY._replace(k=1), LEAST - 1)
        assert table.find(other, 1 << 14) is None
    table.find(KEY, 1 << 14)
    assert wanted == {KEY: 9000}
