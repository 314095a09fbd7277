"""`widebeam demo`: the main job on real data, end to end: a server process, three users over HTTP, a table."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from app.errors import NotReady, WidebeamError
from app.vocab.artifact import open_vocab
from app.vocab.items import Texts

SHOWN = 10
WATCHED = 6
START_TIMEOUT_S = 600.0
"""A slow machine, or one that exports a contract first, is given time: whoever waits sees that it starts."""


class User(msgspec.Struct, frozen=True):
    """One line of examples/movielens/users.json: a person's ratings in time order; `held_out` came after them."""

    id: str
    history: list[str]
    held_out: str | None = None


class Running(NamedTuple):
    """A server process of ours and where it listens."""

    process: subprocess.Popen[bytes]
    public: str
    admin: str


def demo(
    root: Annotated[Path, typer.Option(help="Deployment root")] = Path(),
    users: Annotated[Path | None, typer.Option(help="JSON list of users; default: the MovieLens example's")] = None,
    k: Annotated[int, typer.Option(min=1, help="How many items to ask for")] = SHOWN,
    keep: Annotated[bool, typer.Option(help="Leave the server running until Ctrl-C")] = False,
) -> None:
    """Start a server on ROOT, recommend for three users, print, stop."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    console = Console()
    asked = read_users(users or root / "examples" / "movielens" / "users.json")[:3]
    with started(root, console) as server, httpx.Client(base_url=server.public, timeout=60) as client:
        answers = [ask(client, user, k) for user in asked]
        titles = read_titles(root, msgspec.convert(answers[0]["versions"], dict[str, str])["vocab"])
        for user, answer in zip(asked, answers, strict=True):
            show(console, user, answer, titles)
        if keep:
            console.print(curl(server.public, asked[0]), soft_wrap=True, highlight=False)
            console.print(f"serving at {server.public} until Ctrl-C")
            wait_for_interrupt(server.process)


def read_users(file: Path) -> list[User]:
    """The users to ask for. Raises WidebeamError with the file where it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[User])
    except OSError as error:
        raise WidebeamError(f"{file}: {error.strerror}; --users names another file, for a root of your own") from error
    except msgspec.DecodeError as error:
        raise WidebeamError(f"{file}: {error}") from error


def read_titles(root: Path, version: str) -> Mapping[str, str]:
    """Titles by item id from the vocab that serves; ids stand for themselves where it has none."""
    vocab = open_vocab(root / "vocab" / version)
    column = vocab.attributes.get("title")
    if not isinstance(column, Texts):
        return {}
    ids = vocab.ids(range(len(vocab)))
    return {item: column.words.get(code) for item, code in zip(ids, column.codes.tolist(), strict=True) if code >= 0}


@contextmanager
def started(root: Path, console: Console) -> Iterator[Running]:
    """A server process on free loopback ports, ready; stopped (SIGTERM, exit 0) at the end."""
    command = [sys.executable, "-m", "app", "serve", "--root", str(root), "--host", "127.0.0.1"]
    command += ["--port", "0", "--admin-port", "0"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603  our own interpreter and module
        try:
            server = _listening(process)
            _until_ready(server)
            console.print(f"server ready after {time.monotonic() - began:.1f} s at {server.public}")
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _listening(process: subprocess.Popen[bytes]) -> Running:
    """Read the server's log until it says where it listens; a thread drains the rest, so that it never blocks."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            event = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError:
            continue
        if event.get("event") == "listening":
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return Running(process, str(event["public"]), str(event["admin"]))
    raise NotReady(f"the server ended with exit code {process.wait()}")


def _until_ready(server: Running) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        ready = httpx.get(f"{server.public}/readyz", timeout=60).json()
        if ready["ready"]:
            return
        starting = any(reason.startswith("starting") for reason in ready["reasons"])
        if not starting or time.monotonic() > deadline:
            raise NotReady("; ".join(ready["reasons"]))
        time.sleep(0.05)


def ask(client: httpx.Client, user: User, k: int) -> dict[str, object]:
    """POST /v1/recommend for one user. Raises WidebeamError with the server's words where it is refused."""
    body = {"user_id": user.id, "context": {"history": user.history}, "k": k}
    answer = client.post("/v1/recommend", json=body)
    if answer.is_error:
        raise WidebeamError(f"{answer.status_code}: {answer.text}")
    return msgspec.json.decode(answer.content, type=dict[str, object])


def show(console: Console, user: User, answer: Mapping[str, object], titles: Mapping[str, str]) -> None:
    """What the user watched and what is recommended, as a table; the item rated next in the data is marked."""
    watched = "; ".join(titles.get(item, item) for item in user.history[-WATCHED:])
    console.print()
    console.print(f"user {user.id} ({len(user.history)} films), last: {watched}", highlight=False)
    table = Table("", "title", "id", "score", "SID", "watched next")
    items = msgspec.convert(answer["items"], list[dict[str, object]])
    for place, item in enumerate(items, 1):
        name, sid = str(item["id"]), msgspec.convert(item["sid"], list[int])
        mark = "yes" if name == user.held_out else ""
        score = msgspec.convert(item["score"], float)
        table.add_row(str(place), titles.get(name, name), name, f"{score:.3f}", " ".join(map(str, sid)), mark)
    console.print(table)
    times = msgspec.convert(answer["timings_ms"], dict[str, float])
    versions = msgspec.convert(answer["versions"], dict[str, str])
    console.print("ms: " + ", ".join(f"{name} {value:.1f}" for name, value in times.items()), highlight=False)
    console.print("versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()), highlight=False)


def curl(public: str, user: User) -> str:
    """The same question from a shell."""
    body = msgspec.json.encode({"context": {"history": user.history[-3:]}, "k": 5}).decode()
    return f"\ncurl -s {public}/v1/recommend -H 'Content-Type: application/json' -d '{body}'"


def wait_for_interrupt(process: subprocess.Popen[bytes]) -> None:
    """Until Ctrl-C, or until the server ends by itself."""
    try:
        process.wait()
    except KeyboardInterrupt:
        return
