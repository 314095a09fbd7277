"""docs/api.md says what the server does."""

import asyncio
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest

from app.api.errors import STATUS
from app.config import Server
from tests.api.support import ask, served
from tests.api.test_openapi import document

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
LINES = re.findall(r"<!-- (\d+) -->\n```console\n(.*?)\n```\n(?:```json\n(.*?)```)?", PAGE, re.DOTALL)


def parse(line: str) -> tuple[str, dict[str, str], bytes]:
    """URL, headers and body of a curl line as the page writes them."""
    words = shlex.split(line.replace("$WIDEBEAM_ADMIN_TOKEN", "r-token"))
    assert words[:2] == ["curl", "-s"]
    url, rest = words[2], words[3:]
    options = list(zip(rest[::2], rest[1::2], strict=True))
    assert {name for name, _ in options} <= {"-H", "-d"}
    headers = dict(value.split(": ", 1) for name, value in options if name == "-H")
    body = next((value.encode() for name, value in options if name == "-d"), b"")
    return url, headers, body


def test_the_page_has_its_curl_lines():
    assert len(LINES) == PAGE.count("curl -s") >= 8


@pytest.mark.parametrize(("status", "line", "shown"), LINES)
async def test_a_curl_line_does_what_the_page_says(status, line, shown, tmp_path):
    (tmp_path / "tokens").write_text("read r-token\n")
    url, headers, body = parse(line)
    async with served(root=tmp_path, admin_tokens="tokens") as server:
        base = {8000: server.addresses.public, 8001: server.addresses.admin}[urlsplit(url).port]
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            reply = await client.request("POST" if body else "GET", urlsplit(url).path, headers=headers, content=body)
    assert reply.status_code == int(status)
    if shown and reply.status_code != 200:
        assert reply.json() == json.loads(shown)


def test_the_answer_shown_fits_the_openapi_document():
    shown = next(json.loads(text) for status, _, text in LINES if status == "200" and text)
    jsonschema.validate(shown, {**document(), "$ref": "#/components/schemas/Answer"})


def test_the_page_names_every_status_and_every_setting_that_it_speaks_of():
    for status in set(STATUS.values()) - {499}:
        assert re.search(rf"\b{status}\b", PAGE), status
    for setting in re.findall(r"`server\.(\w+)`", PAGE):
        assert setting in Server.__struct_fields__


def test_the_page_names_the_metrics_that_exist():
    async def scrape():
        async with served() as server:
            return await ask(server.addresses.public, path="/metrics", method="GET")

    text = asyncio.run(scrape()).body.decode()
    for name in re.findall(r"`(widebeam_\w+)", PAGE):
        assert f"# TYPE {name} " in text, name
