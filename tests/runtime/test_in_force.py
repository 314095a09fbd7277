"""Which policies serve after a read: bad edits, removals and bad traffic, as a function of files and clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.policies.cache import Cache
from app.policies.facts import Catalogue
from app.policies.load import Folder
from app.policies.source import Source
from app.runtime.in_force import GRACE_S, InForce, compiler, document, renew
from app.runtime.watch import Listing
from tests.policies.contracts import contract

CONTRACT = contract((8, 8, 8), (16, 16, 16))
GOOD = "widebeam: 1\nwidths: [{0}, {0}, {0}]\n"
BAD = "widebeam: 1\nbeam_widht: 4\n"
THERE = Listing(True)


def traffic(default: str) -> Source:
    return Source("policies/traffic.yaml", f"widebeam: 1\nkind: traffic\ndefault: {default}\n".encode())


class Server:
    """Reads one folder after another."""

    def __init__(self):
        self.cache, self.state, self.clock = Cache(), None, 100.0

    def read(
        self, texts, after=0.0, rules=None, listing=THERE, refused=(), kept=None, limits=CONTRACT, trials=None
    ) -> InForce:
        self.clock += after
        files = {name: Source(f"policies/{name}.yaml", text.encode()) for name, text in texts.items()}
        compile_ = compiler(
            limits, Catalogue((8, 64, 512)), self.cache, self.state.policies.traffic if self.state else None
        )
        experiments = {
            name: Source(f"policies/experiments/{name}.yaml", text.encode()) for name, text in (trials or {}).items()
        }
        folder = Folder(files, rules, refused, experiments)
        self.state = renew(self.state, folder, listing, compile_, self.clock, kept)
        return self.state

    def width(self, name):
        plan = self.state.policies.plan(name)
        return plan.widths[0] if plan else None

    def shown(self, name, key="state"):
        return document(self.state, self.clock).get(name, {}).get(key)


def test_a_good_edit_is_live_and_moves_the_generation():
    server = Server()
    first = server.read({"base": GOOD.format(3)})
    assert (first.generation, first.ok, server.shown("base")) == (1, True, "live")
    second = server.read({"base": GOOD.format(4)})
    assert (second.generation, server.width("base")) == (2, 4)


def test_reading_the_same_again_changes_nothing_but_the_attempt():
    server = Server()
    first = server.read({"base": GOOD.format(3)})
    same = server.read({"base": GOOD.format(3) + "# a comment\n"})
    assert (same.generation, same.loaded_at, same.since) == (first.generation, first.loaded_at, first.since)


def test_a_bad_edit_is_stale_and_a_good_one_clears_it_even_where_nothing_else_changed():
    server = Server()
    server.read({"base": GOOD.format(3), "other": GOOD.format(3)})
    bad = server.read({"base": BAD, "other": GOOD.format(5)}, after=1)
    assert not bad.ok
    assert (server.width("base"), server.width("other")) == (3, 5)
    assert server.shown("base") == "stale"
    assert server.shown("base", "errors")[0]["code"] == "S007"
    assert server.shown("base", "pending_sha") != server.shown("base", "source_sha")
    server.clock += 7
    assert server.shown("base", "stale_seconds") == 7
    good = server.read({"base": GOOD.format(3), "other": GOOD.format(5)})
    assert good.ok
    assert (good.generation, server.shown("base"), server.shown("base", "errors")) == (bad.generation, "live", [])
    assert server.shown("base", "stale_seconds") is None


def test_a_new_file_with_errors_is_rejected_and_its_correction_taken_at_once():
    server = Server()
    server.read({"base": GOOD.format(3), "new": BAD})
    assert (server.width("new"), server.shown("new")) == (None, "rejected")
    server.read({"base": GOOD.format(3), "new": GOOD.format(2)})
    assert (server.width("new"), server.shown("new")) == (2, "live")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "widebeam: 1\nsteps:\n", "\ufeffwidebeam: 1\n", "a: [1", "widebeam: 1\nwidths: [1]\n"]
)
def test_empty_partial_and_broken_files_never_become_active(text):
    server = Server()
    server.read({"base": GOOD.format(3)})
    server.read({"base": text})
    assert (server.width("base"), server.shown("base")) == (3, "stale")


def test_a_file_that_is_gone_is_believed_after_a_while():
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    gone = server.read({"base": GOOD.format(3)}, after=1)
    assert (server.width("p"), server.shown("p"), gone.pending, gone.ok) == (4, "stale", True, False)
    assert server.shown("p", "errors")[0]["code"] == "gone"
    server.read({"base": GOOD.format(3)}, after=GRACE_S - 0.1)
    assert server.width("p") == 4
    after = server.read({"base": GOOD.format(3)}, after=0.2)
    assert (server.width("p"), after.pending, after.ok, after.generation) == (None, False, True, 2)
    assert "p" not in after.kept


def test_a_file_that_comes_back_in_time_was_never_away():
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    server.read({"base": GOOD.format(3)}, after=1)
    server.read({"base": GOOD.format(3), "p": GOOD.format(6)}, after=GRACE_S - 0.5)
    assert (server.width("p"), server.shown("p")) == (6, "live")
    server.read({"base": GOOD.format(3)}, after=1)
    server.read({"base": GOOD.format(3)}, after=GRACE_S - 0.5)
    assert server.width("p") == 6


def test_the_default_and_ancestors_cannot_be_removed():
    server = Server()
    texts = {"base": GOOD.format(3), "parent": GOOD.format(4), "child": "widebeam: 1\nextends: parent\n"}
    server.read(texts)
    server.read({"child": texts["child"]}, after=1)
    server.read({"child": texts["child"]}, after=100)
    assert (server.width("base"), server.width("parent"), server.width("child")) == (3, 4, 4)
    assert (server.shown("base"), server.shown("parent"), server.shown("child")) == ("stale", "stale", "live")
    server.read({}, after=1)  # the child goes, too: then nobody needs the parent any more
    server.read({}, after=100)
    server.read({}, after=100)
    assert (server.width("base"), server.width("parent"), server.width("child")) == (3, None, None)


def test_a_folder_that_is_gone_takes_nothing_with_it():
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    missing = server.read({}, after=1, listing=Listing(False))
    server.read({}, after=1000, listing=Listing(False))
    assert (server.width("base"), server.width("p"), missing.ok, missing.pending) == (3, 4, False, False)
    server.read({"base": GOOD.format(5)}, after=1)  # it comes back, file by file
    assert (server.width("base"), server.width("p")) == (5, 4)


def test_a_file_that_cannot_be_read_is_not_gone():
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    refused = (("policies/p.yaml", "S016", "the file cannot be read", ""),)
    for _ in range(3):
        server.read({"base": GOOD.format(3)}, after=100, refused=refused)
    assert (server.width("p"), server.shown("p")) == (4, "stale")


def test_a_folder_that_cannot_be_read_takes_nothing_with_it():
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4), "q": GOOD.format(5)}, rules=traffic("q"))
    for _ in range(3):
        state = server.read({}, after=100, refused=(("policies", "S016", "cannot be read: Permission denied", ""),))
    assert (server.width("p"), server.shown("p"), state.policies.default) == (4, "stale", "q")
    assert "Permission denied; the policy keeps" in server.shown("p", "errors")[0]["message"]
    server.read({"base": GOOD.format(3)})
    server.read({"base": GOOD.format(3)}, after=GRACE_S)
    assert server.width("p") is None


@pytest.mark.parametrize(
    ("refused", "code", "words"),
    [
        ((), "gone", "the file is gone"),
        ((("policies/p.yaml", "S016", "a pipe stands where a file should", "help"),), "S016", "a pipe stands where"),
        ((("policies/p.yaml", "S016", "the file cannot be read: Permission denied", ""),), "S016", "Permission denied"),
        ((("policies/other.yaml", "S016", "a pipe stands where a file should", ""),), "gone", "the file is gone"),
    ],
)
def test_what_stands_in_the_place_of_a_file_is_said(refused, code, words):
    server = Server()
    server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    state = server.read({"base": GOOD.format(3)}, after=1, refused=refused)
    [error] = server.shown("p", "errors")
    assert (error["code"], error["file"]) == (code, "policies/p.yaml")
    assert words in error["message"]
    assert "keeps its last good text" in error["message"]
    assert words in state.problems()["p"]


RULES = Source(
    "policies/traffic.yaml",
    b"widebeam: 1\nkind: traffic\ndefault: base\nlayers: {ranking: {salt: r/1}}\n"
    b"holdout: {share: 2%, salt: h/1, policy: held}\n",
)
TRIAL = """\
widebeam: 1
kind: experiment
layer: ranking
slots: [0, 10000]
state: running
salt: width/1
arms:
  control: {weight: 50, policy: base}
  wide: {weight: 50, policy: wide}
