from __future__ import annotations

import pytest

from tests.policies.contracts import compiled, places


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("widebeam: 1\nwidth: 1\n", [("S007", 2, 1)]),
        ("widebeam: 1\nwidths: [1, 2, 3]\nwidths: [1, 2, 3]\n", [("S003", 3, 1)]),
        ("extends: base\n", [("S009", 1, 1)]),
        ("widebeam: 1\nsteps:\n  all:\n", [("S010", 3, 3)]),
        ("widebeam: 1\nsteps:\n  all:\n    score:\n", [("S010", 4, 5)]),
        ("widebeam: 1\nsteps:\n  0: {score: logp}\n", [("S007", 3, 3)]),
        ("widebeam: 1\nsteps:\n  01: {score: logp}\n", [("S007", 3, 3)]),
        ("widebeam: 1\nsteps:\n  all:\n    maks: trie\n", [("S007", 4, 5)]),
        ("widebeam: 1\nsteps:\n  - all\n", [("S008", 3, 3)]),
        ("widebeam: 1\nsteps:\n  all:\n    select: [top()]\n", [("S008", 4, 13)]),
        ("widebeam: 1\nsteps:\n  all:\n    select: top\n", [("S014", 4, 13)]),
        ("widebeam: 1\nfinal:\n  dedupe: score\n", [("S011", 3, 11)]),
        ("widebeam: 1\nfinal:\n  limit: ten\n", [("S011", 3, 10)]),
        ("widebeam: 1\nparams:\n  a: {value: 1}\n", [("S009", 3, 3)]),
        ("widebeam: 1\nparams:\n  a: {range: [0, 1]}\n", [("S009", 3, 3)]),
        ("widebeam: 1\nparams:\n  a: {value: 1, range: [0]}\n", [("S011", 3, 24)]),
        ("widebeam: 1\nparams:\n  A: {value: 1, range: [0, 1]}\n", [("S011", 3, 3)]),
        ("widebeam: 1\nunderfill: maybe\n", [("S011", 2, 12)]),
        ("widebeam: 1\nsteps:\n  all:\n    score: >\n      parent\n      + logp\n", [("S018", 4, 12)]),
    ],
)
def test_faults_of_form_are_placed(text, expected):
    assert places(compiled(text)[1]) == expected


def test_more_parameters_than_the_limit_are_refused():
    many = "".join(f"  p{at}: {{value: 1, range: [0, 1]}}\n" for at in range(65))
    _, found = compiled(f"widebeam: 1\nparams:\n{many}")
    assert [one.rule.code for one in found.errors] == ["S012"]
