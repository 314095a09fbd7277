"""What is in docker/ fits the tree. No image is built here; tests/docker runs the same commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest
import typer
import yaml

from app.cli.serve import serve
from app.config import parse

ROOT = Path(__file__).parent.parent
FILES = ("Dockerfile.cpu", "Dockerfile.gpu")
UID = "10001:10001"


def instructions(name: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    stages: list[list[tuple[str, str]]] = []
    for word, rest in lines:
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, rest))
    return stages


def of(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def tracked() -> list[str]:
    """The files of the tree as they are now."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [one for one in found if (ROOT / one).is_file()]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build: the last rule for it, or for a folder above it, decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        keeps, pattern = rule.startswith("!"), rule.removeprefix("!")
        parts = [str(one) for one in (PurePosixPath(path), *PurePosixPath(path).parents)][:-1]
        names = (pattern, pattern.removeprefix("**/"))
        if any(fnmatch(part, one) and part.count("/") == one.count("/") for part in parts for one in names):
            out = not keeps
    return out


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_is_not_ignored(name):
    build, run = instructions(name)
    sources = [source for line in of(build, "COPY") for source in line.split()[:-1]]
    assert {"app", "constraints.txt", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {package["readme"], *package["license-files"]} <= set(sources)  # the build reads them
    for line in of(run, "COPY"):
        assert line.startswith("--from=build /opt/widebeam "), line
    assert ignored("state/pin.json")
    assert ignored("docker/admin.tokens")
    assert ignored(".git")


@pytest.mark.parametrize("name", FILES)
def test_the_image_runs_without_root_without_a_shell_and_without_a_compiler(name):
    build, run = instructions(name)
    assert of(run, "USER") == [UID]
    for word in ("ENTRYPOINT", "HEALTHCHECK"):
        (line,) = of(run, word)
        command = json.loads(line[line.index("[") :])
        assert command[0].startswith("/opt/widebeam/bin/"), command
    assert of(run, "STOPSIGNAL") == ["SIGTERM"]
    assert all("apt" not in line and "curl" not in line for line in of(run, "RUN") + of(run, "HEALTHCHECK"))
    assert of(run, "FROM")[0].endswith("-slim-bookworm")
    (install,) = [line for line in of(build, "RUN") if " pip install" in line]
    assert "--constraint constraints.txt" in install
    extras = re.search(r"'\.\[(\w+)\]'", install)
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (extras is not None and extras[1] in optional) == (name == "Dockerfile.gpu")


def test_the_two_images_differ_in_what_a_gpu_needs_and_in_nothing_else():
    cpu, gpu = ({(word, rest) for stage in instructions(name) for word, rest in stage} for name in FILES)
    assert {word for word, _ in cpu ^ gpu} == {"RUN", "ENV"}


def test_every_file_of_the_package_that_is_no_python_is_package_data():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["app"]
    there = {path for pattern in tool for path in (ROOT / "app").glob(pattern)}
    other = {ROOT / one for one in tracked() if one.startswith("app/") and not one.endswith(".py")}
    assert other <= there
    assert any(path.suffix == ".cu" for path in other)
    assert ROOT / "app" / "api" / "console" / "index.html" in other


def compose() -> dict:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def test_the_compose_file_mounts_what_exists_read_only_and_waits_longer_than_a_drain():
    document = compose()
    settings = parse((ROOT / "docker" / "demo.toml").read_text()).server
    for name, service in document["services"].items():
        assert (ROOT / service["build"]["dockerfile"]).is_file(), name
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > settings.drain_delay_s + settings.drain_timeout_s + 5
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for mount in service["volumes"]:
            source, target, *mode = mount.split(":")
            if source in document["volumes"]:
                assert target == settings.state_dir
                continue
            assert mode == ["ro"], mount
            assert (ROOT / "docker" / source).exists() or source == "./admin.tokens", mount
    assert document["services"]["widebeam-gpu"]["profiles"] == ["gpu"]


def test_on_a_gpu_http_has_a_process_of_its_own(tmp_path):
    entry = json.loads(*of(instructions("Dockerfile.gpu")[-1], "ENTRYPOINT"))
    entry[entry.index("--root") + 1] = str(tmp_path)
    program = typer.Typer()
    program.command()(serve)
    given = typer.main.get_command(program).make_context(
        "serve", [*entry[2:], *compose()["services"]["widebeam-gpu"]["command"]]
    )
    assert (given.params["front_ends"], given.params["port"]) == (1, 8000)


def test_the_demo_in_a_container_is_the_demo():
    demo, inside = ((ROOT / file).read_text() for file in ("deployment.toml", "docker/demo.toml"))
    left, right = tomllib.loads(demo), tomllib.loads(inside)
    assert right.pop("server") == {
        "admin_tokens": "admin.tokens",
        "state_dir": "/var/lib/widebeam",
        "policy_override": True,
    }
    left.pop("server")
    assert left == right
    assert parse(inside).server.admin_auth == "token"  # 0.0.0.0 wants one


def test_the_tokens_are_in_no_commit():
    assert "docker/admin.tokens" not in tracked()
    assert "docker/admin.tokens" in (ROOT / ".gitignore").read_text().splitlines()


def commands(name: str) -> tuple[list[str], list[str], list[str]]:
    """What a file runs: the install, the entry point, the health check."""
    build, run = instructions(name)
    (install,) = [line for line in of(build, "RUN") if " pip install" in line]
    entry, health = (line[line.index("[") :] for line in (*of(run, "ENTRYPOINT"), *of(run, "HEALTHCHECK")))
    return shlex.split(install), json.loads(entry), json.loads(health)
