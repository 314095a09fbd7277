"""Which policies are in force after a read of the folder: a function of what was in force, the files and the clock.

A bad edit leaves its policy as it was, others of the same save go live. A file that is gone is believed only after a
while, since editors and copy tools remove before they write; while its policy is the default or an ancestor of another
one, the removal is refused for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from app.core import Contract
from app.policies.assign import Traffic
from app.policies.cache import Cache
from app.policies.facts import Catalogue
from app.policies.last_good import Kept
from app.policies.load import Folder, Loaded, PolicySet, compile_folder
from app.runtime.status import now_iso
from app.runtime.watch import Listing

GRACE_S: Final = 5.0
"""How long a file may be gone before its policy goes."""
TRAFFIC: Final = "traffic"
"""Under this name the last good traffic.yaml is kept, and under this prefix experiments; no policy can have them."""
EXPERIMENT: Final = "experiments/"

GONE: Final = "the file is gone, and the policy keeps its last good text"
GONE_HELP: Final = (
    "bring the file back, or take away what needs it: `default` of traffic.yaml, files that extend it, experiments"
)

HELD: Final = "the file has no errors; others that came with it have, and the server is strict"
HELD_HELP: Final = "mend the others, or take them away: then all of them go live together"

ALIVE: Final = ("running", "paused")

Compile = Callable[[Folder, Mapping[str, Kept]], PolicySet]
"""`policies.load.compile_folder` for the contract and the catalogue at hand: (files, last good texts) to policies."""


def compiler(
    contract: Contract,
    catalogue: Catalogue,
    cache: Cache,
    running: Traffic | None = None,
    between: Callable[[], None] = lambda: None,
) -> Compile:
    """How a folder becomes policies for a contract and a catalogue. running: the traffic of the same contract that the
    new one follows · between: called between pieces of work"""

    def compile_(folder: Folder, good: Mapping[str, Kept]) -> PolicySet:
        return compile_folder(
            folder, contract, catalogue, last_good=good, cache=cache, running=running, between=between
        )

    return compile_


@dataclass(frozen=True, slots=True)
class InForce:
    """A folder's policies as they serve.

    policies  what the snapshot holds
    disk      the files as they were read, and what they were
    folder    the files that were compiled: those of the disk and, in place of missing ones, the last good
    kept      the last text of each policy, and of traffic.yaml, that had no error
    gone      policies whose file is missing: since when (monotonic seconds)
    bad       policies whose file has errors or is missing: since when
    since     policy -> (policy id, ISO time since when that is live)
    faults    policies that compiled and then failed when they were tried: why
    held      with `[server] strict`: what the disk holds, with errors, and none of which is therefore in force
    """

    policies: PolicySet
    disk: Folder
    listing: Listing
    folder: Folder
    kept: Mapping[str, Kept] = field(default_factory=dict)
    gone: Mapping[str, float] = field(default_factory=dict)
    bad: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    held: PolicySet | None = None
    generation: int = 0
    loaded_at: str = ""
    attempt_at: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything that the folder holds is in force."""
        return self.listing.present and not self.bad and not self.problems()

    @property
    def pending(self) -> bool:
        """Whether time alone may change something."""
        return bool(self.gone) and self.listing.present

    def problems(self) -> dict[str, str]:
        """What is wrong by policy, as text; "" for what belongs to no policy."""
        gone = {name: f"{self.missing(name)['message']}" for name in self.gone}
        return {**gone, **dict((self.held or self.policies).rejections()), **self.faults}

    def missing(self, name: str) -> dict[str, object]:
        """What there is in the place of the file of a name in `gone`, as a finding: nothing, or what is no file."""
        file = self.kept[name].source.file
        for refused, code, message, hint in self.disk.refused:
            if refused in {file, _folder(file)}:
                return _finding(file, code, f"{message}; the policy keeps its last good text", hint)
        return _finding(file, "gone", GONE, GONE_HELP)

    def texts(self) -> dict[str, Kept]:
        """What each policy that serves was made of, by policy id."""
        return {
            one.plan.policy_id: one.kept
            for name, one in self.policies.policies.items()
            if one.plan is not None and one.kept is not None and name not in self.faults
        }

    def unless_wrong(self, before: InForce | None, clock: float) -> InForce:
        """All or nothing (`[server] strict`): what was in force before, where anything of this state is wrong.

        A start has nothing before it: there each policy with errors has its last good text, as without `strict`.
        """
        if before is None or not self.policies.rejections():
            return self
        changed = {name for name in self.policies.policies if self.holds_back(before.policies, name)}
        return replace(
            before,
            disk=self.disk,
            listing=self.listing,
            gone=self.gone,
            bad={name: before.bad.get(name, clock) for name in {*self.bad, *changed}},
            held=self.policies,
            attempt_at=self.attempt_at,
        )

    def holds_back(self, serving: PolicySet, name: str) -> bool:
        """Whether a policy of this state is another one than that which serves."""
        plan, older = self.policies.plan(name), serving.plan(name)
        return plan is not None and (older is None or older.policy_id != plan.policy_id)

    def without(self, failed: Mapping[str, str], before: InForce | None, clock: float) -> InForce:
        """The same state with the older plans of policies that failed when they were tried."""
        older = before.policies.policies if before else {}
        policies = dict(self.policies.policies)
        for name in failed:
            known = older.get(name)
            policies[name] = replace(policies[name], plan=known.plan if known else None, stale=known is not None)
        return replace(
            self,
            policies=replace(self.policies, policies=policies),
            bad={**self.bad, **{name: self.bad.get(name, clock) for name in failed}},
            since={**self.since, **{name: before.since[name] for name in failed if before and name in before.since}},
            faults=dict(failed),
        )


