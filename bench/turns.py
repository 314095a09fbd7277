"""What a thread of pure Python does to a thread that launches, by the length of a turn (`app.cli.serve.SWITCH_S`).

    python -m bench.turns [--seconds 1] [--turns-us 5000 500 200 100 50 20 10]

A launch gives the interpreter away; to have it again, the thread waits a turn of whoever took it. Here a launch is a
small operator of torch on the CPU, and the other threads make dictionaries of strings, as a load or the event loop do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time

import torch

from bench._report import table

LAUNCHES = 300


def measured(turn_s: float, others: int, seconds: float) -> tuple[list[float], float]:
    """Milliseconds of `LAUNCHES` launches, each time; what the other threads did in a second."""
    sys.setswitchinterval(turn_s)
    over, done = threading.Event(), [0] * others

    def compute(which: int) -> None:
        while not over.is_set():
            {number: str(number) for number in range(200)}
            done[which] += 1

    threads = [threading.Thread(target=compute, args=(which,)) for which in range(others)]
    for thread in threads:
        thread.start()
    x, times = torch.zeros(64), list[float]()
    before, began = sum(done), time.perf_counter()
    while time.perf_counter() - began < seconds:
        first = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1)
        times.append(1e3 * (time.perf_counter() - first))
    speed = (sum(done) - before) / (time.perf_counter() - began)
    over.set()
    for thread in threads:
        thread.join()
    return times, speed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns-us", type=float, nargs="+", default=[5000, 500, 200, 100, 50, 20, 10])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[list[str]]()
    for others in (0, 1, 2):
        for turn in args.turns_us if others else args.turns_us[:1]:
            times, speed = measured(turn * 1e-6, others, args.seconds)
            half, most = statistics.median(times), max(times)
            rows.append([str(others), f"{turn:g}" if others else "-", f"{half:.2f}", f"{most:.2f}", f"{speed:.0f}"])
    print(table(["other threads", "turn, us", f"{LAUNCHES} launches, median ms", "most ms", "their rounds/s"], rows))


if __name__ == "__main__":
    main()
