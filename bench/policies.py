"""What policies cost: a batch over many arms or structures against one policy of the same rows, and compile times.

    python -m bench.policies [--json FILE] [--rounds N] [--quick]

Arms: 32 requests on the demo's model, in one batch. The same rows under one policy, under 8 arms that differ in
parameters, under 8 that differ in widths too, and under 4 structures, whose added cost is the time above the mean of
the four batches that have one structure each. Every round asks all of them in turn; the figures are medians of the
rounds' ratios. Targets: arms at most 1.1; 200 policies compiled cold, their parent read before, under 1 s; one edit
under 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from app.cli.policy_files import deployed
from app.core import Request
from app.policies.cache import Cache
from app.policies.load import PolicySet, compile_folder, snapshot
from bench._demo import histories_of
from bench._report import commit, cpu_model
from bench._served import InProcess, copy_root, in_process, request

CLONE = Path(__file__).parent.parent
BATCH = 32
ARMS = 8
POLICIES = 200
FIRST, WIDTH, SPREAD = 64, 160, 16
Row = dict[str, object]

TEMPERED = """widebeam: 1
params:
  heat: {{value: {heat}, range: [0.1, 10]}}
widths: [{first}, {width}, {width}]
steps:
  all:
    logits: logit / param.heat
    normalize: step
"""
STRUCTURES: Mapping[str, str] = {
    "plain": "",
    "temperature, min-p": """steps:
  all:
    logits: logit / 1.5
    normalize: step
    keep:
      - min_p(0.001)
""",
    "quota": "steps:\n  last:\n    quota:\n      - cap(token[1], max=16)\n",
    "diverse": "steps:\n  all:\n    select: diverse(groups=8, penalty=0.5)\n",
}
CHILD = """widebeam: 1
extends: parent
params:
  bias: {{value: {value}}}
widths: [64, 128, {width}]
"""
PARENT = """widebeam: 1
about: what two hundred policies extend
params:
  bias: {value: 0.1, range: [0, 10], about: weight of the second term}
  floor: {value: 0.0001, range: [0, 1]}
steps:
  all:
    normalize: valid
    keep:
      - min_p(param.floor)
    rank: score + param.bias * logp
  last:
    quota:
      - cap(token[1], max=48)
