"""A server that does nothing: it reads a request and writes an answer that another server made.

    python -m bench._nothing ANSWER        a file with the whole response; prints the port

What clients see of it is what they, their sockets and two threads that wake up cost, with the same bytes both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from app.cli.load import Target
from app.cli.loop import run

END = b"\r\n\r\n"


class Nothing(asyncio.Protocol):
    """A connection with one request at a time, whose head says how long its body is."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self._read = answer, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._read += data
        head, end, body = self._read.partition(END)
        if end and len(body) >= length(head) and self._transport is not None:
            self._read = b""
            self._transport.write(self._answer)


def length(head: bytes) -> int:
    """Bytes of the body, as a head says. Raises ValueError where it does not."""
    lines = (line.partition(b":") for line in head.split(b"\r\n"))
    return int(next((value for name, _, value in lines if name.lower() == b"content-length"), b"none"))


def response(target: Target, body: bytes) -> bytes:
    """What a server answers to a request, head and body. Raises RuntimeError where it is not 200."""
    read, size = b"", 0
    with socket.create_connection((target.host, target.port)) as connection:
        connection.sendall(target.message(body))
        while not size or len(read) < size:
            more = connection.recv(1 << 18)
            if not more or not (read + more).startswith(b"HTTP/1.1 200 "[: len(read + more)]):
                raise RuntimeError(f"no answer: {(read + more)[:300]!r}")
            read += more
            head, end, _ = read.partition(END)
            size = len(head) + len(END) + length(head) if end else 0
    return read


@contextmanager
def nothing(answer: bytes, work: Path) -> Iterator[Target]:
    """A process that answers so, and where it listens."""
    file = work / "answer"
    file.write_bytes(answer)
    command = [sys.executable, "-m", "bench._nothing", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as process:
        assert process.stdout is not None
        try:
            yield Target.parse(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.kill()


async def _serve(answer: bytes) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Nothing(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answer", type=Path)
    run(_serve(parser.parse_args().answer.read_bytes()))


if __name__ == "__main__":
    main()
