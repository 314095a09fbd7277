"""The commands of docker/Dockerfile.cpu, run without Docker: what is copied, the install in a fresh environment, the
entry point as another user on a root that it cannot write to, the health check, the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.test_docker import ROOT, commands, instructions, of, tracked

UID = 10001
SOMEBODY = {"user": UID, "group": UID, "extra_groups": []}


def python() -> tuple[str, dict]:
    """An interpreter that the image's user could run, and how to be that user: as root only, and only where there is
    one outside of root's home; else this one, as whoever runs the tests."""
    if os.geteuid() == 0:
        for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
            asked = [program, "-c", "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"]
            try:
                done = subprocess.run(asked, cwd="/", check=False, capture_output=True, **SOMEBODY)
            except OSError:
                continue
            if done.returncode == 0:
                return program, SOMEBODY
    return sys.executable, {}


@pytest.fixture(name="place", scope="module")
def installed():
    """opt/ with the environment, made of what the build stage copies, which `files` lists; readable by everybody."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        build = instructions("Dockerfile.cpu")[0]
        sources = [source for line in of(build, "COPY") for source in line.split()[:-1]]
        copied = [one for one in tracked() if any(one == source or one.startswith(f"{source}/") for source in sources)]
        (place / "files").write_text("\n".join(copied))
        for file in copied:
            (place / "src" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place / "src" / file)
        subprocess.run([python()[0], "-m", "venv", place / "opt"], check=True)
        install = [word.replace("/opt/widebeam", str(place / "opt")) for word in commands("Dockerfile.cpu")[0]]
        install.remove("--no-cache-dir")  # an image has no cache to use; a machine that runs this often does
        subprocess.run([*install, "--quiet"], check=True, cwd=place / "src")
        shutil.rmtree(place / "src")  # the runtime stage does not have it
        yield place


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_the_image_s_commands_serve_the_demo_and_end(place):
    root, state = place / "srv", place / "state"
    for folder in ("weights", "vocab", "policies"):
        shutil.copytree(ROOT / folder, root / folder)
    text = (ROOT / "docker" / "demo.toml").read_text().replace("/var/lib/widebeam", str(state))
    (root / "deployment.toml").write_text(text)
    (root / "admin.tokens").write_text("read r-token\nwrite w-token\n")
    state.mkdir()
    other = python()[1]
    if other:  # as in the image: somebody who owns nothing but the state
        os.chown(state, UID, UID)
    public, admin = free_ports(2)
    _, entry, health = commands("Dockerfile.cpu")
    words = {"/srv/widebeam": str(root), "8000": str(public), "8001": str(admin), "0.0.0.0": "127.0.0.1"}
    entry = [words.get(word, word.replace("/opt/widebeam", str(place / "opt"))) for word in entry]
    health = [word.replace("/opt/widebeam", str(place / "opt")).replace(":8000/", f":{public}/") for word in health]
    bin_only = {"PATH": "/nothing", "HOME": str(state), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    bin_only["OMP_WAIT_POLICY"] = "passive"  # the engine's threads sleep while they wait: others may want the cores
    before = everything(root)
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(entry, stdout=log, stderr=log, cwd="/", env=bin_only, **other)
    try:
        base = f"http://127.0.0.1:{public}"
        wait(server, lambda: httpx.get(f"{base}/readyz", timeout=60).status_code == 200, place / "log")
        assert subprocess.run(health, env=bin_only, check=False).returncode == 0
        body = {"context": {"history": ["296", "318", "593"]}, "k": 5}
        answer = httpx.post(f"{base}/v1/recommend", json=body, timeout=60).json()
        assert len(answer["items"]) == 5, answer
        console = httpx.get(f"http://127.0.0.1:{admin}/console/", timeout=60)
        assert (console.status_code, "Widebeam" in console.text) == (200, True)
        url = f"http://127.0.0.1:{admin}/admin/v1/status"
        status = httpx.get(url, headers={"authorization": "Bearer r-token"}, timeout=60)
        assert status.json()["ready"]
        assert everything(root) == before
        assert list((state / "contracts").glob("*.json"))  # made by this start, read by the next
        server.send_signal(signal.SIGTERM)
        assert server.wait(45) == 0
        assert subprocess.run(health, env=bin_only, check=False, stderr=subprocess.DEVNULL).returncode != 0
    finally:
        server.kill()
        server.wait()


def wait(server: subprocess.Popen, true, log: Path) -> None:
    end = time.monotonic() + 400  # only ends a test that has failed: torch starts twice, on a machine that may be busy
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        try:
            if true():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def test_the_package_brings_its_files(place):
    (package,) = (place / "opt" / "lib").glob("python3.*/site-packages/app")
    copied = (place / "files").read_text().splitlines()
    mine = {Path(one).relative_to("app") for one in copied if one.startswith("app/")}
    assert mine == {
        path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