def renew(
    before: InForce | None,
    folder: Folder,
    listing: Listing,
    compile_: Compile,
    clock: float,
    kept: Mapping[str, Kept] | None = None,
) -> InForce:
    """What is in force after a read.

    before None: a start; `kept` are then the last good texts on the disk. clock: monotonic seconds.
    A folder that is not there takes nothing away.
    """
    good = dict(before.kept if before else kept or {})
    gone = _gone(before, folder, listing, good, clock)
    whole = _filled(folder, good, gone)
    policies = compile_(whole, good)
    if listing.present or before is None:
        dropped = [
            name for name, since in gone.items() if clock - since >= GRACE_S and not _needed(name, policies, gone)
        ]
        if dropped:
            gone = {name: since for name, since in gone.items() if name not in dropped}
            good = {name: one for name, one in good.items() if name not in dropped}
            whole = _filled(folder, good, gone)
            policies = compile_(whole, good)
    whole, policies = _trusted_traffic(before, whole, policies, good, compile_)
    return _state(before, _marked(policies, gone), folder, whole, listing, good, gone, clock)


def _gone(
    before: InForce | None, folder: Folder, listing: Listing, good: Mapping[str, Kept], clock: float
) -> dict[str, float]:
    """Known names without a file, and since when. It does not count while the whole folder is missing, nor where a file
    is there and cannot be read."""
    there = {*folder.sources, *(EXPERIMENT + name for name in folder.experiments)}
    there |= {TRAFFIC} if folder.traffic else set()
    first = clock if before else clock - GRACE_S  # at a start nobody is in the middle of a save
    known = before.gone if before and listing.present else {}
    refused = {file for file, *_ in folder.refused}
    unreadable = {Path(file).stem for file in refused}
    unreadable |= {name.removeprefix(EXPERIMENT) for name in good if _folder(good[name].source.file) in refused}
    return {
        name: clock if name.removeprefix(EXPERIMENT) in unreadable else known.get(name, first)
        for name in good
        if name not in there
    }


def _folder(file: str) -> str:
    """Where a file lies, as messages call it."""
    return file.rpartition("/")[0]


def _filled(folder: Folder, good: Mapping[str, Kept], gone: Mapping[str, float]) -> Folder:
    """The folder with the last good text of what is missing."""
    sources, experiments = dict(folder.sources), dict(folder.experiments)
    for name in gone:
        if name.startswith(EXPERIMENT):
            experiments[name.removeprefix(EXPERIMENT)] = good[name].source
        elif name != TRAFFIC:
            sources[name] = good[name].source
    traffic = good[TRAFFIC].source if TRAFFIC in gone else folder.traffic
    return replace(folder, sources=sources, traffic=traffic, experiments=experiments)


def _needed(name: str, policies: PolicySet, gone: Mapping[str, float]) -> bool:
    """Whether a policy without a file is the default, the holdout's, an arm of an experiment that has not stopped,
    or an ancestor of one that has a file."""
    children = (one.kept for child, one in policies.policies.items() if child not in gone and not one.stale)
    traffic = policies.traffic
    served = [arm.plan for one in traffic.experiments.values() if one.state in ALIVE for arm in one.arms]
    served += [traffic.holdout.plan] if traffic.holdout else []
    if name == policies.default or any(plan is not None and plan.policy == name for plan in served):
        return True
    return any(kept is not None and name in kept.files for kept in children)


