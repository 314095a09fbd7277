"""docs/policies/guide.md, done: every command runs in the order of the page, on the demo, beside a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.served.page import PART, Reader, masked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies" / "guide.md").read_text("utf-8")


def checks(reader: Reader) -> dict[str, list]:
    """What the page promises after some of its commands, each time that they come."""

    def live(name="slim", state="live"):
        def look():
            document = httpx.get(f"{reader.server.admin}/admin/v1/policies", timeout=60).json()
            return document["policies"].get(name, {}).get("state") == state

        return look

    def experiment(**wanted):
        def look():
            found = reader.server.status()["experiments"].get("slim", {})
            return all(found.get(key) == value for key, value in wanted.items())

        return look

    def default():
        return reader.server.ask("296", user_id="u-1").json()["versions"]["policy"] == "slim"

    return {
        "cp next/tests/slim.yaml policies/tests/": [(live(), "live")],
        "sed -i 's/16, 32, 64/16, 32, 6400/' policies/slim.yaml": [(live(state="stale"), "stale")],
        "cp next/slim.yaml policies/": [(live(), "live"), (live(), "live again")],
        "cp next/experiments/slim.yaml policies/experiments/": [
            (experiment(standing="live"), "live"),
            (default, "over"),
        ],
    }


@pytest.mark.timeout(600)
def test_the_guide_from_a_width_to_the_result_and_back(tmp_path, monkeypatch):
    parts = PART.findall(PAGE)
    _, _, first = parts[0]
    copied = "cp -r contracts deployment.toml policies vocab weights trial"
    assert first.splitlines() == ["mkdir trial", copied, "cd trial"]
    root = tmp_path / "trial"
    root.mkdir()
    for name in ("contracts", "policies", "vocab", "weights"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "deployment.toml", root)
    monkeypatch.chdir(root)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        reader = Reader(root, stack, fails=lambda out: "6400" in out)
        waits, out = checks(reader), ""
        for file, language, text in parts[1:]:
            if file:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).write_text(text)
            elif language == "text":
                assert masked(out) == text, out
            else:
                assert language == "console"
                for line in text.splitlines():
                    out = reader.line(line)
                    if line in waits:
                        reader.sees(*waits[line].pop(0))
        results(reader)


def results(reader: Reader) -> None:
    """What the page says about what came."""
    said = dict(reader.said)
    plain = [json.loads(out) for line, out in reader.said if '"k": 10}' in line]
    assert plain[0]["versions"]["policy"] == "unseen"
    assert reader.document('"policy": "slim"')["versions"]["policy"] == "slim"
    assert len(reader.document('"policy": "slim"')["items"]) == 50
    document = reader.document("admin/v1/policies")
    assert document["policies"]["slim"]["state"] == "live"
    assert re.search(
        r"4 requests, 0 failed\noverlap@k +mean 0\.[3-9]",
        said["widebeam policy replay asked.jsonl --a unseen --b slim"],
    )
    arms = [(json.loads(out), line) for line, out in reader.said if '"user_id": "u-1"' in line]
    assert arms[0][0]["experiments"][0]["name"] == "slim"
    assert arms[0][0]["experiments"][0]["reason"] == "assigned"
    assert reader.document("assignments/slim")["arm"] == arms[0][0]["experiments"][0]["arm"]
    found = reader.document("admin/v1/status")["experiments"]["slim"]
    assert sum(found["units"].values()) == 100
    assert found["srm_p"] > 0.001
    assert not found["srm"]
    table = said["python result.py"].splitlines()
    users = {line.split()[0]: int(line.split()[1]) for line in table[:2]}
    assert users == found["units"]
    difference, margin = map(float, re.search(r"slim - control: (\S+) \+- (\S+) \(95 %\)", table[2]).groups())
    assert abs(difference) < margin  # clicks were drawn alike
    plans = [out for line, out in reader.said if line == "widebeam policy plan next"]
    assert "default" in plans[-1]
    last = arms[-1][0]
    assert last["versions"]["policy"] == "slim"
    assert not last.get("experiments")


def test_the_page_is_linked_and_its_links_lead_somewhere():
    for page in (
        ROOT / "README.md",
        ROOT / "docs" / "policies" / "README.md",
        ROOT / "docs" / "policies" / "experiments.md",
    ):
        assert "guide.md" in page.read_text("utf-8"), page
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / "policies" / target).exists(), target
