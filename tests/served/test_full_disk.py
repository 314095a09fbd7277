"""A full disk under a real server: its log, contracts, state, records. It serves, says so, and recovers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import httpx
import pytest

from tests.runtime.test_cutover import edit, serving, weights, world
from tests.runtime.test_trouble import fill, small_disk

pytestmark = pytest.mark.slow  # it waits for what is tried again after seconds


def lines(log):
    """The whole lines of a log that lost some."""
    found = []
    for line in log.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def lost(metrics):
    """Records that were not written, of all kinds."""
    found = [line for line in metrics.splitlines() if line.startswith("widebeam_records_lost")]
    return sum(float(line.split()[-1]) for line in found)


def written(folder):
    """The records of a folder, once each of its files has some and ends with a whole one."""
    texts = [path.read_bytes() for path in folder.iterdir()]
    return texts if all(text.endswith(b"\n") for text in texts) else []


def until(true, what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def test_a_server_on_a_full_disk_serves_says_what_it_cannot_write_and_recovers(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as disk:
        root, log = disk / "root", disk / "log"
        shutil.copytree(world(tmp_path), root)
        edit(root, "[server]", "[log]\nrequests = 1.0\n[server]")
        command = [sys.executable, "-m", "app", "serve", "--root", str(root)]
        with log.open("wb") as stream, subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT) as process:
            try:
                _full_and_empty(root, log, disk)
                process.terminate()
                assert process.wait(60) == 0
            finally:
                process.kill()


def _full_and_empty(root, log, disk):
    where = until(lambda: [line for line in lines(log) if line["event"] == "listening"], "listening")[0]
    public, admin = (httpx.Client(base_url=where[port], timeout=60) for port in ("public", "admin"))
    with public, admin:

        def status():
            return admin.get("/admin/v1/status").json()

        def answers():
            return public.post("/v1/recommend", json={"context": {"history": ["i1"]}, "k": 3}).json()["versions"]

        until(lambda: public.get("/readyz").status_code == 200, "ready")
        first = status()["active"]["contract"]
        # room for two small texts of people, and for nothing of the server's
        weights(root, "v2", 1)
        until(lambda: serving("v2")(status()), "the new weights")
        ballast = fill(disk)
        text = (root / "deployment.toml").read_text()
        with (root / "deployment.toml").open("r+") as file:  # in place: its page is there
            file.write(text.replace("batch = 16", "batch = 12"))
        with (root / "policies" / "narrow.yaml").open("r+") as file:
            file.write("widebeam: 1\nwidths: [2, 3, 3]\n")
        until(lambda: status()["active"]["contract"] != first, "an edit of limits")
        for _ in range(20):
            assert answers()["weights"] == "v2"
        said = until(lambda: len(status()["unsaved"]) == 2 and status()["unsaved"], "what is not written")
        new = status()["active"]["contract"]
        assert [(one["code"], one["location"]) for one in said] == [
            ("contract_not_stored", f"contracts/{new}.json"),
            ("last_good_not_saved", "state/last_good"),
        ]
        assert all("No space" in one["message"] for one in said)
        old = next(one["id"] for one in status()["snapshots"] if one["weights"]["version"] == "v2")
        assert admin.post(f"/admin/v1/snapshots/{old}:rollback").status_code == 503
        assert admin.post("/admin/v1/kill", json={"kill": ["narrow"]}).status_code == 503
        until(lambda: lost(public.get("/metrics").text) > 0, "lost records counted")
        ballast.unlink()
        until(lambda: status()["unsaved"] == [], "what was not written is")
        assert (root / "contracts" / f"{new}.json").is_file()
        assert not list((root / "state").rglob(".tmp-*"))
        assert answers()["contract"] == new
        until(lambda: any(line["event"] == "log_lines_lost" for line in lines(log)), "lost lines said")
        texts = until(lambda: written(root / "state" / "requests"), "records, which a thread writes")
        assert all(json.loads(line) for text in texts for line in text.splitlines())
        weights(root, "v3", 2)
        until(lambda: serving("v3")(status()), "the next version")
