"""Which versions form a snapshot: the newest that agree; what is newer says what it waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Rejected
from app.runtime import survey as module
from app.runtime.desired import Option, asked, choose
from app.runtime.survey import survey
from tests import support

SIZES = (4, 5, 6)


def option(version, **requires):
    return Option(version, f"digest of {version}", requires)


def test_the_newest_of_each_kind_goes_together():
    chosen = choose([option("w2"), option("w1")], [option("v3"), option("v1")])
    assert (chosen.weights.version, chosen.vocab.version, chosen.waiting) == ("w2", "v3", {})


def test_what_requires_something_that_is_not_there_waits():
    chosen = choose([option("w2", vocab=["v9"]), option("w1")], [option("v3", weights=["w7"]), option("v1")])
    assert (chosen.weights.version, chosen.vocab.version) == ("w1", "v1")
    assert chosen.waiting == {("weights", "w2"): "requires vocab v9", ("vocab", "v3"): "requires weights w7"}


def test_of_very_many_requirements_the_first_are_named():
    wanted = [f"v{n}" for n in range(100_000)]
    chosen = choose([option("w2", vocab=wanted)], [option("other")])
    assert chosen.waiting["weights", "w2"] == "requires vocab v0, v1, v2, v3, v4, v5, v6, v7 or one of 99992 more"


def test_requirements_name_versions_or_digests_in_either_direction():
    assert choose([option("w2", vocab=["digest of v1"])], [option("v2"), option("v1")]).vocab.version == "v1"
    assert choose([option("w2"), option("w1")], [option("v2", weights=["w1"])]).weights.version == "w1"


def test_pairs_that_were_tried_are_not_tried_again():
    weights, vocab = [option("w2"), option("w1")], [option("v2"), option("v1")]
    chosen = choose(weights, vocab, {("digest of w2", "digest of v2")})
    assert (chosen.weights.version, chosen.vocab.version) == ("w2", "v1")
    assert chosen.waiting == {("vocab", "v2"): "no weights that is there goes with it"}


NAMES = st.lists(st.integers(0, 5), unique=True, max_size=5)
REQUIRES = st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=3), max_size=5)


@given(NAMES, NAMES, REQUIRES, REQUIRES)
def test_the_choice_is_the_first_pair_in_order_that_agrees(w, v, w_requires, v_requires):
    weights = [option(f"w{n}", **({"vocab": [f"v{m}" for m in w_requires[n]]} if n in w_requires else {})) for n in w]
    vocab = [option(f"v{n}", **({"weights": [f"w{m}" for m in v_requires[n]]} if n in v_requires else {})) for n in v]
    good = [
        (a, b) for a in w for b in v
        if (a not in w_requires or b in w_requires[a]) and (b not in v_requires or a in v_requires[b])
    ]  # fmt: skip
    chosen = choose(weights, vocab)
    found = (chosen.weights and chosen.weights.version, chosen.vocab and chosen.vocab.version)
    assert found == ((f"w{good[0][0]}", f"v{good[0][1]}") if good else (None, None))


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        '{"weights": 1}',
        '{"nope": "v1"}',
        '{"weights": "../v1"}',
        '{"vocab": ""}',
        "\xff",
        '{"vocab": "v1", "vocab": "v2"}',
    ],
)
def test_a_file_that_asks_for_nonsense_is_refused_with_its_name(tmp_path, text):
    (tmp_path / "pin.json").write_text(text, "latin-1")
    with pytest.raises(Rejected) as refused:
        asked(tmp_path / "pin.json", "state/pin.json")
    assert refused.value.location == "state/pin.json"


def test_a_survey_reads_pins_manifests_and_changes(tmp_path):
    root = support.write_root(tmp_path / "root", SIZES)
    first = survey(root, root / "state")
    assert [one.version for one in first.candidates["weights"]] == ["v1"]
    assert (first.ask, first.asked_by, first.problem) == ({}, None, None)
    assert survey(root, root / "state", first).fingerprint == first.fingerprint
    (root / "release.json").write_text('{"weights": "v1", "vocab": "v7"}')
    (root / "state").mkdir()
    (root / "state" / "pin.json").write_text('{"vocab": "v1"}')
    both = survey(root, root / "state", first)
    assert (both.ask, both.asked_by) == ({"weights": "v1", "vocab": "v1"}, "state/pin.json")
    assert both.candidates["weights"][0] is first.candidates["weights"][0]  # nothing was read twice
    (root / "release.json").write_text("{")
    assert survey(root, root / "state").problem is None  # the pin is stronger
    (root / "state" / "pin.json").unlink()
    assert survey(root, root / "state").problem.code == "bad_json"
    file = root / "weights" / "v1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    spoilt = survey(root, root / "state", first).candidates["weights"][0]
    assert (spoilt.manifest, spoilt.problem.code) == (None, "file_size")
    (root / "weights" / "v2").mkdir()
    incomplete = survey(root, root / "state", first).candidates["weights"][0]
    assert (incomplete.version, incomplete.manifest, incomplete.problem) == ("v2", None, None)
    json.dumps(both.ask)


@pytest.mark.parametrize("left", ["nothing", "a file"])
def test_a_version_that_is_removed_while_it_is_looked_at_is_not_refused(tmp_path, monkeypatch, left):
    """Whoever keeps a root tidy removes old versions; a survey may come in between."""
    root = support.write_root(tmp_path, SIZES)
    read = module.read_manifest

    def removed_first(directory, kind):
        for path in directory.iterdir():
            path.unlink()
        if left == "nothing":
            directory.rmdir()
        else:
            (directory / "items.safetensors").touch()
        return read(directory, kind)

    monkeypatch.setattr(module, "read_manifest", removed_first)
    [found] = survey(root, root / "state").candidates["vocab"]
    assert (found.manifest, found.problem) == (None, None)


def test_a_manifest_that_comes_behind_the_listing_is_seen_by_the_next_survey(tmp_path, monkeypatch):
    root = support.write_root(tmp_path, SIZES)
    late = root / "weights" / "v2" / "MANIFEST.json"
    late.parent.mkdir()
    fingerprint = module._fingerprint

    def manifest_first(found):
        if found.directory == late.parent and not late.exists():
            late.write_text("{}")
        return fingerprint(found)

    monkeypatch.setattr(module, "_fingerprint", manifest_first)
    first = survey(root, root / "state")
    second = survey(root, root / "state", first)
    before, after = (next(one for one in seen.candidates["weights"] if one.version == "v2") for seen in (first, second))
    assert (before.found.complete, before.problem) == (False, None)
    assert after.found.complete
    assert after.problem is not None
    assert before.fingerprint != after.fingerprint
    assert first.fingerprint != second.fingerprint


def test_a_version_that_may_not_be_looked_into_is_refused_with_the_reason(tmp_path, monkeypatch):
    root = support.write_root(tmp_path / "root", SIZES)
    closed, real = root / "weights" / "v1", Path.stat  # nothing is forbidden to root

    def forbidden(self, **how):
        if self.parent == closed:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, **how)

    monkeypatch.setattr(Path, "stat", forbidden)
    (one,) = survey(root, root / "state").candidates["weights"]
    assert one.manifest is None
    assert (one.problem.code, one.problem.location) == ("file_unreadable", "MANIFEST.json")
