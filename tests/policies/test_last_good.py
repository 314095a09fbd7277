"""What stands in for a policy with errors, and what is compiled again when a folder changes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

from app.policies.cache import Cache
from app.policies.last_good import decode, encode
from app.policies.load import Folder, compile_folder
from app.policies.source import Source
from tests.policies.contracts import contract

BASE = "widebeam: 1\n"
CHILD = "widebeam: 1\nextends: base\nwidths: [4, 4, 4]\n"
CONTRACT = contract((8, 8, 8), (16, 16, 16))


def folder(**texts):
    return Folder({name: Source(f"policies/{name}.yaml", text.encode()) for name, text in texts.items()})


def kept(policies):
    return {name: one.kept for name, one in policies.policies.items() if one.kept}


def test_a_broken_file_keeps_its_last_good_plan_and_says_what_is_wrong_with_it():
    good = compile_folder(folder(base=BASE, child=CHILD, other=BASE), CONTRACT)
    edited = folder(base=BASE, child=CHILD + "beam_widht: 3\n", other="widebeam: 1\nwidths: [2, 2, 2]\n")
    both = compile_folder(edited, CONTRACT, last_good=kept(good))
    assert {name: one.state for name, one in both.policies.items()} == {
        "base": "live",
        "child": "stale",
        "other": "live",
    }
    assert both.plan("child").policy_id == good.plan("child").policy_id
    assert both.plan("other").policy_id != good.plan("other").policy_id
    assert [one.rule.code for one in both.policies["child"].errors] == ["S007"]
    assert kept(both)["child"] == kept(good)["child"]


def test_a_last_good_child_keeps_its_old_parent():
    good = compile_folder(
        folder(base="widebeam: 1\nwidths: [9, 9, 9]\n", child="widebeam: 1\nextends: base\n"), CONTRACT
    )
    edited = folder(base="widebeam: 1\nwidths: [5, 5, 5]\n", child="widebeam: 1\nextends: base\nsteps: 1\n")
    both = compile_folder(edited, CONTRACT, last_good=kept(good))
    assert (both.plan("base").widths, both.plan("child").widths) == ((5, 5, 5), (9, 9, 9))


def test_last_good_texts_are_compiled_for_the_contract_at_hand():
    good = compile_folder(folder(base=BASE, child=CHILD), CONTRACT)
    bad = folder(base=BASE, child="widebeam: 1\nnope: 1\n")
    narrow = contract((8, 8, 8), (2, 2, 2))
    both = compile_folder(bad, narrow, last_good=kept(good))
    assert both.plan("child") is None
    assert both.policies["child"].state == "rejected"


def test_kept_texts_survive_the_disk_and_nothing_else_does():
    good = kept(compile_folder(folder(base=BASE, child=CHILD + "about: café\n"), CONTRACT))
    for one in good.values():
        assert decode(encode(one)) == one
    for data in (b"", b"{}", b"\xff", encode(good["child"])[:-20], b'{"widebeam": 1, "policy": "x", "files": {}}'):
        assert decode(data) is None


def test_only_what_changed_is_compiled_again():
    cache = Cache()
    before = compile_folder(folder(base=BASE, child=CHILD, other=BASE), CONTRACT, cache=cache)
    after = compile_folder(folder(base=BASE, child=CHILD + "about: x\n", other=BASE), CONTRACT, cache=cache)
    assert after.plan("other") is before.plan("other")
    assert after.plan("child") is not before.plan("child")
    parent = compile_folder(
        folder(base="widebeam: 1\nwidths: [2, 2, 2]\n", child=CHILD, other=BASE), CONTRACT, cache=cache
    )
    assert parent.plan("child") is not before.plan("child")
    assert parent.plan("other") is before.plan("other")
    narrow = replace(contract((8, 8, 8), (2, 2, 2)), id="narrow")
    assert compile_folder(folder(base=BASE), narrow, cache=cache).plan("base").widths == (2, 2, 2)


def test_the_cache_forgets_what_two_folders_did_not_use():
    cache = Cache()
    gone = weakref.ref(
        compile_folder(folder(base=BASE, child=CHILD), CONTRACT, cache=cache).plan("child").structure.steps[0].run
    )
    for n in range(2, 5):
        cache.turn()
        compile_folder(
            folder(base=BASE, child=f"widebeam: 1\nextends: base\nsteps: {{all: {{score: logp * {n}}}}}\n"),
            CONTRACT,
            cache=cache,
        )
    gc.collect()
    assert gone() is None
