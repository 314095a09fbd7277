"""A page of the docs, done: every command of it runs in its order, beside a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from typer.testing import CliRunner

from app.cli.main import app
from tests.served.process import serving

PART = re.compile(r"(?:`([\w/.]+)`\n\n)?```(\w+)\n(.*?)```", re.DOTALL)
"""(file name, language, text) of each block: a file to write, commands, or what the last command said."""


class Reader:
    """Somebody who does what the page says, line by line, and remembers what came.

    root   the folder where it is done
    fails  whether what a command said is a failure that the page expects
    said   each line and its stdout · last: stdout and stderr of the last command
    """

    def __init__(self, root: Path, stack: ExitStack, fails=lambda out: False) -> None:
        self.root, self._stack, self._fails = root, stack, fails
        self.server = None
        self.said: list[tuple[str, str]] = []
        self.last = ""

    def line(self, line: str) -> str:
        words = [self.there(word) for word in shlex.split(line)]
        if words[:3] == ["widebeam", "serve", "--root"]:
            flags = ("--port", "0", "--admin-port", "0")
            self.server = self._stack.enter_context(serving(self.root / words[3], *flags)).ready()
            out = ""
        elif words[:2] == ["widebeam", "contract"]:  # a process of its own: a test's own makes no exports
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            out = self.run([sys.executable, "-m", "app", *words[1:]], environment)
        elif words[0] == "widebeam":
            done = CliRunner().invoke(app, words[1:])
            out, self.last = done.stdout, done.output
            assert done.exit_code == self._fails(out), (line, done.output)
        elif words[0] == "curl":
            out = self.curl(words)
        else:
            out = self.run([sys.executable, *words[1:]] if words[0] == "python" else ["bash", "-c", line])
        self.said.append((line, out))
        return out

    def run(self, program: list[str], environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=self.root, timeout=240, check=False, env=environment
        )
        self.last = done.stdout + done.stderr
        assert done.returncode == 0, (program, self.last)
        return done.stdout

    def there(self, url: str) -> str:
        """The same place of the server that really runs."""
        if self.server is None:
            return url
        for port, real in (("8000", self.server.public), ("8001", self.server.admin)):
            url = url.replace(f"http://127.0.0.1:{port}", real)
        return url

    def curl(self, words: list[str]) -> str:
        where = urlsplit(words[2])
        options = list(zip(words[3::2], words[4::2], strict=True))
        assert words[:2] == ["curl", "-s"]
        assert {name for name, _ in options} <= {"-H", "-d"}
        headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
        body = next((value.encode() for name, value in options if name == "-d"), b"")
        reply = httpx.request("POST" if body else "GET", where.geturl(), headers=headers, content=body, timeout=60)
        assert reply.status_code == 200, (words, reply.text)
        self.last = reply.text
        return reply.text

    def document(self, part: str) -> dict:
        return json.loads(next(out for line, out in reversed(self.said) if part in line))

    def sees(self, look, what: str) -> None:
        self.server.until(look, what)


def masked(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{12}\b", "ID", text)
