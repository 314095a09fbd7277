from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.compile import compile_policy
from app.policies.resolve import Library
from app.policies.source import Source
from tests.policies.batches import CATALOGUE
from tests.policies.contracts import BASE, compiled, contract, places, plan_of, sources

SHIPPED = sorted((Path(__file__).parents[2] / "policies").glob("*.yaml"))
EVERYTHING_WRONG = """\
widebeam: 1
extends: bass
beam_widht: 64
widths: [64, 512, 1024, 010]
params:
  temp: {value: 9, range: [0.1, 5]}
  unused: {value: 1, range: [0, 2]}
  broken: {value: x, range: [0, 2]}
steps:
  all:
    mask: !seen
    score: parent + logpp * param.temp + param.broken
    rank: |
      score
      + 0.3 * heads.ctr
    select: cap(token[1], 3)
  last:
    normalize: valids
    score: (parent
final:
  limit: -1
"""


def test_a_policy_becomes_a_plan_with_the_language_defaults():
    plan = plan_of("widebeam: 1\n")
    assert plan.widths == (256, 512, 512)
    assert (plan.limit, plan.per_sid, plan.underfill, plan.params) == (512, 1, "allow", ())
    assert all(step.children and step.uses == frozenset() for step in plan.structure.steps)
    assert [step.normalize for step in plan.structure.steps] == ["full"] * 3
    assert plan.trie
    first = plan.resolved["steps"][0]
    assert (first["score"], first["rank"], first["select"]) == ("parent + logp", "score", "top()")


def test_everything_that_the_first_slice_knows_reaches_the_plan():
    plan = plan_of(
        "widebeam: 1\nwidths: [10, 20, 30]\nunderfill: error\n"
        "params:\n  b: {value: 0.5, range: [0.1, 1]}\n  a: {value: 2, range: [1, 3]}\n"
        "steps:\n  all: {normalize: valid, mask: trie and not seen}\n"
        "  2: {score: parent + param.b * logp - param.a}\n  last: {mask: not seen, rank: 'score - where(seen, 1, 0)'}\n"
        "final: {expand: sid(max_items=3), limit: 12}\n"
    )
    assert (plan.widths, plan.limit, plan.per_sid, plan.underfill) == ((10, 20, 30), 12, 3, "error")
    assert (plan.structure.params, plan.params) == (("a", "b"), (2.0, 0.5))
    assert [step.children for step in plan.structure.steps] == [True, True, False]
    assert [step.uses for step in plan.structure.steps] == [frozenset({"seen"})] * 3
    assert [step.precut for step in plan.structure.steps] == ["L", "L", "E"]
    assert not plan.trie


@pytest.mark.parametrize(
    ("mask", "children", "uses"),
    [
        ("trie", True, set()),
        ("trie and not seen", True, {"seen"}),
        ("(trie and not seen) and step > 0", True, {"seen"}),
        ("trie or seen", False, {"trie", "seen"}),
        ("not trie", False, {"trie"}),
        ("trie and (trie or seen)", True, {"seen"}),
        ("none", False, set()),
        ("step > 0", False, set()),
    ],
)
def test_candidates_are_children_where_the_trie_is_a_conjunct_of_the_mask(mask, children, uses):
    step = plan_of(f"widebeam: 1\nsteps: {{all: {{mask: {mask}}}}}\n").structure.steps[0]
    assert step.children == children
    assert step.uses == uses


@pytest.mark.parametrize(
    ("score", "rank", "precut"),
    [
        ("parent + logp", "score", "L"),
        ("parent + 0.8 * logp", "score - param.pos", "L"),
        ("parent + logp / param.pos + logp", "score", "L"),
        ("parent + logp * param.any", "score", "E"),
        ("parent - logp", "score", "E"),
        ("parent + prob", "score", "E"),
        ("parent", "score", "R"),
        ("parent + logp", "parent ** 2 + step", "R"),
        ("parent + logp", "score * 2 + parent", "L"),
        ("parent + logp", "where(seen, score, 0)", "E"),
        ("parent + logp", "max(score, -10)", "E"),
    ],
)
def test_the_precut_class_follows_from_how_the_rank_depends_on_the_candidate(score, rank, precut):
    params = "params:\n  pos: {value: 1, range: [0.1, 2]}\n  any: {value: 1, range: [0, 2]}\n"
    plan = plan_of(f"widebeam: 1\n{params}steps:\n  all:\n    score: {score}\n    rank: {rank}\n")
    assert {step.precut for step in plan.structure.steps} == {precut}


