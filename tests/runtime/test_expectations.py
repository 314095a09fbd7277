"""What artifacts say that they must answer: recorded, checked before a version serves, and refused where it differs."""

from __future__ import annotations

import json
import shutil

import pytest

from app.errors import Rejected
from app.runtime.expectations import FILE, Wanted, difference, read_asked, read_canary
from app.vocab.manifest import read_manifest
from app.vocab.publish import commit, draft
from tests.live_support import live_server
from tests.runtime.test_cutover import serving, state_of, weights, world


def wanted(*pairs):
    return tuple(Wanted(item, score) for item, score in pairs)


ANSWER = wanted(("a", -1.0), ("b", -2.0), ("c", -3.0))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (ANSWER, None),
        (wanted(("a", -1.0004), ("b", -2.0), ("c", -3.0)), None),
        (wanted(("a", -1.0), ("b", -2.0), ("d", -3.0)), None),  # at the cut, a near-tie may be another item
        (wanted(("a", -1.01), ("b", -2.0), ("c", -3.0)), "place 1 is 'a' with score -1.01"),
        (wanted(("b", -1.0), ("a", -2.0), ("c", -3.0)), "item 'a' has score -2"),
        (wanted(("d", -1.0), ("b", -2.0), ("c", -3.0)), "item 'a' is missing"),
        (ANSWER[:2], "2 items, 3 are recorded"),
    ],
)
def test_answers_are_equal_up_to_near_ties(found, says):
    problem = difference(ANSWER, found, 1e-3)
    assert problem is None if says is None else problem.startswith(says), problem


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ([{"format": 1, "with": "x"}], "canary.jsonl"),
        ([{"format": 2, "with": "x"}, {}], "canary.jsonl: line 1"),
        ([{"format": 1}, {}], "canary.jsonl: line 1"),
        ([{"format": 1, "with": "x"}, {"context": {}, "k": 0, "items": []}], "canary.jsonl: line 2"),
        ([{"format": 1, "with": "x"}, *[{"context": {}, "k": 1, "items": []}] * 65], "canary.jsonl"),
    ],
)
def test_a_file_that_is_no_canary_is_refused_with_its_line(tmp_path, lines, place):
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(Rejected) as caught:
        read_canary(tmp_path, "weights")
    assert (caught.value.code, caught.value.location) == ("canary_invalid", place)


def test_no_file_expects_nothing_and_no_request_is_nothing_to_record(tmp_path):
    assert read_canary(tmp_path, "vocab") is None
    with pytest.raises(Rejected, match="0 requests"):
        read_asked(b"\n\n")


def expecting(root, version, seed, vocab_digest, items, **case):
    """Weights with a canary of one request."""
    weights(root, "made", seed)
    lines = [{"format": 1, "with": vocab_digest}, {"context": {"history": ["i1", "i2"]}, "k": 3, "items": items} | case]
    with draft(root, "weights") as made:
        for name in ("config.json", "model.safetensors"):
            made.copy(root / "weights" / "made" / name, name)
        made.write(FILE, ["\n".join(map(json.dumps, lines)).encode()])
        commit(made, "weights", version, "tests", {})


async def test_a_version_that_answers_otherwise_than_it_says_never_serves(tmp_path):
    root = world(tmp_path)
    for number in (2, 3, 4):  # what the newest weights answer, found out by a server that never sees the others
        weights(root, f"v{number}", number)
    async with live_server(root) as server:
        answer = await server.recommend("i1", "i2", k=3, policy="base")
        assert answer["versions"]["weights"] == "v4"
        right = [{"id": item["id"], "score": item["score"]} for item in answer["items"]]
        digest = read_manifest(root / "vocab" / "v1", "vocab").digest
        weights(root, "v5", 5)
        await server.settles(serving("v5"))
        for version, items in (("v6", [*right[:2], {"id": right[2]["id"], "score": -99.0}]), ("v7", right[:2])):
            hidden = root / "weights" / "made"
            expecting(root, version, 4, digest, items)
            status = await server.settles(
                lambda status, v=version: state_of(status, "weights", v)["state"] == "rejected"
            )
            reason = state_of(status, "weights", version)["reason"]
            assert (reason["code"], reason["location"]) == ("canary_differs", f"weights/{version}/canary.jsonl: line 2")
            shutil.rmtree(hidden)
        assert "2 are recorded" in reason["message"]
        expecting(root, "v8", 4, digest, right, context={"history": ["nobody"]})
        status = await server.settles(lambda status: state_of(status, "weights", "v8")["state"] == "rejected")
        assert "item 'nobody' is not in the vocab" in state_of(status, "weights", "v8")["reason"]["message"]
        shutil.rmtree(root / "weights" / "made")
        assert serving("v5")(status)
        expecting(root, "v9", 4, digest, right)
        await server.settles(serving("v9"))
        assert server.events("canary_passed")[-1]["version"] == "v9"
        shutil.rmtree(root / "weights" / "made")
        expecting(root, "v10", 3, "another vocab", right)
        await server.settles(serving("v10"))
        assert server.events("canary_skipped")[-1]["version"] == "v10"


async def test_a_start_checks_what_versions_expect(tmp_path):
    root = world(tmp_path)
    digest = read_manifest(root / "vocab" / "v1", "vocab").digest
    expecting(root, "v2", 4, digest, [{"id": "a1", "score": 1.0}])
    shutil.rmtree(root / "weights" / "made")
    async with live_server(root, ready=False) as server:
        status = await server.settles(lambda status: any("canary_differs" in one for one in status["reasons"]))
        assert status["active"] is None
