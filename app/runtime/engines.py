"""The kernels of a server, made before its first batch: from a compiled engine of the root, or here and now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from app.core import Contract
from app.errors import Rejected, unreadable
from app.ops import cuda
from app.ops.builds import GPUS
from app.ops.cuda import Build
from app.policies.plan import Plan
from app.runtime import engine_artifact
from app.runtime.engine_artifact import Engine
from app.runtime.logs import Log
from app.runtime.memory import EXHAUSTED
from app.runtime.metrics import Metrics
from app.runtime.snapshot import Snapshot
from app.runtime.states import State
from app.runtime.status import ArtifactStatus, Reason, now_iso, unfinished
from app.vocab.manifest import Found, home, verify, versions

MOST_EXPANDED: Final = 1024
"""Policies' expressions, by contract, whose modules are known without a look."""
HERE: Final = ""
"""In the place of an engine's id: compiled by this process."""


class Engines:
    """The compiled engines of a root, and where each kernel of this process came from. `prepare` and `prepare_plans` in
    any thread off the request path, everything else in any.

    Engines are looked for whenever a kernel is needed that is not there: one that is laid into the root while the
    server runs counts from then on. What is loaded stays loaded, whatever becomes of its folder.
    """

    def __init__(self, root: Path, metrics: Metrics, log: Log) -> None:
        self._root, self._log, self._metrics = root, log, metrics
        self._lock = threading.Lock()
        self._used: dict[tuple[str, torch.device], str] = {}
        self._origins: dict[tuple[Build, torch.device], str] = {}
        self._expanded: dict[tuple[str, str, object], tuple[Build, ...]] = {}
        self._notes: dict[str, ArtifactStatus] = {}
        metrics.kernel_compilations(cuda.compilations)

    def prepare(self, contract: Contract, device: torch.device) -> None:
        """Have every kernel of a contract on a device: from an engine made for just this, else compiled, which takes a
        minute the first time. Does nothing where our kernels do not run. Raises Rejected("kernels_failed")."""
        with self._lock:
            if (contract.id, device) in self._used or cuda.unfit(device) is not None:
                return
            arch = cuda.architecture(device)
            if arch not in GPUS:
                self._log.warning("kernels_unknown", arch=arch, message="compiled when they are first needed")
                return
            engine, used = engine_artifact.of_contract(contract, arch), HERE
            for found in versions(self._root, "engine"):
                if self._loaded(found, engine, engine.builds, device):
                    used = found.version
                    break
            else:
                began = time.monotonic()
                try:
                    made = cuda.ready(engine.builds, device)
                except EXHAUSTED:
                    raise
                except Exception as error:  # whatever CuPy has against a source
                    self._log.error("kernels_failed", contract=contract.id, exc_info=error)
                    message = f"{type(error).__name__}: {error}"[:500]
                    raise Rejected("kernels_failed", message, location=f"contract {contract.id}") from error
                seconds = round(time.monotonic() - began, 3)
                self._metrics.compiles_total.labels("background").inc(made)
                self._log.info("kernels_compiled", contract=contract.id, modules=made, seconds=seconds)
            self._used[contract.id, device] = used

    def prepare_plans(self, contract: Contract, device: torch.device, plans: Sequence[Plan]) -> None:
        """Have what plans add, the kernels of their expressions (`StepProgram.generated`), once each: from engines that
        were made for this contract here, else compiled. Where one does not compile, that is logged, and steps go by
        computed ranks."""
        wanted = self._of_plans(contract, device, plans)
        if not self._without_origin(wanted, device):
            return  # without the lock: another contract's kernels take a minute, and a rollback does not wait for it
        with self._lock:
            missing = self._without_origin(wanted, device)
            if not missing:
                return
            engine = engine_artifact.of_contract(contract, cuda.architecture(device))
            for found in versions(self._root, "engine"):
                loaded = self._loaded(found, engine, missing, device)
                self._origins |= dict.fromkeys(((one, device) for one in loaded), found.version)
                if loaded:
                    names = _having(loaded, wanted)
                    self._log.info("kernels_loaded", engine=found.version, modules=len(loaded), policies=names)
                missing = self._without_origin(wanted, device)
                if not missing:
                    return
            self._compile(contract, device, missing, wanted)

    def document(self, active: Snapshot | None) -> dict[str, object]:
        """The status's `engine`: the one that the active contract's kernels are of, None where they were compiled;
        modules compiled by this process; and by policy how many its expressions added, whence. missing: not there, its
        survivors come from computed ranks."""
        used, policies = HERE, dict[str, object]()
        if active is not None:
            contract, device = active.contract, active.engine.device
            used = self._used.get((contract.id, device), HERE)
            for name, builds in self._of_plans(contract, device, active.policies.plans()).items():
                origins = [self._origins.get((one, device)) for one in builds]
                here, nowhere = origins.count(HERE), origins.count(None)
                there = len(origins) - here - nowhere
                policies[name] = {"from_artifacts": there, "compiled": here, "missing": nowhere}
        return {"artifact": used or None, "compilations": cuda.compilations(), "policies": policies}

    def left_to_torch(self, contract: Contract, device: torch.device) -> dict[str, str]:
        """The status's `by_torch`: operators of a contract that no kernel takes here, why by name. Empty where none of
        our kernels runs, which `kernels` says."""
        if cuda.unfit(device) is not None:
            return {}
        return engine_artifact.left_to_torch(contract, cuda.architecture(device))

    def documents(self) -> list[dict[str, object]]:
        """The engines among the status's `artifacts`: those that were looked at, and the others as discovered."""
        found = {one.version: one for one in versions(self._root, "engine")}
        known = dict(self._notes)
        for name, one in found.items():
            state, why = (State.DISCOVERED, None) if one.complete else (State.INCOMPLETE, unfinished("engines", name))
            known.setdefault(name, ArtifactStatus("engine", name, state, now_iso(), None, why))
        return [note.document() for name, note in sorted(known.items()) if name in found]

    def _of_plans(
        self, contract: Contract, device: torch.device, plans: Iterable[Plan]
    ) -> Mapping[str, tuple[Build, ...]]:
        """What plans add on a device, by policy; nothing where our kernels do not run, or are of an unknown kind."""
        if cuda.unfit(device) is not None or (arch := cuda.architecture(device)) not in GPUS:
            return {}
        found: dict[str, tuple[Build, ...]] = {}
        for plan in plans:
            if added := engine_artifact.expressions(contract, plan):
                key = contract.id, arch, added
                builds = self._expanded.get(key)
                if builds is None:  # in either thread, to the same
                    builds = self._expanded[key] = engine_artifact.of_plans(contract, arch, [plan])
                    if len(self._expanded) > MOST_EXPANDED:  # an endless row of edits starts over
                        self._expanded.clear()
                found[plan.policy] = builds
        return found

    def _without_origin(self, wanted: Mapping[str, tuple[Build, ...]], device: torch.device) -> tuple[Build, ...]:
        every = dict.fromkeys(one for builds in wanted.values() for one in builds)
        return tuple(one for one in every if (one, device) not in self._origins)

    def _compile(
        self, contract: Contract, device: torch.device, missing: Sequence[Build], of: Mapping[str, tuple[Build, ...]]
    ) -> None:
        """Compile modules of policies. of: every module by policy"""
        began, names = time.monotonic(), _having(missing, of)
        try:
            made = cuda.ready(missing, device)
        except Exception as error:  # noqa: BLE001  whatever CuPy has against a source
            there = [one for one in missing if cuda.is_ready(one, device)]
            names = _having([one for one in missing if one not in there], of)
            self._log.error("kernels_failed", policies=names, exc_info=error)
        else:
            there, seconds = list(missing), round(time.monotonic() - began, 3)
            self._metrics.compiles_total.labels("background").inc(made)
            self._log.info("kernels_compiled", contract=contract.id, modules=made, seconds=seconds, policies=names)
        self._origins |= dict.fromkeys(((one, device) for one in there), HERE)

    def _loaded(self, found: Found, engine: Engine, wanted: Sequence[Build], device: torch.device) -> tuple[Build, ...]:
        """Those of some modules that an engine had for the device, where it is the one and whole."""
        if not found.complete:
            return ()
        try:
            there = _load(found.directory, engine, wanted, device)
        except Rejected as error:
            reason = Reason.of(error, f"{home(self._root, 'engine').name}/{found.version}")
            self._note(found.version, State.REJECTED, reason)
            return ()
        if there:
            self._note(found.version, State.ACTIVE)
        return there

    def _note(self, name: str, state: State, reason: Reason | None = None) -> None:
        """Say once what has become of an engine. One that serves goes on serving what is loaded of it."""
        known = self._notes.get(name)
        if known is not None and known.state == State.ACTIVE and reason is not None:
            if reason.code == "engine_mismatch":
                return  # it serves another contract
            state = State.ACTIVE
        if known is not None and (known.state, known.reason) == (state, reason):
            return
        self._notes[name] = ArtifactStatus("engine", name, state, now_iso(), None, reason)
        if reason is None:
            self._log.info("engine_loaded", version=name)
        else:
            self._log.error("artifact_rejected", kind="engine", version=name, **reason.document())


def _load(directory: Path, engine: Engine, wanted: Sequence[Build], device: torch.device) -> tuple[Build, ...]:
    """Load what a directory has of some modules. Raises Rejected where it is not just this engine, or not whole."""
    try:
        description = engine_artifact.read(directory)
        engine_artifact.check(description, engine)
        there = description.has(wanted)
        if there:
            verify(directory, "engine")
        cubins = engine_artifact.cubins(directory, there)
    except OSError as error:
        raise unreadable(error, "unreadable", None) from error
    try:
        cuda.ready(there, device, cubins)
    except Exception as error:  # whatever CuPy or the driver has against a binary
        raise Rejected("engine_unloadable", f"{type(error).__name__}: {error}") from error
    return there


def _having(some: Iterable[Build], of: Mapping[str, tuple[Build, ...]]) -> list[str]:
    """The policies that some modules belong to."""
    chosen = frozenset(some)
    return [name for name, builds in of.items() if not chosen.isdisjoint(builds)]
