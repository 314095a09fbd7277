from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.policies.compile import compile_policy
from app.policies.format import fmt
from app.policies.source import Source
from tests.policies.contracts import contract, sources
from tests.policies.test_compile import GOOD, PIECES

UGLY = """\
# the top comment
widebeam: 1{blanks}
extends: base\r
steps:
  all:
    score: parent+( logp*0.50 )  # why half
    rank: |
      score   # kept
      - 0.10
    mask: 'trie  and  not (seen)'
  last: {select: top( ), normalize: full}


""".replace("{blanks}", "   ")
NEAT = """\
# the top comment
widebeam: 1
extends: base
steps:
  all:
    score: parent + logp * 0.5  # why half
    rank: |
      score   # kept
      - 0.10
    mask: 'trie and not seen'
  last: {select: top(), normalize: full}
"""


def test_values_get_their_canonical_text_and_comments_stay():
    assert fmt(Source("x", UGLY.encode())) == NEAT


def test_formatting_twice_is_formatting_once_and_keeps_the_policy():
    assert fmt(Source("x", NEAT.encode())) == NEAT
    before = compile_policy("feed", sources(UGLY), contract())[0]
    after = compile_policy("feed", sources(NEAT), contract())[0]
    assert before is not None and after is not None
    assert before.policy_id == after.policy_id


@pytest.mark.parametrize("text", ["a: [", "a: &x 1\n", "", "\ufeffa: 1\n"])
def test_a_file_that_cannot_be_read_is_left_alone(text):
    assert fmt(Source("x", text.encode())) is None


def test_faulty_expressions_are_left_as_they_are():
    text = "widebeam: 1\nsteps:\n  all:\n    score: parent +\n    mask: trie  and seen\n"
    assert fmt(Source("x", text.encode())) == text.replace("  and", " and")


def test_shipped_policies_are_formatted():
    for path in (Path(__file__).parents[2] / "policies").glob("*.yaml"):
        assert fmt(Source(path.name, path.read_bytes())) == path.read_text()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([UGLY, NEAT, *GOOD]), st.lists(st.tuples(st.integers(0, 400), st.sampled_from(PIECES)), max_size=3)
)
def test_formatting_is_idempotent_and_never_changes_an_id(text, edits):
    for at, piece in edits:
        text = text[: at % (len(text) + 1)] + piece + text[at % (len(text) + 1) :]
    once = fmt(Source("x", text.encode("utf-8", "replace")))
    if once is None:
        return
    assert fmt(Source("x", once.encode())) == once
    before, _ = compile_policy("feed", sources(text.encode("utf-8", "replace")), contract())
    after, _ = compile_policy("feed", sources(once), contract())
    assert (before and before.policy_id) == (after and after.policy_id)
