"""traffic.yaml against the policies and what runs: E002, and E006, E007, E008 among layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from app.policies.assign import Traffic
from app.policies.diagnostics import Findings, suggest
from app.policies.plan import Plan
from app.policies.traffic import HoldoutDraft, LayerDraft, TrafficDraft
from app.policies.values import Given

RUNS: Final = ("running", "paused")
"""States in which an experiment has its slots and its users."""


class Policies(NamedTuple):
    """The policies that traffic may name. plans: those that can be served · abstract, broken: those that cannot ·
    stale: those whose plan is older than their file."""

    plans: Mapping[str, Plan]
    abstract: Collection[str] = ()
    broken: Collection[str] = ()
    stale: Collection[str] = ()


@dataclass
class TrafficChecks:
    """The findings of one load; `experiments.ExperimentChecks` goes on where this ends."""

    policies: Policies
    found: Findings
    now: float
    previous: Traffic | None
    void: bool = False
    """traffic.yaml has errors and nothing ran before: there are no layers, and no experiment is to blame for it."""

    def faulty(self, file: str) -> bool:
        """Whether a file has errors so far."""
        return any(one.span.file == file for one in self.found.errors)

    def policy(self, given: Given[str], hint: str, *, missing: bool = True) -> Plan | None:
        """The plan of a policy: E002. missing: whether a policy with errors of its own is reported here, too."""
        name, known = given.value, [*self.policies.plans, *self.policies.broken, *self.policies.abstract]
        if name in self.policies.plans:
            return self.policies.plans[name]
        if name in self.policies.abstract:
            self.found.add("E002", given.span, f"policy `{name}` is abstract", hint)
        elif name not in known:
            hint = suggest(name, known) or f"policies: {', '.join(sorted(known))}"
            self.found.add("E002", given.span, f"unknown policy `{name}`", hint)
        elif missing:
            self.found.add(
                "E002", given.span, f"policy `{name}` has errors", "an experiment is live iff all its arms are"
            )
        return None

    def traffic(self, draft: TrafficDraft, file: str) -> TrafficDraft:
        """The draft to serve: that of the file, or of what runs where the file is bad."""
        for given in (draft.default, draft.holdout.policy if draft.holdout else None):
            if given is not None:
                self.policy(given, "name a policy that extends it", missing=given is not draft.default)
        self.layers(draft)
        if self.previous is not None:
            self.moved(draft, self.previous)
        if not self.faulty(file):
            return draft
        self.void = self.previous is None
        return _draft_of(self.previous, draft) if self.previous else replace(draft, holdout=None, layers={})

    def moved(self, draft: TrafficDraft, previous: Traffic) -> None:
        """E008 for a layer: its salt and unit place the users of everything that runs in it."""
        for old in previous.layers:
            new = draft.layers.get(old.name)
            if new is None or not any(one.state in RUNS for one in old.experiments):
                continue
            for was, given, what in ((old.salt, new.salt, "salt"), (old.unit, new.unit, "unit")):
                if given.value != was:
                    message = f"the {what} of layer {old.name} changed while experiments of it run"
                    hint = f"it is `{was}` now; end them first, or make a new layer"
                    self.found.add("E008", given.span, message, hint)

    def layers(self, draft: TrafficDraft) -> None:
        """E006 and E007 among layers and the holdout."""
        salts = {draft.holdout.salt.value: "the holdout"} if draft.holdout else {}
        owners: dict[str, str] = {}
        chooser: dict[str, str] = {}
        for name, layer in draft.layers.items():
            if layer.salt.value in salts:
                hint = "two shares with one salt fall on the same users"
                self.found.add("E007", layer.salt.span, f"{salts[layer.salt.value]} has this salt, too", hint)
            salts.setdefault(layer.salt.value, f"layer {name}")
            for param, span in (layer.params or {}).items():
                if param in owners:
                    self.found.add("E006", span, f"param `{param}` belongs to layer {owners[param]}, too")
                owners.setdefault(param, name)
            if layer.params is None:
                self.chooser(layer, chooser)

    def chooser(self, layer: LayerDraft, taken: dict[str, str]) -> None:
        """At most one layer chooses the policy of a request."""
        mine = layer.surfaces or ("",)
        clash = next((taken[one] for one in taken if not one or one in mine or mine == ("",)), None)
        if clash is not None:
            hint = "give them surfaces that do not meet, or let one of them set `params` only"
            self.found.add("E006", layer.name.span, f"the policy belongs to layer {clash}, too", hint)
        taken |= {one: layer.name.value for one in mine if one not in taken}


def _draft_of(traffic: Traffic, bad: TrafficDraft) -> TrafficDraft:
    """What runs, as if it had been read."""
    here = bad.start
    layers = {
        one.name: LayerDraft(
            Given(one.name, here),
            Given(one.salt, here),
            Given(one.unit, here),
            one.surfaces,
            None if one.params is None else dict.fromkeys(one.params, here),
        )
        for one in traffic.layers
    }
    held = traffic.holdout
    holdout = HoldoutDraft(held.slots, Given(held.salt, here), Given(held.plan.policy, here)) if held else None
    default = Given(traffic.default.policy, here) if traffic.default else bad.default
    unit = held.unit if held else bad.unit
    return replace(bad, default=default, unit=unit, holdout=holdout, layers=layers)
