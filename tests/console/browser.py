"""Headless Chromium, driven by its own protocol over a pipe: no driver, no library, no open port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--hide-scrollbars", "--font-render-hinting=none", "--remote-debugging-pipe",
)  # fmt: skip
LONGEST_S = 60.0


class Browser:
    """One process and its two pipes. Messages are JSON, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program, "Chromium is needed: `apt-get install chromium`"
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._buffer = 0, b""
        self.events: list[dict] = []

    def send(self, method: str, session: str | None = None, **params: object) -> dict:
        """Call a method and wait for its result; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next(time.monotonic() + LONGEST_S)
            if reply.get("id") == number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self.events.append(reply)

    def _next(self, until: float) -> dict:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert readable, "Chromium does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """End it."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(60)


class Tab:
    """A page: look at it, click, type, take its picture. Everything waits until it can be done."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        context = browser.send("Target.createBrowserContext")["browserContextId"]
        target = browser.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: object) -> dict:
        """A method of this page."""
        return self._browser.send(method, self._session, **params)

    def events(self, method: str) -> list[dict]:
        """What this page has told so far."""
        mine = [one for one in self._browser.events if one.get("sessionId") == self._session]
        return [one["params"] for one in mine if one["method"] == method]

    def look(self, width: int, height: int, theme: str) -> None:
        """Size in CSS pixels, and light or dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> object:
        """The value of an expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> object:
        """Wait for an expression to become true; the bound only ends a test that has failed."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.text())
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """What a person reads there; "" where there is nothing."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def sees(self, text: str, selector: str = "body", seconds: float = 60.0) -> None:
        """Wait until a text can be read."""
        where = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
        self.until(f"{where}.includes({json.dumps(text)})", seconds)

    def click(self, label: str, within: str = "body") -> None:
        """Press the button with this text, or this accessible name, with the mouse; again where it has just moved."""
        aim = f"""(() => {{
            const names = (one) => [one?.innerText.trim(), one?.getAttribute("aria-label")];
            const named = (one) => names(one).includes({json.dumps(label)});
            const all = document.querySelector({json.dumps(within)})?.querySelectorAll("button") ?? [];
            const one = [...all].find((one) => one.checkVisibility() && named(one));
            if (!one) return null;
            const heard = (event) => {{ document.pressed = named(event.target.closest("button")); }};
            document.pressed = false;
            document.addEventListener("click", heard, {{capture: true, once: true}});
            one.scrollIntoView({{block: "center"}});
            const box = one.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        hit = False
        while not hit:
            place = self.until(aim)
            assert isinstance(place, list)
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
            hit = bool(self.run("document.pressed"))

    def type(self, text: str) -> None:
        """Write where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> Path:
        """The whole page as a PNG."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.run("scrollTo(0, 0)")
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
        return file

    def complaints(self) -> list[str]:
        """Exceptions of scripts, refusals by the content policy, failed loads other than refused API calls."""
        thrown = [one["exceptionDetails"]["text"] for one in self.events("Runtime.exceptionThrown")]
        logged = [one["entry"] for one in self.events("Log.entryAdded")]
        written = [one for one in self.events("Runtime.consoleAPICalled") if one["type"] in {"error", "warning"}]
        refused = ("status of 401", "status of 403", "status of 412", "status of 422", "ERR_CONNECTION_REFUSED")
        entries = [one["text"] for one in logged if not any(known in one["text"] for known in refused)]
        return [*thrown, *entries, *map(str, written)]

    def requests(self) -> list[str]:
        """The URLs that the page has asked for."""
        return [one["request"]["url"] for one in self.events("Network.requestWillBeSent")]

    def names(self, role: str) -> list[str]:
        """The accessible names of everything with a role."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        mine = [one for one in nodes if one.get("role", {}).get("value") == role and not one["ignored"]]
        return [one.get("name", {}).get("value", "") for one in mine]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser of its own profile."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
