"""policies/experiments/NAME.yaml: text -> draft with places. What the file says by itself is checked here (E001, E010,
E011); what it says about layers, policies and other experiments in `experiments.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from app.policies.assign import CONTROL, DEFAULT_ARM, POINTS, SLOTS, Condition, Guard, RampStep, State
from app.policies.diagnostics import Findings, Span
from app.policies.source import Node, Scalar, Source, compose
from app.policies.traffic import TrafficValues
from app.policies.values import NAME, Entry, Given
from app.policies.where import compile_where

MAX_ARMS = 64
MAX_LINES = 64
"""Entries of `ramp` and of `stop_if`."""

_KEYS = (
    "widebeam", "kind", "about", "owner", "layer", "slots", "state", "salt", "unit", "where", "arms", "ramp", "stop_if",
    "allow_reassign", "stopped_at",
)  # fmt: skip
_STATES: Mapping[str, State] = {"draft": "draft", "running": "running", "paused": "paused", "stopped": "stopped"}
_METRICS: Mapping[str, Literal["underfill_rate", "p99_ms"]] = {"underfill_rate": "underfill_rate", "p99_ms": "p99_ms"}
_WEIGHT = re.compile(r"-?(0|[1-9][0-9]{0,2})(\.[0-9]{1,4})?")
_DURATION = re.compile(r"([1-9][0-9]{0,4})(s|m|h)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class ArmDraft:
    """An arm as written. weight in points of 1,000,000."""

    name: Given[str]
    weight: Given[int]
    policy: Given[str] | None
    params: Mapping[str, tuple[Span, Given[float]]]


@dataclass(frozen=True, slots=True)
class ExperimentDraft:
    """An experiment as written; only files that say enough to be one become drafts."""

    name: str
    start: Span
    layer: Given[str]
    slots: Given[tuple[int, int]]
    state: State
    salt: Given[str]
    unit: Given[str] | None
    where: Given[Condition] | None
    arms: Given[tuple[ArmDraft, ...]]
    ramp: tuple[Given[RampStep], ...]
    guards: tuple[Guard, ...]
    allow_reassign: Given[bool] | None
    stopped_at: float | None


def read_experiment(name: str, source: Source, found: Findings) -> ExperimentDraft | None:
    """The draft of a file; None, with findings, where it says too little."""
    start = Span(source.file, 1, 1, 2)
    root = compose(source, found)
    if root is None:
        return None
    read = ExperimentValues(found)
    entries = read.fields(root, "experiment", _KEYS)
    read.head(entries, "experiment", start)
    read.require(entries, ("layer", "slots", "salt", "arms"), start)
    layer, salt, slots = (
        read.name(entries.get("layer")),
        read.salt(entries.get("salt")),
        read.slots(entries.get("slots")),
    )
    state, arms = read.choice(entries.get("state"), tuple(_STATES)), read.arms(entries.get("arms"))
    where = read.where(entries.get("where"))
    unit, ramp, guards = (
        read.unit(entries.get("unit")),
        read.ramp(entries.get("ramp")),
        read.guards(entries.get("stop_if")),
    )
    stopped_at = read.moment(entries.get("stopped_at"))
    allow = entries.get("allow_reassign")
    reassign = Given(read.flag(allow), allow[0].span) if allow else None
    if layer is None or salt is None or slots is None or arms is None or ("where" in entries and where is None):
        return None
    return ExperimentDraft(
        name=name,
        start=start,
        layer=layer,
        slots=slots,
        state=_STATES[state.value] if state else "running",
        salt=salt,
        unit=unit,
        where=where,
        arms=arms,
        ramp=ramp,
        guards=guards,
        allow_reassign=reassign,
        stopped_at=stopped_at.value if stopped_at else None,
    )


class ExperimentValues(TrafficValues):
    """The values of an experiment file."""

    def slots(self, entry: Entry | None) -> Given[tuple[int, int]] | None:
        """`[first, end)` of a layer's slots."""
        nodes = None if entry is None else self.sequence(entry[1], "slots", 2)
        if entry is None or nodes is None:
            return None
        ends = [self.integer(node, "slots", 0, SLOTS) for node in nodes]
        if ends[0] is None or ends[1] is None:
            return None
        if ends[0].value >= ends[1].value:
            self.found.add("S011", ends[1].span, "the slots end before they begin", f"[first, end) of {SLOTS} slots")
            return None
        return Given((ends[0].value, ends[1].value), entry[1].span)

    def where(self, entry: Entry | None) -> Given[Condition] | None:
        """The condition for eligibility."""
        node = self.scalar(entry)
        condition = compile_where(node, self.found) if node is not None else None
        return Given(condition, node.span) if node is not None and condition is not None else None

    def arms(self, entry: Entry | None) -> Given[tuple[ArmDraft, ...]] | None:
        """The arms in their order: E001 and E011."""
        if entry is None:
            return None
        known = self.fields(entry[1], "arms", ())
        if len(known) > MAX_ARMS:
            self.found.add("S012", entry[0].span, f"more than {MAX_ARMS} arms")
            return None
        arms = [arm for name, one in known.items() if (arm := self.arm(name, one)) is not None]
        if not known or len(arms) < len(known):
            return None
        total = sum(arm.weight.value for arm in arms)
        if any(arm.weight.value <= 0 for arm in arms):
            return None  # reported
        if total != POINTS:
            hint = "weights are percentages of the experiment's own users; write them so that they sum to 100"
            self.found.add("E001", entry[0].span, f"the weights sum to {Decimal(total) / 10_000:f}", hint)
        if CONTROL not in known:
            hint = "name the arm that the others are compared with `control`"
            self.found.add("E011", entry[0].span, f"there is no arm `{CONTROL}`", hint)
        return Given(tuple(arms), entry[0].span)

    def arm(self, name: str, entry: Entry) -> ArmDraft | None:
        """One arm."""
        key, node = entry
        if not NAME.fullmatch(name) or name == DEFAULT_ARM:
            hint = f"names are a-z, 0-9 and _, a letter first; `{DEFAULT_ARM}` is what units outside all arms get"
            self.found.add("S011", key.span, f"`{name}` is no arm name", hint)
            return None
        entries = self.fields(node, f"arm {name}", ("weight", "policy", "params"))
        self.require(entries, ("weight",), entry)
        weight, policy = self.weight(entries.get("weight")), self.name(entries.get("policy"))
        params: dict[str, tuple[Span, Given[float]]] = {}
        if "params" in entries:
            for param, (place, value) in self.fields(entries["params"][1], "params", ()).items():
                number = self.decimal(value, param)
                if number is None:
                    return None
                params[param] = (place.span, number)
        if weight is None or ("policy" in entries and policy is None):
            return None
        return ArmDraft(Given(name, key.span), weight, policy, params)

    def weight(self, entry: Entry | None) -> Given[int] | None:
        """A percentage as points."""
        node = self.scalar(entry)
        if node is None:
            return None
        if not _WEIGHT.fullmatch(node.text) or node.style != "plain":
            hint = "write a percentage like `50` or `33.3`, with at most four decimals"
            self.found.add("S011", node.span, f"`{node.text}` is no weight", hint)
            return None
        points = int(Decimal(node.text) * (POINTS // 100))
        if points <= 0:
            self.found.add("E001", node.span, f"weight {node.text} is not positive", "remove the arm, or give it users")
        return Given(points, node.span)

    def ramp(self, entry: Entry | None) -> tuple[Given[RampStep], ...]:
        """Coverage over time: E010."""
        steps: list[Given[RampStep]] = []
        for node in self.lines(entry):
            entries = self.fields(node, "ramp", ("from", "coverage"))
            self.require(entries, ("from", "coverage"), node.span)
            since, coverage = self.moment(entries.get("from")), self.percent(entries.get("coverage"))
            if since is None or coverage is None:
                continue
            if steps and since.value <= steps[-1].value.since:
                self.found.add(
                    "E010", since.span, "this moment is not after the one above it", "sort the lines by `from`"
                )
            elif steps and coverage.value < steps[-1].value.coverage:
                self.found.add("E009", coverage.span, "the coverage goes down", "units leave their arms at this moment")
            steps.append(Given(RampStep(since.value, coverage.value), since.span))
        return tuple(steps)

    def guards(self, entry: Entry | None) -> tuple[Guard, ...]:
        """`stop_if`: what raises an alert."""
        guards: list[Guard] = []
        for node in self.lines(entry):
            entries = self.fields(node, "stop_if", ("metric", "above", "for"))
            self.require(entries, ("metric", "above", "for"), node.span)
            metric, seconds = self.choice(entries.get("metric"), tuple(_METRICS)), self.duration(entries.get("for"))
            above = self.decimal(entries["above"][1], "above") if "above" in entries else None
            if metric is not None and seconds is not None and above is not None:
                guards.append(Guard(_METRICS[metric.value], above.value, seconds))
        return tuple(guards)

    def duration(self, entry: Entry | None) -> float | None:
        """`30s`, `2m`, `1h` as seconds, at most a day."""
        node: Scalar | None = self.scalar(entry)
        match = _DURATION.fullmatch(node.text) if node is not None else None
        seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
        if node is not None and not 0 < seconds <= 86_400:
            self.found.add("S011", node.span, f"`{node.text}` is no duration", "write it like `30s`, `2m` or `1h`")
            return None
        return float(seconds) if node is not None else None

    def lines(self, entry: Entry | None) -> tuple[Node, ...]:
        """The entries of a list of mappings."""
        if entry is None:
            return ()
        nodes = self.items(entry[1], entry[0].text)
        if len(nodes) > MAX_LINES:
            self.found.add("S012", entry[0].span, f"`{entry[0].text}` has more than {MAX_LINES} entries")
        return nodes[:MAX_LINES]
