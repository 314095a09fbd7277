from __future__ import annotations

import pytest

from tests.policies.batches import CATALOGUE
from tests.policies.contracts import compiled, contract


def codes(steps: str, head: str = "widths: [64, 256, 512]\n") -> list[str]:
    _, found = compiled(f"widebeam: 1\n{head}steps:\n{steps}", contract(), CATALOGUE)
    return [one.rule.code for one in found if one.rule.code != "W004"]


def all_steps(*lines: str) -> str:
    return "  all:\n" + "".join(f"    {one}\n" for one in lines)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (all_steps("select: diverse(groups=4, penalty=0.4)"), []),
        (all_steps("select: diverse(groups=3, penalty=0.4)"), ["K005"]),
        (all_steps("select: diverse(groups=4, penalty=0)"), ["W002"]),
        ("  last:\n    select: diverse(groups=4, penalty=0.4)\n", ["K014"]),
        (
            "  all: {select: 'diverse(groups=4, penalty=1)'}\n  2: {select: 'diverse(groups=8, penalty=1)'}\n",
            ["K014"] * 2,
        ),
        (all_steps("select: diverse(groups=4, penalty=0.4)", "prune:", "  - within(3)"), []),
        (all_steps("normalize: valid", "select: stochastic()"), []),
        (all_steps("select: stochastic()"), ["K011"]),
        (all_steps("normalize: valid", "rank: score + prob", "select: stochastic()"), ["K012"]),
        (all_steps("normalize: valid", "rank: score", "select: stochastic()"), []),
        (all_steps("normalize: valid", "select: stochastic()", "prune:", "  - within(3)"), ["K014"]),
        (all_steps("select: explore(share=0.5)", "quota:", "  - floor(attr.cold, min=2)"), ["K014"]),
        (all_steps("select: explore(share=0.001)"), ["W002"]),
        ("  3:\n    quota:\n      - cap(token[1], max=16)\n      - cap(parent, max=4)\n", []),
        (
            "  3:\n    quota:\n      - cap(prefix[2], 4)\n      - cap(prefix[1], 16)\n      - cap(parent, 3)\n",
            [],
        ),
        ("  3:\n    quota:\n      - cap(token[2], max=16)\n      - cap(parent, max=4)\n", []),
        ("  3:\n    quota:\n      - cap(token[3], max=16)\n      - cap(parent, max=4)\n", ["K009"]),
        ("  3:\n    quota:\n      - cap(attr.studio, max=400)\n      - cap(parent, max=4)\n", []),
        ("  3:\n    quota:\n      - cap(attr.genre, max=400)\n      - cap(parent, max=4)\n", ["K009"]),
        ("  3:\n    quota:\n      - cap(attr.genre, max=100)\n", ["K006"]),
        ("  3:\n    quota:\n      - cap(prefix[3], max=1)\n", ["W002"]),
        ("  3:\n    quota:\n      - cap(parent, max=512)\n", ["W002"]),
        ("  3:\n    quota:\n      - floor(attr.cold, min=600)\n", ["K008"]),
        ("  3:\n    quota:\n      - floor(attr.genre, min=200)\n", ["K008"]),
        ("  3:\n    quota:\n      - floor(attr.cold, min=0)\n", ["W002"]),
        ("  3:\n    quota:\n      - floor(attr.cold, min=5)\n      - cap(attr.cold, max=4)\n", ["K008"]),
        ("  3:\n    quota:\n      - floor(attr.genre, min=5)\n      - cap(parent, max=4)\n", ["K009"]),
        (all_steps("quota:", "  - cap(token[3], max=8)"), ["K007"]),
        (all_steps("quota:", "  - cap(token[9], max=4)"), ["K007"]),
        (all_steps("logits: logit / 2"), ["K015"]),
        (all_steps("logits: logit", "normalize: full"), []),
        (all_steps("logits: logit / 2", "normalize: step"), []),
        (all_steps("logits: logit / 1", "normalize: step"), ["W002"]),
        (all_steps("keep:", "  - top_k(64)"), ["W002"]),
        (all_steps("keep:", "  - typical(0.9)"), ["W007"]),
        (all_steps("keep:", "  - typical(1)"), ["W002"]),
        (all_steps("keep:", "  - typical(0.9)", "rank: score + 0.5 * gumbel"), []),
        (all_steps("keep:", "  - typical(0.9)", "select: explore(share=0.5)"), []),
        (all_steps("normalize: valid", "keep:", "  - typical(0.9)", "select: stochastic()"), []),
        (all_steps("keep:", "  - top_p(1)", "  - min_p(0)", "  - top_k(63)"), ["W002"] * 2),
        (all_steps("rank: score + 0"), ["W002"]),
        (all_steps("rank: score + 6 * attr.age"), ["W005"]),
        (all_steps("rank: score + 5 * attr.age"), []),
    ],
)
def test_operators_are_held_against_the_deployment_and_each_other(steps, expected):
    assert codes(steps) == expected


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ("limit: 10\n  quota:\n    - floor(item.cold, min=11)\n", ["K008"]),
        ("quota:\n    - floor(item.cold, min=3)\n    - cap(item.cold, max=2)\n", ["K008"]),
        ("quota:\n    - floor(item.cold, min=3)\n  rerank: mmr()\n", ["K014"]),
        ("quota:\n    - cap(item.cold, max=2)\n  rerank: mmr()\n", []),
        ("quota:\n    - cap(parent, max=2)\n", ["T013"]),
        ("quota:\n    - cap(item.stock, max=2)\n", ["T013"]),
        ("rerank: mmr(by=items)\n", ["T013"]),
    ],
)
def test_the_list_too(final, expected):
    from app.policies.facts import Catalogue, Column

    catalogue = Catalogue((10**6,) * 3, (Column("item", "cold", "condition"), Column("item", "stock")))
    _, found = compiled(f"widebeam: 1\nfinal:\n  {final}", contract(), catalogue)
    assert [one.rule.code for one in found] == expected
