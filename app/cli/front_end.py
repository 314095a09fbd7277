"""A front end's process: `serve` starts it, nobody else does.

python -m app.cli.front_end LISTENER ENGINE      numbers of two descriptors that it has inherited
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, Final

import app
from app.cli import loop

ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""It computes nothing: NumPy's threads would only lie about."""
OURS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals to the whole process group are for the process that owns it; a front end leaves when that one says so."""


def start(listener: int, engine: int, log: BinaryIO | None = None) -> subprocess.Popen[bytes]:
    """Start one; see `front_ends.Start`. log: where its lines go, None = where this process' output goes. Raises
    OSError."""
    home = str(Path(app.__file__).parent.parent)  # of this very program, whatever lies in the working directory
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)  # of this thread, and so of the process that it starts
    try:
        return subprocess.Popen(  # noqa: S603  ourselves
            [sys.executable, "-P", "-m", "app.cli.front_end", str(listener), str(engine)],
            pass_fds=(listener, engine),
            stdin=subprocess.DEVNULL,
            stdout=log,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """Serve with the descriptors of the command line."""
    from app.api import front_end  # noqa: PLC0415  who only starts one needs nothing of it

    listener, engine = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    loop.run(front_end.run(listener, engine, sys.stdout.buffer))


if __name__ == "__main__":
    main()
