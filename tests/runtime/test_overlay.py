"""What of an edited deployment.toml counts at once."""

from __future__ import annotations

import pytest

from app.config import Unread, parse
from app.runtime.overlay import overlay

TEXT = """family = "onerec"
[sid]
sizes = [4, 5, 6]
[limits]
batch = 16
[server]
port = 0
"""


def edited(old, new):
    return overlay(TEXT.replace(old, new).encode(), TEXT.encode(), parse(TEXT))


def test_limits_and_precision_count_at_once():
    found = edited("batch = 16", "batch = 8")
    assert (found.deployment.limits.batch, found.restart, found.problem) == (8, (), None)
    assert edited("[sid]", 'precision = "bfloat16"\n[sid]').deployment.precision == "bfloat16"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("port = 0", "port = 1", "server.port"),
        ('"onerec"', '"qwen3"', "family"),
        ("[4, 5, 6]", "[4, 5, 7]", "sid.sizes"),
        ("port = 0", 'port = 0\nhost = "0.0.0.0"', "server.host"),
        ("[sid]", 'device = "cuda"\n[sid]', "device"),
    ],
)
def test_the_rest_needs_a_restart_and_is_named(old, new, field):
    found = edited(old, new)
    assert found.restart == (field,)
    assert found.deployment == parse(TEXT)
    assert found.document(found.deployment) == {"state": "needs restart", "restart": [field]}


@pytest.mark.parametrize(
    "text",
    [b"", b"family = 1", b"\xff", Unread("bad_deployment", "no"), b'family = "onerec"\nnope = 1\n[sid]\nsizes = [4]\n'],
)
def test_a_file_that_cannot_be_used_changes_nothing(text):
    found = overlay(text, TEXT.encode(), parse(TEXT))
    assert found.deployment == parse(TEXT)
    assert found.document(found.deployment)["state"] == "rejected"
    assert found.document(found.deployment)["reason"]["code"] == "bad_deployment"


def test_a_file_that_cannot_be_used_leaves_an_earlier_edit_in_force():
    good = edited("batch = 16", "batch = 8")
    found = overlay(b"[limits", TEXT.encode(), parse(TEXT), good.deployment)
    assert (found.deployment.limits.batch, found.document(found.deployment)["state"]) == (8, "rejected")
    assert overlay(TEXT.encode(), TEXT.encode(), parse(TEXT), good.deployment).deployment == parse(TEXT)


def test_an_untouched_file_is_in_force_and_so_is_one_that_came_back():
    untouched = overlay(TEXT.encode(), TEXT.encode(), parse(TEXT))
    assert untouched.document(parse(TEXT)) == {"state": "in force", "restart": []}


def test_nothing_is_in_force_before_something_serves():
    untouched = overlay(TEXT.encode(), TEXT.encode(), parse(TEXT))
    assert untouched.document(None) == {"state": "preparing", "restart": []}
    assert edited("port = 0", "port = 1").document(None) == {"state": "preparing", "restart": ["server.port"]}


def test_an_edit_that_came_while_the_server_was_put_together_counts():
    """It was parsed a moment before the text was kept that edits are compared with."""
    edit = TEXT.replace("batch = 16", "batch = 8").encode()
    assert overlay(edit, edit, parse(TEXT)).deployment.limits.batch == 8
    assert overlay(b"[", b"[", parse(TEXT)).document(parse(TEXT)) == {"state": "in force", "restart": []}