"""


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(("state", "stays"), [("running", True), ("paused", True), ("stopped", False)])
def test_arms_of_an_experiment_that_has_not_stopped_cannot_be_removed(restart, state, stays):
    trials = {"width": TRIAL.replace("running", state)}
    texts = {"base": GOOD.format(3), "wide": GOOD.format(6), "held": GOOD.format(4), "other": GOOD.format(5)}
    server = Server()
    server.read(texts, rules=RULES, trials=trials)
    kept = server.state.kept
    if restart:
        server = Server()
    for _ in range(3):
        server.read({"base": texts["base"]}, after=100, rules=RULES, trials=trials, kept=kept)
    assert (server.width("wide"), server.width("other")) == (6 if stays else None, None)
    assert server.width("held") == 4  # the holdout's is served as long as there is a holdout
    if stays:
        assert server.shown("wide") == "stale"
        arms = {arm.name: arm.plan.policy for arm in server.state.policies.traffic.experiments["width"].arms}
        assert arms == {"control": "base", "wide": "wide"}


@pytest.mark.parametrize(
    "bad", [b"", b"widebeam: 1\nkind: traffic\ndefault: nope\n", b"kind: [", b"widebeam: 1\nkind: traffic\n  x"]
)
def test_bad_traffic_keeps_the_default_that_it_had(bad):
    server = Server()
    texts = {"base": GOOD.format(3), "p": GOOD.format(4)}
    server.read(texts, rules=traffic("p"))
    state = server.read(texts, rules=Source("policies/traffic.yaml", bad))
    assert (state.policies.default, state.ok) == ("p", False)
    assert any(one.span.file == "policies/traffic.yaml" for one in state.policies.findings)
    assert server.read(texts, after=1).policies.default == "p"  # and so does a file that is gone for a moment
    assert server.read(texts, after=GRACE_S).policies.default == "base"


def test_a_default_that_cannot_serve_is_not_taken():
    server = Server()
    server.read({"base": GOOD.format(3)})
    state = server.read({"base": GOOD.format(3), "p": BAD}, rules=traffic("p"))
    assert state.policies.default == "base"
    assert not state.ok
    assert server.read({"base": GOOD.format(3), "p": GOOD.format(4)}, rules=traffic("p")).policies.default == "p"


def test_a_start_over_broken_files_serves_the_last_good_texts():
    before = Server()
    before.read({"base": GOOD.format(3), "p": GOOD.format(4), "old": GOOD.format(9)}, rules=traffic("p"))
    server = Server()
    server.read(
        {"base": GOOD.format(5), "p": BAD}, rules=Source("policies/traffic.yaml", b"nope"), kept=before.state.kept
    )
    assert (server.state.policies.default, server.width("base"), server.width("p")) == ("p", 5, 4)
    assert (server.shown("p"), server.width("old")) == ("stale", None)
    fresh = Server()
    fresh.read({"base": GOOD.format(5), "p": BAD}, rules=traffic("p"))
    assert fresh.state.policies.plan(fresh.state.policies.default) is None


def test_another_contract_checks_everything_again():
    server = Server()
    server.read({"base": GOOD.format(3), "wide": GOOD.format(16), "broken": GOOD.format(4)})
    server.read({"base": GOOD.format(3), "wide": GOOD.format(16), "broken": BAD})
    narrow = replace(contract((8, 8, 8), (8, 8, 8)), id="narrow")
    server.read({"base": GOOD.format(3), "wide": GOOD.format(16), "broken": BAD}, limits=narrow)
    assert (server.width("base"), server.width("wide"), server.width("broken")) == (3, None, 4)
    assert server.shown("wide", "errors")[0]["code"] == "K003"


def test_a_policy_that_fails_when_it_is_tried_keeps_its_older_plan():
    server = Server()
    before = server.read({"base": GOOD.format(3), "p": GOOD.format(4)})
    state = server.read({"base": GOOD.format(3), "p": GOOD.format(6)})
    server.state = state.without({"p": "boom"}, before, server.clock)
    assert (server.width("p"), server.shown("p"), server.state.ok) == (4, "stale", False)
    assert server.shown("p", "errors")[0] == {
        "file": "policies/p.yaml", "line": 0, "col": 0, "end_col": 0, "code": "canary_failed", "severity": "error",
        "message": "boom", "help": "",
    }  # fmt: skip


class Strict(Server):
    """All or nothing."""

    def read(self, texts, after=0.0, **rest):
        before = self.state
        self.state = super().read(texts, after, **rest).unless_wrong(before, self.clock)
        return self.state


def test_a_strict_server_takes_a_save_as_a_whole_or_not_at_all():
    server = Strict()
    first = server.read({"base": GOOD.format(3), "other": GOOD.format(3)})
    held = server.read({"base": BAD, "other": GOOD.format(5), "new": GOOD.format(6)}, after=1)
    assert (held.generation, held.ok, held.policies.id) == (first.generation, False, first.policies.id)
    assert (server.width("base"), server.width("other"), server.width("new")) == (3, 3, None)
    assert [server.shown(name) for name in ("base", "other", "new")] == ["stale", "stale", "rejected"]
    assert [server.shown(name, "errors")[0]["code"] for name in ("base", "other", "new")] == ["S007", "held", "held"]
    server.clock += 7
    assert server.shown("other", "stale_seconds") == 7
    assert set(held.problems()) == {"base"}
    mended = server.read({"base": GOOD.format(4), "other": GOOD.format(5), "new": GOOD.format(6)})
    assert (mended.generation, mended.ok, mended.held) == (first.generation + 1, True, None)
    assert (server.width("base"), server.width("other"), server.width("new")) == (4, 5, 6)


def test_a_strict_server_holds_policies_back_for_a_bad_traffic_file_too():
    server = Strict()
    server.read({"base": GOOD.format(3)}, rules=traffic("base"))
    held = server.read({"base": GOOD.format(4)}, rules=Source("policies/traffic.yaml", b"widebeam: 1\nkind: x\n"))
    assert (server.width("base"), held.ok) == (3, False)
    assert set(held.problems()) == {""}


def test_a_strict_server_starts_with_the_last_good_text_of_each_policy():
    before = Server().read({"base": GOOD.format(3), "other": GOOD.format(3)}).kept
    server = Strict()
    server.read({"base": BAD, "other": GOOD.format(5)}, kept=before)
    assert (server.width("base"), server.width("other")) == (3, 5)
