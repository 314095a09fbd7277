"""Servers as processes where the machine gives them less than they ask for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import httpx
import pytest

from tests import support
from tests.served.process import PATIENCE_S, Server

HELD = """
import sys, threading
from app.cli.main import run
from app.runtime import loader, preparing

real, version = preparing.read_weights, sys.argv.pop()

def held(directory, *rest):
    if directory.name == version:
        print("held", flush=True)
        threading.Event().wait()
    return real(directory, *rest)

loader.read_weights = preparing.read_weights = held
run()
"""
"""`widebeam` with a load of one weights version that never ends, as on a disk that does not answer."""


def test_a_root_that_is_not_there_is_a_wrong_command_line(tmp_path):
    command = [sys.executable, "-m", "app", "serve", "--root", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "does not exist" in done.stderr


def test_a_port_that_is_taken_ends_the_server_with_what_to_do(tmp_path):
    root = support.write_root(tmp_path / "root")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "app", "serve", "--root", str(root), "--port", "0", "--admin-port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "choose another admin_port with --admin-port or under [server] (0 = any free one" in line


@pytest.mark.slow
def test_without_a_single_inotify_watch_changes_are_found_by_looking(tmp_path):
    """Linux keeps the number of watches by user namespace, so a real one can be taken away from one process."""
    none = "echo 0 > /proc/sys/user/max_inotify_watches"
    unshare = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    if subprocess.run([*unshare, none], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    root = support.write_root(tmp_path / "root")
    serve = f"{none}; exec {sys.executable} -m app serve --root {root} --port 0 --admin-port 0"
    with subprocess.Popen([*unshare, serve], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            server = Server(process, root).ready()
            watch = server.status()["watch"]
            assert watch["mode"] == "polling", watch
            assert watch["reason"], watch
            support.write_weights(root, support.onerec_config((4, 5, 6)), support.onerec_weights(
                support.onerec_config((4, 5, 6)), 1), "v2")  # fmt: skip
            server.until(lambda: server.status()["active"]["weights"]["version"] == "v2", "live by looking")
            assert server.said("watch_failed")
            assert httpx.get(f"{server.public}/livez", timeout=PATIENCE_S).status_code == 200
            assert server.stop() == 0
            server.client.close()
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_signal_in_the_middle_of_a_load_ends_the_server_in_order_and_at_once(tmp_path, version):
    """Of the first weights, before anything serves, and of others beside what serves."""
    root = support.write_root(tmp_path / "root")
    config = support.onerec_config((4, 5, 6))
    command = [sys.executable, "-c", HELD, "serve", "--root", str(root), version]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process:
        try:
            server = Server(process, root)
            if version == "v2":
                server.ready()
                support.write_weights(root, config, support.onerec_weights(config, 1), version)
            server.until(lambda: any(line.get("text") == "held\n" for line in list(server.lines)), "loading")
            assert httpx.get(f"{server.public}/livez", timeout=PATIENCE_S).status_code == 200
            assert server.client.get("/readyz").status_code == (200 if version == "v2" else 503)
            assert server.stop() == 0  # within its patience; the load is never done
            assert [line for line in server.lines if line.get("event") == "stopped"]
            server.client.close()
        finally:
            if process.poll() is None:
                process.kill()
