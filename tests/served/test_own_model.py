"""docs/own-model.md, done: from a checkpoint and a table to a server, a policy, a live swap and the way back."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.served.page import PART, Reader, masked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-model.md").read_text("utf-8")


def active(reader, kind):
    return reader.server.status()["active"][kind]["version"]


def waits(reader):
    """What a reader waits for after a command or a file, since the page says that it comes."""

    def default():
        return reader.server.ask("sku-3").json()["versions"]["policy"] == "shelf"

    def shelf():
        return reader.server.ask("sku-3", policy="shelf").status_code == 200

    return {
        "widebeam weights publish model-2 --root shop": lambda: active(reader, "weights") == "v2",
        "widebeam snapshot unpin": lambda: (active(reader, "weights"), active(reader, "vocab")) == ("v2", "v2"),
        "shop/policies/shelf.yaml": shelf,
        "shop/policies/traffic.yaml": default,
        "widebeam vocab import --format jsonl items.jsonl --root shop": lambda: (
            reader.server is None or active(reader, "vocab") == "v2"
        ),
    }


@pytest.mark.timeout(600)
def test_the_page_from_a_checkpoint_to_a_rollback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        reader = Reader(tmp_path, stack)
        known, files = waits(reader), []
        for file, language, text in PART.findall(PAGE):
            if file:
                (tmp_path / file).write_text(text)
                files.append(file)
            elif language == "text":
                assert masked(reader.last).endswith(text), reader.last
                continue
            else:
                assert language == "console"
            for line in [file] if file else text.splitlines():
                if not file:
                    reader.line(line)
                look = next((look for part, look in known.items() if line.startswith(part)), None)
                if look is not None and reader.server is not None:
                    reader.sees(look, line)
        results(reader)
    assert files == [
        "stand_in.py", "shop/deployment.toml", "shop/policies/base.yaml", "shop/policies/shelf.yaml",
        "shop/policies/traffic.yaml",
    ]  # fmt: skip


def results(reader):
    """What the page says about what came."""
    table = {one["id"]: one for one in map(json.loads, Path("items.jsonl").read_text().splitlines())}
    asked = [json.loads(out) for line, out in reader.said if "/v1/recommend" in line and '"history"' in line]
    first, named, everybody, swapped = asked
    assert [one["versions"]["policy"] for one in asked] == ["base", "shelf", "shelf", "shelf"]
    assert [one["versions"]["weights"] for one in asked] == ["v1", "v1", "v1", "v2"]
    for answer in asked:
        assert len(answer["items"]) == 5
        assert all(table[item["id"]]["sid"] == item["sid"] for item in answer["items"])
    assert [item["id"] for item in named["items"]] == [item["id"] for item in everybody["items"]]
    assert named["items"] != first["items"]
    assert swapped["items"] != everybody["items"]
    for answer in (named, everybody, swapped):
        shown = [table[item["id"]]["attrs"] for item in answer["items"]]
        assert max([one["brand"] for one in shown].count(brand) for brand in ("acme", "umbra", "zenit")) <= 2
        assert all(one["stock"] for one in shown)
        assert not {"sku-3", "sku-14", "sku-15"} & {item["id"] for item in answer["items"]}
    said = dict(reader.said)
    back = next(out for line, out in said.items() if line.startswith("widebeam snapshot rollback"))
    assert "active" in back
    assert json.loads(reader.server.client.get("/readyz").content)["ready"]
    assert (active(reader, "weights"), active(reader, "vocab")) == ("v2", "v2")


def test_the_page_is_linked_and_its_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "docs" / "models.md", ROOT / "docs" / "vocab.md"):
        assert "own-model.md" in page.read_text("utf-8"), page
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", PAGE):
        file = ROOT / "docs" / target if target else ROOT / "docs" / "own-model.md"
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            named = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in named, (target, anchor)
