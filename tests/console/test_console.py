"""The console as a person sees and uses it: a real server, a real browser, pictures in `build/console/` to look at."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.console import root as toy
from tests.console.browser import Tab, chromium
from tests.served.process import serving

PICTURES = Path(__file__).parents[2] / "build" / "console"
LOOKS = [(width, theme) for width in (1280, 400) for theme in ("light", "dark")]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def tab(browser):
    made = Tab(browser)
    made.look(1280, 900, "light")
    yield made
    assert made.complaints() == []


def opened(tab, server, token=toy.WRITE):
    """The page after a person typed a token."""
    tab.open(server.admin)
    tab.sees("This server wants a token")
    tab.type(token)
    tab.click("Open")


def ask(server, seconds, version=None):
    """Clients for a while, until an answer names these weights."""
    end, n = time.monotonic() + 60, 0
    least = time.monotonic() + seconds
    while True:
        answer = server.ask("i1", "i2", user_id=f"u{n}").json()
        n += 1
        if time.monotonic() > least and version in {None, answer["versions"]["weights"]}:
            return
        assert time.monotonic() < end, answer["versions"]


def looked_again(tab):
    """Wait until the page has shown a status that it asked for after now."""

    def asked():
        tab.run("0")  # takes in what has happened
        return sum(url.endswith("/status") for url in tab.requests())

    before = asked()
    while asked() < before + 2:  # the second is sent when the first has been shown
        time.sleep(0.05)


def served(server):
    return server.ask("i1").json()["versions"]["weights"]


def write(server, path, **kwargs):
    headers = {"authorization": f"Bearer {toy.WRITE}"}
    return httpx.post(f"{server.admin}/admin/v1/{path}", headers=headers, timeout=60, **kwargs)


def test_without_a_token_the_page_holds_nothing_and_says_so(tab, tmp_path):
    with serving(toy.make(tmp_path)) as server:
        server.ready()
        opened(tab, server, "wrong")
        tab.sees("The server does not know this token")
        assert "Locked" in tab.text(".top")
        assert tab.run("document.getElementById('view').childElementCount") == 0
        tab.picture(PICTURES / "locked.png")
        tab.type(toy.READ)
        tab.press("Enter", 13)
        tab.click("Open")
        tab.sees("weights v1", "#memory")
        assert tab.run("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        tab.click("Forget the token")
        tab.sees("The token is forgotten")
        assert tab.run("[sessionStorage.length, document.getElementById('view').childElementCount]") == [0, 0]
        own = urlsplit(server.admin).netloc
        assert {urlsplit(url).netloc for url in tab.requests()} == {own}


def test_a_refused_version_and_a_wrong_policy_as_a_person_sees_them(tab, tmp_path):
    root = toy.make(tmp_path)
    with serving(root) as server:
        server.ready()
        opened(tab, server)
        ask(server, 4)
        toy.publish(root, "v2", 5)
        ask(server, 3, "v2")
        toy.publish_bad(root, "v3")
        toy.break_policy(root)
        (root / "policies" / "KILL").write_text(f"{toy.SCRIPT}\n")
        tab.sees("rejected", "#versions")
        assert "1 refused" in tab.text("#versions")
        assert "holds 256 NaN or infinite values" in tab.text("#versions")
        assert "not_finite at weights/v3/model.safetensors" in tab.text("#versions")
        tab.sees("unknown key `rank` in the policy", "#policies")
        assert "policies/narrow.yaml:3:1" in tab.text("#policies")
        assert tab.run("document.querySelector('.finding mark').textContent") == "rank"
        tab.sees("Killed", "#view")
        ask(server, 8, "v2")  # what was good serves on
        tab.until(r"/\d → \d+(\.\d+)? ms/.test(document.querySelector('#cutovers').innerText)")
        assert "newest weights v2" in " ".join(tab.text("#cutovers").split())
        assert "control" in tab.text("#experiments")
        # text of files is text, wherever it is shown
        assert toy.SCRIPT in tab.text("#policies")
        assert toy.SCRIPT in tab.text(".notes")
        assert tab.run("[typeof window.pwned, document.querySelectorAll('#view img, #view script').length]") == [
            "undefined",
            0,
        ]
        for width, theme in LOOKS:
            tab.look(width, 900, theme)
            tab.picture(PICTURES / f"overview-{width}-{theme}.png")
            assert tab.run("document.documentElement.scrollWidth") == width, theme
            assert tab.run(CONTRAST) == [], theme
        assert all(tab.names("button")), tab.names("button")
        assert all(tab.names("image")), tab.names("image")


def test_a_person_rolls_back_and_promotes(tab, tmp_path):
    root = toy.make(tmp_path)
    toy.publish(root, "v2", 5)
    with serving(root) as server:
        server.ready()
        assert served(server) == "v2"
        opened(tab, server)
        tab.click("Promote: Weights v1", "#versions")  # it is on the disk, and in no memory
        tab.sees("as soon as it is in memory", "dialog")
        tab.click("Promote", "dialog")
        tab.sees("Promoted weights v1", "#said")
        assert served(server) == "v1"
        tab.sees("Pinned to weights v1", "#serving")
        tab.click("Unpin: follow release.json or the newest versions again", "#serving")
        tab.click("Unpin", "dialog")
        tab.sees("Follows the newest versions", "#serving")
        ask(server, 0, "v2")

        tab.click("Roll back: weights v1 · vocab v1", "#memory")
        tab.sees("New requests go to weights v1", "dialog")
        tab.picture(PICTURES / "dialog.png")
        tab.click("Cancel", "dialog")
        tab.until("!document.querySelector('dialog').open")
        assert served(server) == "v2"

        tab.click("Roll back: weights v1 · vocab v1", "#memory")
        tab.until("document.querySelector('dialog').open")
        assert write(server, "snapshots:unpin").status_code == 200  # somebody else decides meanwhile
        tab.click("Roll back", "dialog")
        tab.sees("Something changed since this page looked", "#said")
        assert served(server) == "v2"

        looked_again(tab)
        tab.click("Roll back: weights v1 · vocab v1", "#memory")
        tab.click("Roll back", "dialog")
        tab.sees("Rolled back to weights v1", "#said")
        assert served(server) == "v1"
        tab.sees("rollback", "#cutovers")
        tab.picture(PICTURES / "rolled-back.png")
        server.until(lambda: len(server.said("decision")) == 2, "both said")
        assert [line["cause"] for line in server.said("decision")] == ["promote", "rollback"]


def test_a_read_token_looks_and_no_more(tab, tmp_path):
    root = toy.make(tmp_path)
    with serving(root) as server:
        server.ready()
        toy.publish(root, "v2", 5)
        ask(server, 0, "v2")
        opened(tab, server, toy.READ)
        tab.click("Roll back: weights v1 · vocab v1", "#memory")
        tab.click("Roll back", "dialog")
        tab.sees("this token may only read. Nothing was done.", "#said")
        assert served(server) == "v2"


def test_a_server_that_is_not_ready_drains_or_is_gone(tab, tmp_path):
    root = toy.make(tmp_path)
    (root / "weights" / "v1" / "MANIFEST.json").rename(root / "held-back")
    with serving(root) as server:
        opened(tab, server)
        tab.sees("Not ready")
        tab.sees("No snapshot is active")
        (root / "held-back").rename(root / "weights" / "v1" / "MANIFEST.json")
        server.ready()
        tab.until("document.getElementById('pill').textContent === 'Ready'")
        write(server, "drain")
        tab.until("document.getElementById('pill').textContent === 'Draining'")
        server.stop()
        tab.until("document.getElementById('pill').textContent === 'Unreachable'")
        assert "weights v1" in tab.text("#memory")  # what it was when it was seen last


def test_a_loopback_server_without_tokens_asks_for_none(tab, tmp_path):
    root = toy.make(tmp_path)
    toml = root / "deployment.toml"
    toml.write_text(
        toml.read_text().replace('admin_auth = "token"\nadmin_tokens = "admin.tokens"', 'admin_auth = "none"')
    )
    with serving(root) as server:
        server.ready()
        tab.open(f"{server.admin}/console/")
        tab.sees("weights v1", "#memory")
        assert tab.run("document.getElementById('locked').hidden")
        # what a page of another origin can send does nothing
        headers = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
        assert httpx.post(f"{server.admin}/admin/v1/drain", headers=headers, timeout=60).status_code == 403
        url = f"{server.admin}/admin/v1/status"
        assert httpx.get(url, headers={"host": "evil.example"}, timeout=60).status_code == 403
        assert served(server) == "v1"