def _trusted_traffic(
    before: InForce | None, folder: Folder, policies: PolicySet, good: dict[str, Kept], compile_: Compile
) -> tuple[Folder, PolicySet]:
    """The traffic file decides unless it has errors or names a default that cannot serve: then the traffic before it
    does. `good` learns the text that is in force.
    """
    source = folder.traffic
    if source is None:
        return folder, policies
    wrong = any(one.span.file == source.file and one.rule.severity == "error" for one in policies.findings)
    if not wrong and policies.plan(policies.default) is not None:
        good[TRAFFIC] = Kept(TRAFFIC, {TRAFFIC: source})
        return folder, policies
    last = good[TRAFFIC].source if TRAFFIC in good else None
    if last is None and before is None:
        return folder, policies
    older = replace(folder, traffic=last)
    stood_in = compile_(older, good)
    findings = tuple(dict.fromkeys((*policies.findings, *stood_in.findings)))
    return older, replace(stood_in, findings=findings)


def _marked(policies: PolicySet, gone: Mapping[str, float]) -> PolicySet:
    """Policies without a file are stale, whatever their last text says."""
    marked = {name: replace(one, stale=True) if name in gone else one for name, one in policies.policies.items()}
    return replace(policies, policies=marked)


def _state(
    before: InForce | None,
    policies: PolicySet,
    disk: Folder,
    folder: Folder,
    listing: Listing,
    good: dict[str, Kept],
    gone: Mapping[str, float],
    clock: float,
) -> InForce:
    now = now_iso()
    fresh = {name: one.kept for name, one in policies.policies.items() if one.kept is not None and not one.stale}
    broken = {one.span.file for one in policies.findings if one.rule.severity == "error"}
    for name, source in folder.experiments.items():
        if source.file not in broken:
            fresh[EXPERIMENT + name] = Kept(EXPERIMENT + name, {EXPERIMENT + name: source})
    bad_names = [name for name, one in policies.policies.items() if one.errors or name in gone]
    known = before.bad if before else {}
    since = {}
    for plan in policies.plans():
        same = before is not None and before.since.get(plan.policy, ("", ""))[0] == plan.policy_id
        since[plan.policy] = before.since[plan.policy] if before and same else (plan.policy_id, now)
    changed = before is None or before.policies.id != policies.id
    return InForce(
        policies=policies,
        disk=disk,
        listing=listing,
        folder=folder,
        kept={**good, **fresh},
        gone=gone,
        bad={name: known.get(name, clock) for name in bad_names},
        since=since,
        generation=(before.generation if before else 0) + changed,
        loaded_at=now if before is None or changed else before.loaded_at,
        attempt_at=now,
    )


def document(state: InForce, clock: float, killed: frozenset[str] = frozenset()) -> dict[str, object]:
    """The status document's `policies` by name: state, ids, errors with their places, how long it has been stale."""
    return {
        name: _one(state, name, clock, killed)
        for name in sorted({*state.policies.policies, *(state.held.policies if state.held else ())})
        if not _loaded(state, name).abstract or _loaded(state, name).errors or name in state.gone
    }


def _loaded(state: InForce, name: str) -> Loaded:
    """A policy as it serves; one that is only held back has no plan."""
    known = state.policies.policies.get(name)
    return known or replace((state.held or state.policies).policies[name], plan=None, kept=None)


def _one(state: InForce, name: str, clock: float, killed: frozenset[str]) -> dict[str, object]:
    loaded = _loaded(state, name)
    if state.held is not None and name in state.bad and name in state.held.policies:
        loaded = replace(loaded, stale=loaded.plan is not None, findings=state.held.policies[name].findings)
    plan = loaded.plan
    stopped = name != state.policies.default and (name in killed or "*" in killed)
    shown: dict[str, object] = {
        "state": "killed" if stopped else loaded.state,
        "policy_id": plan.policy_id if plan else None,
        "errors": [finding.data() for finding in loaded.findings],
    }
    if plan is not None:
        shown |= {"live_since": state.since[name][1], "structure": plan.structure.id}
    source = state.folder.sources.get(name)
    if loaded.kept is not None:
        shown["source_sha"] = loaded.kept.source.sha[:12]
    if name in state.bad:
        shown["stale_seconds"] = round(clock - state.bad[name], 3)
    if name in state.faults:
        shown["errors"] = [_finding(f"policies/{name}.yaml", "canary_failed", state.faults[name], "")]
    elif name in state.gone:
        shown["errors"] = [state.missing(name)]
    elif state.held is not None and name in state.bad and not loaded.errors:
        shown["errors"] = [_finding(f"policies/{name}.yaml", "held", HELD, HELD_HELP)]
    elif loaded.stale and source is not None:
        shown["pending_sha"] = source.sha[:12]
    return shown


def _finding(file: str, code: str, message: str, hint: str) -> dict[str, object]:
    """A finding about a file as a whole, in the form of those inside of it."""
    place = {"file": file, "line": 0, "col": 0, "end_col": 0}
    return {**place, "code": code, "severity": "error", "message": message, "help": hint}
