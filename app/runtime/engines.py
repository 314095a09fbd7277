"""The kernels of a server, made before its first batch: from a compiled engine of the root, or here and now."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from app.core import Contract
from app.errors import Rejected
from app.ops import cuda
from app.ops.builds import GPUS
from app.policies.plan import Plan
from app.runtime import engine_artifact
from app.runtime.engine_artifact import Engine
from app.runtime.logs import Log
from app.runtime.metrics import Metrics
from app.runtime.states import State
from app.runtime.status import ArtifactStatus, Reason, now_iso, unfinished
from app.vocab.manifest import Found, home, versions


class Engines:
    """The compiled engines of a root. `prepare` in any thread off the request path, everything else in any."""

    def __init__(self, root: Path, metrics: Metrics, log: Log) -> None:
        self._root, self._log = root, log
        self._lock = threading.Lock()
        self._ready: set[tuple[str, torch.device]] = set()
        self._notes: dict[str, ArtifactStatus] = {}
        metrics.kernel_compilations(cuda.compilations)

    def prepare(self, contract: Contract, device: torch.device) -> None:
        """Have every kernel of a contract on a device: from an engine made for just this, else compiled, which takes a
        minute the first time. Does nothing where our kernels do not run."""
        with self._lock:
            if (contract.id, device) in self._ready or cuda.unfit(device) is not None:
                return
            arch = cuda.architecture(device)
            if arch not in GPUS:
                self._log.warning("kernels_unknown", arch=arch, message="compiled when they are first needed")
                return
            engine = engine_artifact.of_contract(contract, arch)
            if not any(self._loaded(found, engine, device) for found in versions(self._root, "engine")):
                began = time.monotonic()
                made = cuda.ready(engine.builds, device)
                self._log.info(
                    "kernels_compiled", contract=contract.id, modules=made, seconds=round(time.monotonic() - began, 3)
                )
            self._ready.add((contract.id, device))

    def prepare_plans(self, contract: Contract, device: torch.device, plans: Sequence[Plan]) -> None:
        """Compile what plans add: the kernels of their expressions (`StepProgram.generated`), once each. Where one does
        not compile, that is logged, and steps go by computed ranks."""
        with self._lock:
            if cuda.unfit(device) is not None or (arch := cuda.architecture(device)) not in GPUS:
                return
            began = time.monotonic()
            try:
                made = cuda.ready(engine_artifact.of_plans(contract, arch, plans), device)
            except Exception as error:  # noqa: BLE001  whatever CuPy has against a source
                self._log.error("kernels_failed", policies=[plan.policy for plan in plans], exc_info=error)
                return
            if made:
                seconds = round(time.monotonic() - began, 3)
                self._log.info("kernels_compiled", contract=contract.id, modules=made, seconds=seconds)

    def document(self) -> dict[str, object]:
        """The status's `engine`: the one in use, None where there is none; and modules compiled by this process."""
        used = [one.version for one in self._notes.values() if one.state == State.ACTIVE]
        return {"artifact": used[-1] if used else None, "compilations": cuda.compilations()}

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

    def _loaded(self, found: Found, engine: Engine, device: torch.device) -> bool:
        """Whether an engine was the one, and its modules are on the device."""
        if not found.complete:
            return False
        try:
            description = engine_artifact.read(found.directory)
            engine_artifact.check(description, engine)
            cubins = engine_artifact.cubins(found.directory, engine.builds)
            try:
                cuda.ready(engine.builds, device, cubins)
            except Exception as error:  # whatever CuPy or the driver has against a binary
                raise Rejected("engine_unloadable", f"{type(error).__name__}: {error}") from error
        except Rejected as error:
            reason = Reason.of(error, f"{home(self._root, 'engine').name}/{found.version}")
            self._note(found.version, State.REJECTED, reason)
            return False
        self._note(found.version, State.ACTIVE)
        return True

    def _note(self, name: str, state: State, reason: Reason | None = None) -> None:
        known = self._notes.get(name)
        if known is not None and known.state == State.ACTIVE:
            return  # it serves another contract
        self._notes[name] = ArtifactStatus("engine", name, state, now_iso(), None, reason)
        if reason is None:
            self._log.info("engine_loaded", version=name)
        else:
            self._log.error("artifact_rejected", kind="engine", version=name, **reason.document())
