"""Policies that have served stay readable by their id."""

from __future__ import annotations

import os

from app.policies.last_good import Kept
from app.policies.source import Source
from app.runtime.state_dir import MAX_POLICIES, load_policy, save_policies


def text(number):
    return Kept("feed", {"feed": Source("policies/feed.yaml", f"widebeam: 1\nwidths: [{number}]\n".encode())})


def test_what_is_in_force_stays_and_of_the_rest_the_newest(tmp_path):
    many = MAX_POLICIES + 5
    for number in range(many):
        save_policies(tmp_path, {"live": text(0), f"{number:012x}": text(number)})
        file = tmp_path / "policies" / f"{number:012x}.json"
        os.utime(file, (number, number))
    save_policies(tmp_path, {"live": text(0)})
    left = sorted(path.stem for path in (tmp_path / "policies").glob("*.json"))
    assert left == sorted([f"{number:012x}" for number in range(5, many)] + ["live"])
    assert load_policy(tmp_path, f"{7:012x}") == text(7)
    assert load_policy(tmp_path, f"{2:012x}") is None


def test_a_damaged_file_is_none(tmp_path):
    save_policies(tmp_path, {"a" * 12: text(1)})
    (tmp_path / "policies" / f"{'a' * 12}.json").write_bytes(b"{")
    assert load_policy(tmp_path, "a" * 12) is None
