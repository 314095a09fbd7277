"""Who was served which arm: counts for the status, and one JSON line a request for the analysis.

What was *served* is counted, after kill switch and fallbacks, and what was *assigned* stands beside it: a fallback that
is logged as control is the classic way to spoil an experiment. Counts are this process's, since its start or since the
experiment's salt or weights changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.core import Exposure, Level, Outcome, Versions
from app.policies.assign import EVERYTHING, HOLDOUT, POINTS, Assignment, Decision, Experiment, Traffic, u64
from app.policies.experiments import Loaded

SRM_P: Final = 0.001
"""Below this the arms' sizes are no accident: something loses units of an arm (`srm` in the status)."""
MAX_UNITS: Final = 65_536
"""Units of an experiment that are told apart; the sample ratio is that of the first so many."""
LEAST_EXPECTED: Final = 5.0
"""Units that each arm must be expected to have before the chi-square distribution says anything."""


def exposures(assignment: Assignment) -> tuple[Exposure, ...]:
    """What the answer says of its experiments."""
    return tuple(Exposure(one.layer, one.name, one.arm, one.reason, one.coverage) for one in assignment.decisions)


class Answered(NamedTuple):
    """What an exposure record says of the answer; the items would only keep memory waiting for the disk."""

    request_id: str
    versions: Versions
    seed: int
    load: Level
    status: str

    @classmethod
    def of(cls, outcome: Outcome) -> Answered:
        """The part of an outcome."""
        return cls(outcome.request_id, outcome.versions, outcome.seed, outcome.level, outcome.status)


def exposure_line(answered: Answered, assignment: Assignment, at: str, name: Callable[[str], str]) -> dict[str, object]:
    """The exposure record of a request. at: ISO time · name: how users are named (`records.namer`)."""
    return {
        "at": at,
        "request_id": answered.request_id,
        "experiments": [_decided(one, name) for one in assignment.decisions],
        "unassigned": assignment.unassigned,
        "versions": answered.versions._asdict(),
        "seed": answered.seed,
        "load": answered.load,
        "status": answered.status,
    }


def _decided(one: Decision, name: Callable[[str], str]) -> dict[str, object]:
    return {
        "layer": one.layer,
        "name": one.name,
        "unit": None if one.unit is None else name(one.unit),
        "assigned": one.assigned,
        "served": one.arm,
        "reason": one.reason,
        "coverage": one.coverage,
        "forced": one.reason == "forced",
    }


@dataclass
class Tally:
    """The counts of one experiment. served: requests by arm · units: distinct units by arm, `MAX_UNITS` in all ·
    other: requests by reason that count for no arm · unassigned: requests without a unit."""

    split: tuple[object, ...]
    served: Counter[str] = field(default_factory=Counter)
    units: dict[str, set[int]] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)
    unassigned: int = 0

    def add(self, one: Decision) -> None:
        """Count a decision; arms count only where the unit's own arm was served."""
        if one.reason != "assigned":
            self.other[one.reason] += 1
            return
        self.served[one.arm] += 1
        if one.unit is not None and sum(map(len, self.units.values())) < MAX_UNITS:
            self.units.setdefault(one.arm, set()).add(u64("", one.unit))


class Counts:
    """Tallies by experiment. Event loop only."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._traffic: Traffic | None = None
        self.held_out = 0

    def add(self, traffic: Traffic, assignment: Assignment) -> None:
        """Count an answered request. traffic: what runs now."""
        if traffic is not self._traffic:
            self._follow(traffic)
        for name in assignment.unassigned:
            if name in self._tallies:
                self._tallies[name].unassigned += 1
        for one in assignment.decisions:
            if one.name in self._tallies and one.layer:
                self._tallies[one.name].add(one)
            elif one.name == HOLDOUT:
                self.held_out += 1

    def _follow(self, traffic: Traffic) -> None:
        """Start anew what is shared anew."""
        self._traffic = traffic
        known, self._tallies = self._tallies, {}
        for name, experiment in traffic.experiments.items():
            split = _split(experiment)
            old = known.get(name)
            self._tallies[name] = old if old is not None and old.split == split else Tally(split)

    def document(self, traffic: Traffic, now: float) -> dict[str, dict[str, object]]:
        """The status document's `experiments`, by name; now: unix seconds."""
        if traffic is not self._traffic:
            self._follow(traffic)
        return {name: _document(one, self._tallies[name], now) for name, one in sorted(traffic.experiments.items())}


def with_files(
    counts: Mapping[str, Mapping[str, object]], files: Mapping[str, Loaded], killed: Collection[str]
) -> dict[str, object]:
    """The status document's `experiments`: counts of what serves, and what became of each file."""
    return {
        name: {
            **counts.get(name, {"state": "rejected"}),
            "standing": one.standing,
            "killed": name in killed or EVERYTHING in killed,
            "errors": [finding.data() for finding in one.findings],
        }
        for name, one in sorted(files.items())
    }


def _split(one: Experiment) -> tuple[object, ...]:
    return (one.salt, *((arm.name, arm.weight) for arm in one.arms))


def _document(one: Experiment, tally: Tally, now: float) -> dict[str, object]:
    units = [len(tally.units.get(arm.name, ())) for arm in one.arms]
    p = sample_ratio_p(units, [arm.weight for arm in one.arms])
    return {
        "state": one.state,
        "layer": one.layer,
        "salt": one.salt,
        "slots": list(one.slots),
        "coverage": one.coverage(now) / POINTS,
        "weights": {arm.name: arm.weight / (POINTS // 100) for arm in one.arms},
        "served": {arm.name: tally.served[arm.name] for arm in one.arms},
        "units": {arm.name: count for arm, count in zip(one.arms, units, strict=True)},
        "other": dict(sorted(tally.other.items())),
        "unassigned": tally.unassigned,
        "srm_p": None if p is None else float(f"{p:.3g}"),
        "srm": p is not None and p < SRM_P,
    }


def sample_ratio_p(observed: Sequence[int], weights: Sequence[int]) -> float | None:
    """The chance of arm sizes at least this far from their weights (Pearson's chi-square); None for too few units, or
    for one arm."""
    total, share = sum(observed), sum(weights)
    expected = [total * weight / share for weight in weights]
    if len(observed) < 2 or min(expected) < LEAST_EXPECTED:
        return None
    return chi_square_p(sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)), len(observed) - 1)


def chi_square_p(x: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees > x): Q(freedom / 2, x / 2) by its recurrence from Q(1/2) and Q(1)."""
    half = x / 2
    at = 0.5 if freedom % 2 else 1.0
    p = math.erfc(math.sqrt(half)) if freedom % 2 else math.exp(-half)
    while at < freedom / 2:
        p += math.exp(at * math.log(half) - half - math.lgamma(at + 1)) if half > 0 else 0.0
        at += 1
    return min(1.0, p)
