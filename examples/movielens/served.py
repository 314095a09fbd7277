"""Recommendations through Widebeam itself: `widebeam recommend` over a deployment root made for the purpose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from app.engine.families.onerec_config import OneRecConfig
from examples.movielens.artifacts import write_deployment
from examples.movielens.data import Split

Ints = npt.NDArray[np.int64]

POLICY = """\
widebeam: 1
about: the catalogue without the user's history, {width} beams after every step
widths: [{width}, {width}, {width}]
steps:
  all:
    normalize: full
    mask: trie and not seen
    score: parent + logp
    select: top()
"""


class Served:
    """A `Recommend` over the runtime. The root holds one weights version, the vocab and a policy a width."""

    def __init__(self, root: Path, split: Split, widths: Sequence[int], config: OneRecConfig) -> None:
        self.root, self.split = root, split
        self.number = {film.id: item for item, film in enumerate(split.films)}
        (root / "policies").mkdir(parents=True, exist_ok=True)
        write_deployment(config, root / "deployment.toml")
        for width in widths:
            (root / "policies" / f"w{width}.yaml").write_text(POLICY.format(width=width))
        (root / "policies" / "base.yaml").write_text(POLICY.format(width=max(widths)))

    def install(self, weights: Path, catalogue: Path) -> None:
        """Publish a trained model and the catalogue into the root."""
        widebeam("vocab", "import", "--format", "jsonl", catalogue, "--root", self.root, "--version", "v1")
        widebeam("weights", "publish", weights, "--root", self.root, "--version", "v1")

    def __call__(self, histories: Sequence[Ints], k: int, width: int) -> list[Ints]:
        """At most k items a history, best first."""
        requests, answers = self.root / "requests.jsonl", self.root / "answers.jsonl"
        with requests.open("wb") as out:
            for history in histories:
                ids = [self.split.films[item].id for item in history]
                body = {"context": {"history": ids}, "k": k, "policy": f"w{width}", "seed": 0}
                out.write(msgspec.json.encode(body) + b"\n")
        widebeam("recommend", "--root", self.root, "--in", requests, "--out", answers)
        lines = [msgspec.json.decode(line) for line in answers.read_bytes().splitlines()]
        return [np.array([self.number[item["id"]] for item in line["items"]], np.int64) for line in lines]


def widebeam(*arguments: str | Path) -> None:
    """Run a `widebeam` command; raises CalledProcessError with what it printed where it fails."""
    command = [sys.executable, "-m", "app", *(str(argument) for argument in arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
