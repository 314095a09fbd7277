"""Two servers, two processes, one root: they write contracts, pins, kills and records side by side, and agree."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import httpx
import pytest

from tests.runtime.test_cutover import edit, weights, world
from tests.served.process import serving

pytestmark = pytest.mark.slow  # two processes on one machine
BATCH = 14
BAD = {"artifact_update_failed", "policy_update_failed", "takedown_update_failed", "loop_died", "start_failed",
       "last_good_not_saved", "contract_not_stored", "unit_salt_unusable", "records_unwritable"}  # fmt: skip


@pytest.mark.timeout(300)
def test_two_servers_on_one_root_agree_and_lose_nothing(tmp_path):
    root = world(tmp_path)
    edit(root, "[server]", '[log]\nrequests = 1.0\nunits = "hashed"\n[server]')
    for file in (root / "contracts").iterdir():
        file.unlink()  # both make it
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(root)) for _ in range(2)]
        for server in servers:
            server.until(lambda s=server: s.client.get("/readyz").status_code == 200, "ready", timeout=240)
        _agree(servers, lambda status: status["active"]["contract"])
        for number in range(2, 5):
            _one_round(root, servers, number)
        for server in servers:
            server.until(lambda s=server: s.status()["unsaved"] == [], "written")
            assert [line for line in server.lines if line.get("event") in BAD] == []
            assert server.stop() == 0
    lines = [line for path in (root / "state" / "requests").iterdir() for line in path.read_bytes().splitlines()]
    users = {json.loads(line)["user_id"] for line in lines}
    assert (len(lines), len(users)) == (2 * 3, 1), "one key for both"
    left = {path.name for path in (root / "state").rglob("*") if path.name.startswith(".")}
    assert left == set()
    assert all(json.loads(path.read_bytes())["id"] == path.stem for path in (root / "contracts").iterdir())


def _one_round(root, servers, number):
    """Everything at once, by one or the other; and then they agree."""
    one, other = servers if number % 2 else servers[::-1]
    (root / "policies" / "narrow.yaml").write_text(f"widebeam: 1\nwidths: [{number}, 3, 3]\n")
    edit(root, f"batch = {BATCH - number + 3}" if number > 2 else "batch = 16", f"batch = {BATCH - number + 2}")
    weights(root, f"v{number}", number)
    _post(one, "kill", {"kill": [f"one{number}"]})
    _post(other, "kill", {"kill": [f"other{number}"], "revive": [f"one{number - 1}", f"other{number - 1}"]})
    _agree(servers, lambda status: status["active"]["weights"]["version"], f"v{number}")
    _agree(servers, lambda status: [entry["name"] for entry in status["killed"]], [f"one{number}", f"other{number}"])
    _post(one, "snapshots:promote?wait=60", {"weights": f"v{number - 1}"})
    _agree(servers, lambda status: status["active"]["weights"]["version"], f"v{number - 1}")
    _post(other, "snapshots:unpin")
    _agree(servers, lambda status: status["active"]["weights"]["version"], f"v{number}")
    _agree(servers, lambda status: (status["active"]["snapshot"], status["policies"]["narrow"]["policy_id"]))
    for server in servers:
        assert server.ask("i1", user_id="u").status_code == 200


def _post(server, path, body=None):
    reply = httpx.post(f"{server.admin}/admin/v1/{path}", json=body, timeout=90)
    assert reply.status_code == 200, reply.text


def _agree(servers, look, wanted=None):
    """Both say the same, and what was wanted."""
    end = time.monotonic() + 60
    while True:
        found = [look(server.status()) for server in servers]
        if found[0] == found[1] and (wanted is None or found[0] == wanted):
            return
        assert time.monotonic() < end, found
        time.sleep(0.05)
