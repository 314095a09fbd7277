"""docs/policies/guide.md, done: every command runs in the order of the page, on the demo, beside a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests.served.process import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies" / "guide.md").read_text("utf-8")
PART = re.compile(r"(?:`([\w/.]+)`\n\n)?```(\w+)\n(.*?)```", re.DOTALL)
SERVE = "widebeam serve --root ."


class Reader:
    """Somebody who does what the page says, line by line, and remembers what came."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack = root, stack
        self.server = None
        self.said: list[tuple[str, str]] = []

    def line(self, line: str) -> str:
        words = shlex.split(line)
        if line == SERVE:
            flags = ("--port", "0", "--admin-port", "0")
            self.server = self._stack.enter_context(serving(self.root, *flags)).ready()
            out = ""
        elif words[0] == "widebeam":
            done = CliRunner().invoke(app, words[1:])
            out = done.stdout
            assert done.exit_code == ("6400" in out), (line, done.output)
        elif words[0] == "curl":
            out = self.curl(words)
        else:
            program = [sys.executable, *words[1:]] if words[0] == "python" else ["bash", "-c", line]
            program = [self.there(word) for word in program] if words[0] == "python" else program
            done = subprocess.run(program, capture_output=True, text=True, cwd=self.root, timeout=240, check=False)
            assert done.returncode == 0, (line, done.stderr)
            out = done.stdout
        self.said.append((line, out))
        return out

    def there(self, url: str) -> str:
        ports = {"http://127.0.0.1:8000": self.server.public, "http://127.0.0.1:8001": self.server.admin}
        return ports.get(url, url)

    def curl(self, words: list[str]) -> str:
        where = urlsplit(words[2])
        options = list(zip(words[3::2], words[4::2], strict=True))
        assert words[:2] == ["curl", "-s"]
        assert {name for name, _ in options} <= {"-H", "-d"}
        headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
        body = next((value.encode() for name, value in options if name == "-d"), b"")
        url = self.there(f"http://{where.netloc}") + where.path + (f"?{where.query}" if where.query else "")
        reply = httpx.request("POST" if body else "GET", url, headers=headers, content=body, timeout=60)
        assert reply.status_code == 200, (words, reply.text)
        return reply.text

    def last(self, part: str) -> dict:
        return json.loads(next(out for line, out in reversed(self.said) if part in line))

    def sees(self, look, what: str) -> None:
        self.server.until(look, what)


def masked(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{12}\b", "ID", text)


def checks(reader: Reader) -> dict[str, list]:
    """What the page promises after some of its commands, each time that they come."""

    def live(name="slim", state="live"):
        def look():
            document = httpx.get(f"{reader.server.admin}/admin/v1/policies").json()
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
        reader = Reader(root, stack)
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
    assert reader.last('"policy": "slim"')["versions"]["policy"] == "slim"
    assert len(reader.last('"policy": "slim"')["items"]) == 50
    document = reader.last("admin/v1/policies")
    assert document["policies"]["slim"]["state"] == "live"
    assert re.search(
        r"4 requests, 0 failed\noverlap@k +mean 0\.[3-9]",
        said["widebeam policy replay asked.jsonl --a unseen --b slim"],
    )
    arms = [(json.loads(out), line) for line, out in reader.said if '"user_id": "u-1"' in line]
    assert arms[0][0]["experiments"][0]["name"] == "slim"
    assert arms[0][0]["experiments"][0]["reason"] == "assigned"
    assert reader.last("assignments/slim")["arm"] == arms[0][0]["experiments"][0]["arm"]
    found = reader.last("admin/v1/status")["experiments"]["slim"]
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
