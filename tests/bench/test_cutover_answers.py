"""The watermarks of the cutover bench: answers that do not fit the versions that they name are counted."""

from __future__ import annotations

import numpy as np
import pytest

from bench._cutover_answers import FEWEST, mixed
from bench._cutover_client import Answer, Item, Timings, Versions, wrong_items
from bench._cutover_names import LETTERS, content_of, item_name, version_name
from bench._cutover_root import TOY, catalogue

MIDDLES = {"a": (-8.0, -12.0), "b": (-8.1, -14.0), "c": (-16.0, -27.0)}
"""Best and last scores of a request under each content; the best alone tells little between the first two."""


def named(**changed):
    one = {"snapshot": "s1", "weights": "v1", "vocab": "v1", "policy": "base", "policy_id": "p", "contract": "c"}
    return {**one, **changed}


def part(claims, scores, vocab="v1", names=(), wrong=0):
    """Answers to four requests in turn; claims: the version of weights that each names."""
    n = len(claims)
    columns = {
        "body": [at % 4 for at in range(n)], "weights": claims, "vocab": [vocab] * n, "status": [200] * n,
        "score": [float(one[0]) for one in scores], "last": [float(one[1]) for one in scores],
        "mixed": [1] * wrong + [0] * (n - wrong),
    }  # fmt: skip
    return {"clients": [{"columns": columns, "named": [named(), *names]}, {"columns": {}, "named": []}]}


def noisy(letters, seed=1):
    """Scores of contents as 16 bit makes them: nearly always the same number, far off once in a thousand answers."""
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.02, (len(letters), 2)) + 0.6 * (random.random((len(letters), 1)) < 0.001)
    return np.array([MIDDLES[letter] for letter in letters]) + noise


LETTERS_OF = [LETTERS[n // 4 % 3] for n in range(6000)]
CLAIMS = [version_name(7, LETTERS.index(letter)) for letter in LETTERS_OF]


def test_noise_puts_no_answer_nearer_to_another_content():
    found = mixed([part(CLAIMS, noisy(LETTERS_OF))])
    assert found["judged"] == 6000
    assert found["nearer"] == found["out_of_order"] == found["wrong_items"] == 0
    assert found["ordered"] == 4
    least, thousandth = found["margin"]
    assert 0 < least < thousandth < found["apart"] == pytest.approx(2, abs=0.1)
    assert found["spread"] > 0.5


def test_every_answer_of_other_weights_is_counted_and_no_other():
    scores = noisy(LETTERS_OF)
    for at in (100, 2000, 5555):
        scores[at] = MIDDLES["c" if LETTERS_OF[at] != "c" else "a"]
    found = mixed([part(CLAIMS, scores), part(CLAIMS, noisy(LETTERS_OF, 2))])
    assert (found["nearer"], found["judged"]) == (3, 12000)
    assert found["margin"][0] == pytest.approx(-15, abs=0.2)


def test_contents_that_were_exchanged_altogether_are_out_of_order():
    exchanged = noisy([{"a": "b", "b": "c", "c": "a"}[letter] for letter in LETTERS_OF])
    found = mixed([part(CLAIMS, exchanged)])
    assert found["nearer"] == 0
    assert found["out_of_order"] == found["ordered"] == 4


def test_what_few_answers_or_one_content_say_is_not_judged():
    few = mixed([part(CLAIMS[: 12 * (FEWEST - 1)], noisy(LETTERS_OF[: 12 * (FEWEST - 1)]))])
    assert (few["judged"], few["margin"], few["apart"]) == (0, [], None)
    alone = mixed([part(["v1"] * 100, noisy("a" * 100))])
    assert (alone["judged"], alone["ordered"]) == (0, 0)
    half = part(CLAIMS[:36], noisy(LETTERS_OF[:36]))  # three answers of each content to each request
    assert mixed([half])["judged"] == 0
    assert mixed([half, half])["judged"] == 72
    assert mixed([half, part(CLAIMS[:36], noisy(LETTERS_OF[:36]), vocab="v2-b")])["judged"] == 0


def test_a_snapshot_that_means_two_things_and_other_rules_are_seen():
    good = [named(snapshot="s2", weights="v2-b"), named(snapshot="s2", weights="v5-b")]  # of the same content
    found = mixed([part(["v1"], noisy("a"), names=good)])
    assert (found["snapshots"], found["ambiguous"], found["policies"]) == (2, 0, 1)
    bad = mixed([part(["v1"], noisy("a"), names=[named(weights="v2-b"), named(snapshot="s3", policy_id="q")])])
    assert (bad["snapshots"], bad["ambiguous"], bad["policies"]) == (2, 1, 2)


def answer(ids, vocab):
    items = [Item(name, -1.0, sid) for name, sid in ids]
    return Answer(items, Versions("s", "v1", vocab, "base", "p", "c"), Timings(1.0, 1.0))


def test_an_item_belongs_to_its_vocab_and_to_its_sid():
    good = [("b1-2-3", [1, 2, 3]), ("i4-5-6", [4, 5, 6])]
    assert wrong_items(answer(good, "v8-b"), 2) == 0
    assert wrong_items(answer(good, "v9-c"), 2) == 1
    assert wrong_items(answer([("a1-2-3", [1, 2, 3])], "v1"), 1) == 0
    assert wrong_items(answer([("b1-2-3", [1, 2, 4]), good[1]], "v8-b"), 2) == 1  # another vocab's item map
    assert wrong_items(answer(good, "v8-b"), 5) == 3  # another vocab's trie: its SIDs have no items
    assert wrong_items(answer([], "v8-b"), 5) == 5


def test_no_two_contents_have_an_item_at_the_same_sid_but_for_the_common_ones():
    found = [catalogue(TOY, content) for content in range(len(LETTERS))]
    common = [set(flat[shared]) for flat, shared in found]
    assert common[0] == common[1] == common[2]
    assert len(common[0]) > 900
    own = [set(flat[~shared]) for flat, shared in found]
    assert not own[0] & own[1] and not own[0] & own[2] and not own[1] & own[2]
    assert min(map(len, own)) > 0.9 * TOY.items
    assert item_name("b", [1, 20, 3]) == "b1-20-3"
    assert [content_of(name) for name in ("v1", "v2-b", "v10-c")] == ["a", "b", "c"]