def test_all_faults_of_a_file_come_in_one_run_sorted_by_position():
    plan, found = compiled(EVERYTHING_WRONG)
    assert plan is None
    assert places(found) == [
        ("X002", 2, 10),
        ("S007", 3, 1),
        ("S011", 4, 25),
        ("S013", 6, 17),
        ("S011", 8, 19),
        ("S005", 11, 11),
        ("T001", 12, 21),
        ("T001", 15, 15),
        ("P002", 16, 13),
        ("S011", 18, 16),
        ("S014", 19, 12),
        ("S011", 21, 10),
    ]


def test_a_fault_of_the_parent_is_shown_in_the_parent():
    plan, found = compiled("widebeam: 1\nextends: mother\n", mother="widebeam: 1\nsteps: {all: {score: x}}\n")
    assert plan is None
    assert [(one.span.file, one.span.line, one.span.col) for one in found] == [("policies/mother.yaml", 2, 22)]


def test_an_abstract_policy_gives_no_plan_and_no_fault():
    assert [compiled("widebeam: 1\nabstract: true\n")[0], len(compiled("widebeam: 1\nabstract: true\n")[1])] == [
        None,
        0,
    ]


def test_what_is_not_compiled_is_refused_and_never_ignored():
    for text in (
        "steps: {all: {select: 'dpp(pool=4, strength=0.6)'}}",
        "steps: {all: {select: 'diverse(groups=4, penalty=0.4, history=0.5)'}}",
    ):
        plan, found = compiled(f"widebeam: 1\n{text}\n")
        assert plan is None, text
        assert {one.rule.code for one in found.errors} == {"P003"}, (text, found.text())
        assert "not available in this version" in found.errors[0].message


def test_columns_that_the_deployment_does_not_declare_are_refused():
    for text in (
        "steps: {all: {rank: score + head.ctr}}",
        "steps: {all: {rank: score + prior.popularity}}",
        "steps: {all: {mask: trie and attr.fresh}}",
        "steps: {all: {mask: trie and not blocked.ads}}",
        "steps: {all: {rank: score + user.age}}",
        "steps: {all: {mask: 'trie and ctx.country in [\"BR\"]'}}",
        "steps: {all: {quota: ['floor(attr.cold, min=1)']}}",
        "final: {mask: item.stock > 0}",
        "final: {dedupe: item.author}",
        "final: {quota: ['cap(item.author, max=1)']}",
    ):
        plan, found = compiled(f"widebeam: 1\n{text}\n")
        assert plan is None, text
        assert {one.rule.code for one in found.errors} == {"T002"}, (text, found.text())


def test_programs_say_which_inputs_they_read():
    def uses(*lines: str, t: int = 2) -> frozenset[str]:
        text = "widebeam: 1\nsteps:\n  all:\n    normalize: valid\n" + "".join(f"    {one}\n" for one in lines)
        return plan_of(text, catalogue=CATALOGUE).structure.steps[t - 1].uses

    assert uses() == frozenset()
    assert uses("prune:", "  - within(3)") == {"request"}
    assert uses("quota:", "  - cap(token[1], max=3)") == {"request", "prefix"}
    assert uses("quota:", "  - floor(attr.cold, min=3)") == {"request", "attr.cold"}
    assert uses("rank: score + gumbel") == {"seed", "prefix"}
    assert uses("select: stochastic()") == {"request", "seed", "prefix", "carry"}
    assert uses("select: diverse(groups=4, penalty=0.5)") == {"request", "carry"}
    assert uses("rank: score + where(boosted.campaign, user.age, 0)") == {"boosted.campaign", "user.age"}
    assert uses('mask: trie and attr.genre == "drama"') == {"attr.genre"}
    assert uses('rank: where(ctx.country in ["BR", "MX"], score, parent)') == {'ctx.country in ["BR", "MX"]'}


