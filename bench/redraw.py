"""Tables and plots again, from the JSON of results that are there: after runs of several hosts were put together, say.

python -m bench.redraw [bench/results/e2e.json ..]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import _e2e_report, attention, device_ops, selection, steps
from bench._report import Row, Shown, save

RESULTS = Path(__file__).parent / "results"
KNOWN: Mapping[str, Callable[[Row, str], Shown]] = {
    "attention": attention.shown,
    "device_ops": device_ops.shown,
    "e2e": _e2e_report.shown,
    "e2e_4b_moe": _e2e_report.shown,
    "selection": selection.shown,
    "steps": steps.shown,
}
"""By the name of a result's file."""


def main() -> None:
    """Those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [file for name in KNOWN if (file := RESULTS / f"{name}.json").exists()]
    parser.add_argument("file", nargs="*", type=Path, default=every)
    for file in parser.parse_args().file:
        if file.stem not in KNOWN:
            parser.error(f"{file}: known are {', '.join(KNOWN)}")
        document = json.loads(file.read_text("utf-8"))
        save(file, document, KNOWN[file.stem](document, file.stem))


if __name__ == "__main__":
    main()