widths: [64, 128, 256]
"""


def arm_policies() -> dict[str, str]:
    """Texts by name: one; p0..p7 differ in parameters, w0..w7 in widths too, s0..s3 in structure. The rows are the
    same: the widths of w0..w7 are symmetric around the one."""
    texts = {"one": TEMPERED.format(heat=1.5, first=FIRST, width=WIDTH)}
    for arm in range(ARMS):
        off = (2 * arm - ARMS + 1) * SPREAD // 2
        texts[f"p{arm}"] = TEMPERED.format(heat=1 + arm / 8, first=FIRST, width=WIDTH)
        texts[f"w{arm}"] = TEMPERED.format(heat=1 + arm / 8, first=FIRST, width=WIDTH + off)
    for number, steps in enumerate(STRUCTURES.values()):
        texts[f"s{number}"] = f"widebeam: 1\nwidths: [{FIRST}, {WIDTH}, {WIDTH}]\n{steps}"
    return texts


def batches(histories: Sequence[Sequence[str]]) -> dict[str, list[Request]]:
    """The batches that are compared: the same 32 users in each, one request each."""
    users = [histories[at % len(histories)] for at in range(BATCH)]

    def batch(names: Sequence[str]) -> list[Request]:
        return [request(user, 10, names[at % len(names)]) for at, user in enumerate(users)]

    pure = {f"only {kind}": batch([f"s{number}"]) for number, kind in enumerate(STRUCTURES)}
    return {
        "one policy": batch(["one"]),
        "8 arms, parameters": batch([f"p{arm}" for arm in range(ARMS)]),
        "8 arms, parameters and widths": batch([f"w{arm}" for arm in range(ARMS)]),
        **pure,
        "4 structures": batch([f"s{number}" for number in range(len(STRUCTURES))]),
    }


def measure_arms(rounds: int) -> Row:
    """Medians in milliseconds and ratios of one run."""
    histories = histories_of(CLONE / "examples" / "movielens" / "users.json")
    with tempfile.TemporaryDirectory() as folder:
        root = copy_root(CLONE, Path(folder) / "root")
        for name, text in arm_policies().items():
            (root / "policies" / f"{name}.yaml").write_text(text)
        with in_process(root) as runtime:
            asked = batches(histories)
            first = {name: runtime.ask(requests)[0] for name, requests in asked.items()}  # warms up, too
            times = _rounds(runtime, asked, rounds)
    pure = [name for name in asked if name.startswith("only ")]

    def ratio(above: str, below: Sequence[str]) -> float:
        pairs = zip(times[above], *(times[name] for name in below), strict=True)
        return round(statistics.median(one / statistics.mean(rest) for one, *rest in pairs), 3)

    return {
        "requests": BATCH,
        "rounds": rounds,
        "batch": {name: {"requests": one.batch_requests, "rows": one.batch_rows} for name, one in first.items()},
        "median_ms": {name: round(1e3 * statistics.median(taken), 2) for name, taken in times.items()},
        "8 arms, parameters / one policy": ratio("8 arms, parameters", ["one policy"]),
        "8 arms, parameters and widths / one policy": ratio("8 arms, parameters and widths", ["one policy"]),
        "4 structures / mean of the four alone": ratio("4 structures", pure),
    }


def _rounds(runtime: InProcess, asked: Mapping[str, list[Request]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(rounds):
        for name, requests in asked.items():
            times[name].append(seconds(lambda requests=requests: runtime.ask(requests)))
    return times


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_compiling(repeats: int) -> Row:
    """A folder of policies that extend one parent: cold (the parent read before), and after an edit of each kind."""
    root = deployed(CLONE)
    with tempfile.TemporaryDirectory() as folder:
        policies = Path(folder)
        (policies / "parent.yaml").write_text(PARENT)
        (policies / "base.yaml").write_text("widebeam: 1\n")
        cache = Cache()

        def compiled() -> PolicySet:
            cache.turn()
            made = compile_folder(snapshot(policies), root.contract, root.catalogue, cache=cache)
            if len(made.plans()) != len(list(policies.glob("*.yaml"))):
                raise RuntimeError(str(made.rejections()))
            return made

        compiled()
        for number in range(POLICIES):
            (policies / f"child{number}.yaml").write_text(CHILD.format(value=number / 100, width=256 + number))
        cold = seconds(compiled)
        structures = len({plan.structure.id for plan in compiled().plans()})
        for number in range(POLICIES):
            own = f"steps: {{all: {{score: parent + {number + 2} * logp}}}}\n"
            (policies / f"child{number}.yaml").write_text(f"widebeam: 1\nextends: parent\n{own}")
        each_its_own = seconds(compiled)
        unchanged = [seconds(compiled) for _ in range(repeats)]
        edits: dict[str, list[float]] = {"parameter": [], "structure": []}
        for turn in range(repeats):
            text = CHILD.format(value=5 + turn / 100, width=200 + turn)
            (policies / "child0.yaml").write_text(text)
            edits["parameter"].append(seconds(compiled))
            (policies / "child1.yaml").write_text(
                f"{text}final: {{limit: {1 + turn}}}\nsteps: {{all: {{score: parent + {turn + 2} * logp}}}}\n"
            )
            edits["structure"].append(seconds(compiled))
    return {
        "policies": POLICIES,
        "structures": structures,
        "cold_s": round(cold, 3),
        "cold_each_with_a_structure_of_its_own_s": round(each_its_own, 3),
        "nothing_changed_ms": round(1e3 * statistics.median(unchanged), 2),
        "one_edit_ms": {kind: round(1e3 * statistics.median(taken), 2) for kind, taken in edits.items()},
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=CLONE / "bench" / "results" / "policies.json")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="three rounds, to see that it runs")
    given = parser.parse_args()
    rounds = 3 if given.quick else given.rounds
    results: Row = {
        "command": "python -m bench.policies",
        "load_average_before": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(), "cpus": os.cpu_count(), "arch": platform.machine(),
            "python": platform.python_version(), "torch": torch.__version__,
        },
        "compiling": measure_compiling(rounds),
        "arms": measure_arms(rounds),
    }  # fmt: skip
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