@pytest.mark.parametrize(
    "text",
    [
        "widebeam: 1\nsteps:\n",
        "widebeam: 1\nfinal: null\n",
        "widebeam: 1\nwidths: []\n",
        "widebeam: 1\nwidths: 64\n",
        "widebeam: one\n",
        "widebeam: 1\nextends: 7up\n",
        "widebeam: 1\nextends: [base]\n",
        "widebeam: 1\nsteps: {all: top()}\n",
        "widebeam: 1\nsteps: {frist: {select: top()}}\n",
        "widebeam: 1\nabstract: no\n",
        "widebeam: 1\nabout: [x]\n",
        "widebeam: 1\nparams: {A: {value: 1, range: [0, 2]}}\n",
        "widebeam: 1\nparams: {a: {value: 1, range: [2, 0]}}\n",
        "widebeam: 1\nparams: {a: 1}\n",
        "[widebeam]\n",
        "widebeam\n",
        *(f"widebeam: 1\nwidths: [{w}, 2, 2]\n" for w in
          ("0", "-1", "1.5", "true", '"64"', "1000000000", "NaN", ".inf", "1e3", "NO", "0x10", "1_0", "~", "[1]")),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_refused(text):
    plan, found = compiled(text)
    assert plan is None
    assert found.errors, text


def test_crlf_and_comments_change_nothing():
    text = "widebeam: 1\nsteps:\n  all:\n    score: parent + logp # plain\n"
    assert plan_of(text.replace("\n", "\r\n")).policy_id == plan_of(text).policy_id


@pytest.mark.parametrize("path", [one for one in SHIPPED if one.name != "traffic.yaml"], ids=lambda path: path.stem)
def test_shipped_policies_compile_without_a_word(path):
    library = {one.stem: Source(f"policies/{one.name}", one.read_bytes()) for one in SHIPPED}
    plan, found = compile_policy(path.stem, library, contract(widths=(512, 512, 512)))
    assert plan is not None
    assert [one for one in found if one.rule.severity != "note"] == [], found.text()


def test_two_hundred_policies_over_one_parent_are_two_hundred_policies():
    texts = {
        f"p{at}": f"widebeam: 1\nextends: base\nsteps: {{all: {{score: parent + {at + 1} * logp}}}}\n"
        for at in range(200)
    }
    library = Library(sources(BASE, name="base", **texts))
    ids = {compile_policy(name, library, contract())[0].policy_id for name in texts}
    assert len(ids) == 200


# ---- fuzzing -------------------------------------------------------------------------------------------------------

GOOD = [EVERYTHING_WRONG, *(path.read_text() for path in SHIPPED)]
PIECES = [
    "[", "]", "{", "}", ": ", "\n", "  ", "\t", "- ", "#", "'", '"', "|", ">", "!", "&a ", "*a", "<<: ", "é", "\x00",
    "0x1", "1e999", "none", "~", "%", "---\n", "lambda", "**", "(", ")", ",", "\ufeff", "\u2028", "\\",
]  # fmt: skip


def survives(data: bytes) -> None:
    start = time.thread_time()
    plan, found = compiled(data)
    text = found.text()
    took = time.thread_time() - start
    assert (plan is None) == bool(found.errors) or b"abstract" in data
    assert text.isprintable() or "\n" in text
    for one in found:
        assert one.span.line >= 1 and one.span.end > one.span.col >= 1
    assert took < 10, took  # a bound against blow-ups; the speed is measured elsewhere


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_diagnostics_and_never_a_crash(data):
    survives(data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(GOOD), st.integers(0, 2**32 - 1))
def test_random_edits_of_good_files_give_a_plan_or_diagnostics(text, seed):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 5)):
        at, to = rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice([*PIECES, text[min(at, to) : max(at, to)][:40]]) + text[at + rng.randint(0, 4) :]
    survives(text.encode("utf-8", "replace"))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="score parnt+-*/()[]<>=.,0129e\"'andotwhi", max_size=60))
def test_random_expressions_give_a_plan_or_diagnostics(text):
    survives(f"widebeam: 1\nsteps:\n  all:\n    score: {text}\n    rank: |\n      {text}\n".encode())
