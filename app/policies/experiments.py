"""Traffic, experiments and policies together: the checks that need more than one file, and the traffic that is served.

A function of (files, plans, what runs now, the wall clock). An experiment is live iff its file and all its arms are; a
bad edit leaves what runs as it was, with its own plans, as a whole. Slots belong first to what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.config import NO_FIELDS, RequestFields
from app.policies.assign import Arm, Experiment, Holdout, Layer, Traffic, overlay
from app.policies.diagnostics import Diagnostic, Findings, Span, listing, suggest
from app.policies.experiment_file import ArmDraft, ExperimentDraft, read_experiment
from app.policies.plan import Plan
from app.policies.source import Source
from app.policies.traffic import DEFAULT, FILE, LayerDraft, TrafficDraft, read_traffic
from app.policies.traffic_checks import RUNS, Policies, TrafficChecks
from app.policies.values import Given

CARRY_OVER_S = 24 * 3600.0
"""How long a stopped experiment keeps its slots, so that the next one does not inherit its users' habits."""
OLD_S = 90 * 24 * 3600.0

Standing = Literal["live", "stale", "rejected"]


class Loaded(NamedTuple):
    """One experiment file. live: served as written · stale: an older version is served · rejected: none is."""

    standing: Standing
    findings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class TrafficSet:
    """What traffic.yaml and experiments/ give. default: a name that may have no plan · experiments: by name, for the
    status · findings: of all these files."""

    default: str
    traffic: Traffic
    experiments: Mapping[str, Loaded]
    findings: tuple[Diagnostic, ...]


def load_traffic(
    traffic: Source | None,
    experiments: Mapping[str, Source],
    policies: Policies,
    now: float,
    previous: Traffic | None = None,
    last_good: Mapping[str, Source] | None = None,
    declared: RequestFields = NO_FIELDS,
) -> TrafficSet:
    """Read, check and bind. Never raises for what files say.

    experiments: files by name · now: wall-clock seconds · previous: the traffic that runs, under the same contract ·
    last_good: texts of experiments that ran before this process, or under another contract ·
    declared: what the deployment declares of its requests
    """
    lines = {source.file: source.lines() for source in [traffic, *experiments.values()] if source}
    found = Findings(lambda file: lines.get(file, []))
    draft = read_traffic(traffic, found) if traffic else TrafficDraft(Span(f"policies/{FILE}", 1, 1, 2))
    checks = ExperimentChecks(policies, found, now, previous, declared=declared)
    draft = checks.traffic(draft, traffic.file if traffic else "")
    checks.remember(draft, {name: one for name, one in (last_good or {}).items() if name in experiments})
    standings: dict[str, Standing] = {}
    chosen: list[Experiment] = []
    claims: list[Experiment] = []
    drafts = {name: read_experiment(name, source, found) for name, source in experiments.items()}
    checks.alone(draft, drafts)
    for name in sorted(drafts, key=lambda one: (checks.claim(one, drafts[one]), one)):
        experiment = checks.bound(drafts[name], draft, experiments[name].file, claims)
        kept = checks.kept(name, draft, claims) if experiment is None else None
        standings[name] = "live" if experiment else "stale" if kept else "rejected"
        chosen += [one for one in (experiment, kept) if one is not None]
        if experiment is not None and not checks.freed(drafts[name]):
            claims.append(experiment)
        claims += [kept] if kept is not None else []
    default = draft.default.value if draft.default else DEFAULT
    every = tuple(found)
    files = {name: tuple(one for one in every if one.span.file == source.file) for name, source in experiments.items()}
    return TrafficSet(
        default,
        _assemble(draft, policies.plans.get(default), chosen, policies.plans),
        {name: Loaded(standings[name], files[name]) for name in sorted(standings)},
        every,
    )


def _assemble(
    draft: TrafficDraft, default: Plan | None, chosen: list[Experiment], plans: Mapping[str, Plan]
) -> Traffic:
    """Layers that choose the policy come first, so that parameters of other layers are laid over their choice."""
    layers = [
        Layer(
            one.name.value,
            one.salt.value,
            one.unit.value,
            one.surfaces,
            None if one.params is None else tuple(one.params),
            tuple(each for each in chosen if each.layer == one.name.value),
        )
        for one in draft.layers.values()
    ]
    held = draft.holdout
    plan = plans.get(held.policy.value) if held else None
    holdout = Holdout(held.slots, held.salt.value, draft.unit, plan) if held and plan else None
    return Traffic(default, holdout, tuple(sorted(layers, key=lambda one: one.params is not None)))


