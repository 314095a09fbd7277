"""What a kernel is compiled with, and what ptxas says about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Build:
    """One `// build:` combination of a source. spill: bytes that it may spill on sm_90."""

    source: Path
    define: tuple[tuple[str, int], ...]
    arch: str | None
    spill: int

    def __str__(self) -> str:
        defines = " ".join(f"{name}={value}" for name, value in self.define)
        return f"{self.source.parent.name}/{self.source.name} {defines} {self.arch or ''}".strip()


@dataclass(frozen=True)
class Entry:
    """What ptxas says about an entry point."""

    name: str
    registers: int
    spilled: int


def builds(source: Path) -> list[Build]:
    """Every combination that the source's `// build:` lines name."""
    found = []
    for line in re.findall(r"^// build:(.*)$", source.read_text("utf-8"), re.MULTILINE):
        fields = dict(word.split("=") for word in line.split())
        arch, spill = fields.pop("arch", None), int(fields.pop("spill", "0"))
        choices = [[(name, int(value)) for value in values.split(",")] for name, values in fields.items()]
        found += [Build(source, define, arch, spill) for define in product(*choices)]
    assert found, f"{source}: no `// build:` line"
    return found


def entries(log: str) -> list[Entry]:
    """The entry points in a log of `--ptxas-options=-v`."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    return [
        Entry(name, int(registers), max(int(stores), int(loads)))
        for name, stores, loads, registers in re.findall(pattern, log, re.DOTALL)
    ]
