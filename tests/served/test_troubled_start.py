"""Servers as processes where the machine gives them less than they ask for."""

from __future__ import annotations

import socket
import subprocess
import sys

import httpx
import pytest

from tests import support
from tests.served.process import PATIENCE_S, Server


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