@dataclass
class ExperimentChecks(TrafficChecks):
    """The findings of one load, experiment by experiment. before: what experiments were until now · declared: see
    `load_traffic`"""

    before: dict[str, Experiment] = field(default_factory=dict)
    declared: RequestFields = NO_FIELDS

    def remember(self, draft: TrafficDraft, last_good: Mapping[str, Source]) -> None:
        """What runs; for experiments that do not, what their last good text gives under the policies of now."""
        self.before = dict(self.previous.experiments) if self.previous else {}
        for name, source in last_good.items():
            quiet = Findings(lambda _: ())
            checks = ExperimentChecks(self.policies, quiet, self.now, None, self.void)
            one = checks.bound(read_experiment(name, source, quiet), draft, source.file, [])
            if one is not None:
                self.before.setdefault(name, one)

    def runs(self, name: str) -> bool:
        """Whether an experiment is among those that run now."""
        old = self.before.get(name)
        return old is not None and old.state in RUNS

    def claim(self, name: str, draft: ExperimentDraft | None) -> int:
        """Who has a right to slots before whom: what runs where it was, what runs and moves, everything else."""
        old = self.before.get(name)
        if old is None or old.state not in RUNS:
            return 2
        return int(draft is not None and draft.slots.value != old.slots)

    # ---- one experiment ----------------------------------------------------------------------------------------------

    def alone(self, draft: TrafficDraft, experiments: Mapping[str, ExperimentDraft | None]) -> None:
        """E005 and E007: salts over all files, those that run among them."""
        layers = {layer.salt.value: f"layer {name}" for name, layer in draft.layers.items()}
        if draft.holdout:
            layers[draft.holdout.salt.value] = "the holdout"
        salts = {one.salt: name for name, one in self.before.items() if name not in experiments or self.runs(name)}
        hint = "salts are never used again: write a new one"
        for name in sorted(experiments, key=lambda one: (not self.runs(one), one)):
            one = experiments[name]
            if one is None:
                continue
            owner = salts.setdefault(one.salt.value, name)
            if one.salt.value in layers:
                why = "every unit of its slots would get the same arm"
                self.found.add("E007", one.salt.span, f"{layers[one.salt.value]} has this salt, too", why)
            elif owner != name:
                self.found.add("E005", one.salt.span, f"experiment {owner} has this salt, too", hint)

    def bound(
        self, one: ExperimentDraft | None, draft: TrafficDraft, file: str, claims: list[Experiment]
    ) -> Experiment | None:
        """The experiment with its plans; None where something about it is wrong, or an arm's policy is stale while an
        older version of the whole runs."""
        if one is None or self.void:
            return None
        layer = draft.layers.get(one.layer.value)
        if layer is None:
            hint = suggest(one.layer.value, draft.layers) or f"layers of {FILE}: {', '.join(draft.layers) or 'none'}"
            self.found.add("S011", one.layer.span, f"there is no layer `{one.layer.value}`", hint)
            return None
        if one.unit is not None and one.unit.value != layer.unit.value:
            hint = f"layer {layer.name.value} hashes `{layer.unit.value}`; all its experiments must"
            self.found.add("E012", one.unit.span, f"this experiment hashes `{one.unit.value}`", hint)
        arms = self.arms(one, layer, draft)
        made = self.made(one, arms)
        self.slots(one, claims)
        old = self.before.get(one.name)
        if old is not None:
            self.change(old, one, made)
        self.age(one)
        self.reads(one)
        stale = any(arm.policy is not None and arm.policy.value in self.policies.stale for arm in one.arms.value)
        if old is None or old.state != "running" or one.state != "running":
            stale = False  # nothing keeps an experiment from being paused
        return None if self.faulty(file) or stale else made

    def made(self, one: ExperimentDraft, arms: tuple[Arm, ...]) -> Experiment:
        """The draft without its places."""
        return Experiment(
            name=one.name,
            layer=one.layer.value,
            slots=one.slots.value,
            state=one.state,
            salt=one.salt.value,
            where=one.where.value if one.where else None,
            arms=arms,
            ramp=tuple(step.value for step in one.ramp),
            guards=one.guards,
        )

    def kept(self, name: str, draft: TrafficDraft, claims: list[Experiment]) -> Experiment | None:
        """The version that runs, where its layer is still there and its slots are free."""
        old = self.before.get(name)
        if old is None or old.layer not in draft.layers:
            return None
        return None if any(_meet(old.layer, old.slots, other) for other in claims) else old

    def slots(self, one: ExperimentDraft, claims: list[Experiment]) -> None:
        """E003: against everything that has its slots already."""
        if self.freed(one):
            return
        for other in claims:
            if not _meet(one.layer.value, one.slots.value, other):
                continue
            first, end = other.slots
            message = f"the slots meet those of experiment {other.name}, [{first}, {end})"
            hint = "slots are half-open: the next experiment may start where one ends"
            if other.state == "stopped":
                hint = "a stopped experiment keeps its slots until 24 h after `stopped_at`, or while its file is there"
            self.found.add("E003", one.slots.span, message, hint)

    def freed(self, one: ExperimentDraft | None) -> bool:
        """Whether an experiment was stopped so long ago that its slots are free."""
        if one is None:
            return False
        return one.state == "stopped" and one.stopped_at is not None and self.now >= one.stopped_at + CARRY_OVER_S

    def age(self, one: ExperimentDraft) -> None:
        """W102."""
        if one.state == "running" and one.ramp and self.now - one.ramp[0].value.since > OLD_S:
            days = int((self.now - one.ramp[0].value.since) / 86_400)
            self.found.add("W102", one.ramp[0].span, f"the experiment began {days} days ago", "decide it, then stop it")

    def reads(self, one: ExperimentDraft) -> None:
        """W104, where the deployment declares any field: a misspelt one would make nobody eligible."""
        if one.where is None or self.declared == NO_FIELDS:
            return
        known: Mapping[str, Collection[str]] = {"user": self.declared.user, "ctx": self.declared.ctx}
        for space, name in sorted(one.where.value.fields):
            if name not in known[space]:
                hint = suggest(name, known[space]) or "requests without it are not in the experiment"
                self.found.add("W104", one.where.span, f"{space} has no `{name}` in this deployment", hint)

    # ---- against what runs -------------------------------------------------------------------------------------------

    def change(self, old: Experiment, one: ExperimentDraft, new: Experiment) -> None:
        """E008, E009, W103: what would move people between arms, or out of them."""
        if old.state not in RUNS or new.state not in RUNS or old.salt != new.salt:
            return
        was, now = old.coverage(self.now), new.coverage(self.now)
        if now < was and one.ramp:
            message = f"the coverage goes down from {was / 10_000:g}% to {now / 10_000:g}%"
            self.found.add("E009", one.ramp[0].span, message, "units leave their arms")
        changes = [
            (old.layer != new.layer, one.layer.span, "the layer"),
            (old.slots != new.slots, one.slots.span, "the slots"),
            (_text(old) != _text(new), one.where.span if one.where else one.start, "`where`"),
            (_weights(old.arms) != _weights(new.arms), one.arms.span, "arms, their order or weights"),
        ]
        for changed, span, what in changes:
            if not changed:
                continue
            if one.allow_reassign is not None and one.allow_reassign.value:
                message = f"{what} changed while the experiment runs; `allow_reassign` lets people change arms"
                self.found.add("W103", one.allow_reassign.span, message, "results from before and after do not mix")
            else:
                hint = "give it a new salt, or leave it as it runs; `allow_reassign: true` accepts a biased result"
                self.found.add("E008", span, f"{what} changed while the experiment runs under salt {old.salt}", hint)

    # ---- arms --------------------------------------------------------------------------------------------------------

    def arms(self, one: ExperimentDraft, layer: LayerDraft, draft: TrafficDraft) -> tuple[Arm, ...]:
        """The arms with home ranges and plans; E002, E004, E006, W101."""
        arms, at = list[Arm](), 0
        for arm in one.arms.value:
            home = (at, at + arm.weight.value)
            at = home[1]
            params = {name: given.value for name, (_, given) in arm.params.items()}
            plan = self.plan(arm, layer, draft)
            arms.append(Arm(arm.name.value, arm.weight.value, home, plan, params))
        structures = {arm.plan.structure.id for arm in arms if arm.plan is not None}
        if len(structures) > 1:
            message = (
                f"the arms need {len(structures)} structures: {len(structures) - 1} more selection launches a step"
            )
            self.found.add("W101", one.arms.span, message, "arms that differ in parameters and widths share one")
        return tuple(arms)

    def plan(self, arm: ArmDraft, layer: LayerDraft, draft: TrafficDraft) -> Plan | None:
        """The plan of an arm with its parameters; None where its layer only sets these, or with findings."""
        if layer.params is not None:
            self.overlays(arm, layer)
            return None
        if arm.policy is None:
            hint = f"layer {layer.name.value} chooses the policy"
            self.found.add("S009", arm.name.span, "`policy` is missing", hint)
            return None
        owners = {param: name for name, other in draft.layers.items() for param in other.params or ()}
        for param, (span, _) in arm.params.items():
            if param in owners:
                self.found.add("E006", span, f"param `{param}` belongs to layer {owners[param]}")
        plan = self.policy(arm.policy, "an arm serves; name a policy that extends it")
        if plan is None or not all(self.fits(plan, param, *given) for param, given in arm.params.items()):
            return None
        return overlay(plan, {param: given.value for param, (_, given) in arm.params.items()})

    def overlays(self, arm: ArmDraft, layer: LayerDraft) -> None:
        """An arm of a layer that only sets parameters: each must fit every policy that it may be laid over."""
        name = layer.name.value
        if arm.policy is not None:
            hint = f"layer {name} sets parameters only; remove its `params` to let it choose the policy"
            self.found.add("E006", arm.policy.span, "the policy belongs to another layer", hint)
        for param, (span, given) in arm.params.items():
            if param not in (layer.params or ()):
                hint = f"it may set {listing(layer.params or ())}"
                self.found.add("E006", span, f"param `{param}` does not belong to layer {name}", hint)
                continue
            having = [plan for plan in self.policies.plans.values() if _range(plan, param) is not None]
            using = [plan for plan in having if param in plan.structure.params]
            if not having:
                self.found.add("T001", span, f"no policy has a parameter `{param}`")
            for plan in sorted(using or having, key=lambda one: one.policy):
                if not self.fits(plan, param, span, given):
                    break

    def fits(self, plan: Plan, param: str, span: Span, given: Given[float]) -> bool:
        """Whether a plan's parameter can take a value: T001, E004."""
        ends = _range(plan, param)
        if ends is None:
            known = plan.structure.params
            hint = suggest(param, known) or f"its parameters: {', '.join(known) or 'none'}"
            self.found.add("T001", span, f"policy `{plan.policy}` has no parameter `{param}`", hint)
        elif param not in plan.structure.params:
            hint = "write a policy file with that value, and name it here"
            self.found.add("E004", span, f"param `{param}` of `{plan.policy}` is part of its structure", hint)
        elif not ends[0] <= given.value <= ends[1]:
            message = f"param {param} is {given.value:g}; policy `{plan.policy}` allows {ends[0]:g} to {ends[1]:g}"
            self.found.add("E004", given.span, message)
        else:
            return True
        return False


def _range(plan: Plan, param: str) -> tuple[float, float] | None:
    table = plan.resolved["params"]
    one = table.get(param) if isinstance(table, Mapping) else None
    return (float(one["range"][0]), float(one["range"][1])) if one is not None else None


def _meet(layer: str, slots: tuple[int, int], other: Experiment) -> bool:
    return layer == other.layer and slots[0] < other.slots[1] and other.slots[0] < slots[1]


def _text(one: Experiment) -> str:
    return one.where.text if one.where else ""


def _weights(arms: tuple[Arm, ...]) -> list[tuple[str, int]]:
    return [(arm.name, arm.weight) for arm in arms]
