"""What the GPU tests said on a GPU, from their JUnit files into docs/gpu.md: a result is recorded by one command.

    python -m bench.gpu_tests about > ROUND/about.json     on the machine with the GPU, beside the JUnit files
    python -m bench.gpu_tests record ROUND                 in a clone: bench/results/gpu_tests.json and docs/gpu.md
    python -m bench.gpu_tests page                         docs/gpu.md anew, where tests/gpu has other files

`record` reads ROUND/about.json and every XML file below ROUND. A file of tests that ran replaces what was known of it;
of the others that stays. Cases that ran twice count once: as failed where one failed. Those that are in the file and
did not run, because the round was over, are counted as "not run".
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

import torch

from bench._report import commit, gpu_model, table

CLONE = Path(__file__).parent.parent
KNOWN = CLONE / "bench" / "results" / "gpu_tests.json"
PAGE = CLONE / "docs" / "gpu.md"
BEGIN, END = "<!-- tests/gpu: made by bench.gpu_tests -->", "<!-- end of tests/gpu -->"
WORST = ("passed", "skipped", "failed")
SHOWN = (*WORST, "not run")
NAMED = 5
"""Failures that the table names, a file; the JSON names all."""
Row = dict[str, Any]


def about() -> Row:
    """Where tests run."""
    return {"commit": commit(), "device": gpu_model(), "torch": torch.__version__, "python": platform.python_version()}


def read(text: str) -> Iterator[tuple[str, str, float, str]]:
    """Each case of a JUnit file: its test file, its name, seconds, and "passed", "skipped" or "failed". One that was
    running when pytest was interrupted has no name, and has said nothing."""
    for case in Tree.fromstring(text).iter("testcase"):
        if not case.get("name"):
            continue
        place = case.get("classname", "").split(".")
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        yield "/".join(place) + ".py", case.get("name", ""), float(case.get("time", 0.0)), result


def collected() -> dict[str, int]:
    """How many cases each file of tests/gpu has."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/gpu"]
    said = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, check=True).stdout
    return {file: int(count) for file, count in re.findall(r"^(tests/gpu/\S+\.py): (\d+)$", said, re.MULTILINE)}


def found(files: Sequence[Path], made: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, Row]:
    """What each file of tests has said; known: how many cases it has. Empty XML files say nothing."""
    results: dict[str, dict[str, tuple[float, str]]] = {}
    for file in files:
        text = file.read_text("utf-8")
        for place, name, seconds, result in read(text) if text.strip() else ():
            ran = results.setdefault(place, {})
            before = ran.get(name, (0.0, "passed"))
            ran[name] = (max(seconds, before[0]), max(result, before[1], key=WORST.index))
    return {place: _summed(one, known.get(place, 0)) | dict(made) for place, one in sorted(results.items())}


def _summed(ran: Mapping[str, tuple[float, str]], cases: int) -> Row:
    counts = {kind: sum(result == kind for _, result in ran.values()) for kind in WORST}
    failures = sorted(name for name, (_, result) in ran.items() if result == "failed")
    seconds = round(sum(seconds for seconds, _ in ran.values()), 1)
    return {**counts, "not run": max(0, cases - len(ran)), "seconds": seconds, "failures": failures}


def section(known: Mapping[str, Row], files: Sequence[str]) -> str:
    """The table between the page's marks: every file of tests/gpu, also those of which nothing is known."""
    rows = [[f"`{file.removeprefix('tests/gpu/').removesuffix('.py')}`", *_cells(known.get(file))] for file in files]
    return f"{BEGIN}\n\n{table(['tests/gpu', 'result', 'seconds', 'on', 'commit'], rows)}\n\n{END}"


def _cells(one: Row | None) -> list[str]:
    if one is None:
        return ["not run", "", "", ""]
    if "said" in one:  # before there were records
        return [one["said"], "", one["device"], one.get("commit", "")]
    parts = [f"{one[kind]} {kind}" for kind in SHOWN if one[kind]]
    names = [f"`{name}`" for name in one["failures"][:NAMED]]
    names += [f"{len(one['failures']) - NAMED} more"] if len(one["failures"]) > NAMED else []
    named = f": {', '.join(names)}" if names else ""
    where = f"{one['device']}, torch {one['torch'].partition('+')[0]}"
    return [", ".join(parts) + named, f"{one['seconds']:.0f}", where, one["commit"] or "unknown"]


def put(page: str, text: str) -> str:
    """The page with another section. Raises ValueError where its marks are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN!r} before {END!r}")
    return head + text + tail


def record(folder: Path, cases: Mapping[str, int], known_file: Path = KNOWN, page: Path = PAGE) -> dict[str, Row]:
    """Merge a round's files into what is known, and write both; cases: of `collected`. Raises SystemExit where there is
    nothing to record."""
    made = json.loads((folder / "about.json").read_text("utf-8"))
    new = found(sorted(folder.rglob("*.xml")), made, cases)
    if not new:
        raise SystemExit(f"no test has ended in {folder}")
    known = json.loads(known_file.read_text("utf-8")) if known_file.exists() else {}
    known = dict(sorted({**known, **new}.items()))
    known_file.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    page.write_text(written(page.read_text("utf-8"), known), "utf-8")
    return new


def written(page: str, known: Mapping[str, Row]) -> str:
    """The page with the table of what is known."""
    files = sorted(file.relative_to(CLONE).as_posix() for file in (CLONE / "tests" / "gpu").rglob("test_*.py"))
    return put(page, section(known, files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("page", help="docs/gpu.md from the results")
    commands.add_parser("about", help="commit, device and versions, as JSON")
    recording = commands.add_parser("record", help="a round's JUnit files into the results and docs/gpu.md")
    recording.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "about":
        print(json.dumps(about()))
        return
    if arguments.command == "page":
        PAGE.write_text(written(PAGE.read_text("utf-8"), json.loads(KNOWN.read_text("utf-8"))), "utf-8")
        return
    for file, one in record(arguments.folder, collected()).items():
        print(f"{file}: {_cells(one)[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
