"""From a deployment root to a snapshot: every artifact passes the gate, or says why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from app.config import Deployment, Precision
from app.core import Contract
from app.engine.engine import Engine
from app.engine.registry import family
from app.engine.slots import Slots
from app.engine.weights import resolve_precision
from app.errors import Rejected
from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.load import PolicySet, snapshot
from app.policies.operators import Operators
from app.runtime.columns import catalogue_of
from app.runtime.contracts import Contracts
from app.runtime.desired import Chosen, Option, choose, usable, wishes
from app.runtime.expectations import Canary, read_canary
from app.runtime.in_force import InForce, compiler, renew
from app.runtime.logs import Log
from app.runtime.reading import Weights, model_files, read_fitting_vocab, read_weights
from app.runtime.snapshot import ArtifactRef, DeviceTrie, Policies, Snapshot, snapshot_id
from app.runtime.state_dir import load_last_good
from app.runtime.states import State
from app.runtime.status import SUPERSEDED, ArtifactStatus, Reason, now_iso, unfinished
from app.runtime.survey import Survey, survey
from app.runtime.takedowns import NOTHING, Takedowns, keep, kept, load_takedowns
from app.runtime.watch import scan
from app.vocab.aggregates import SideData, side_data
from app.vocab.manifest import Kind, verify, version_key
from app.vocab.vocab import Vocab

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a root. Either `snapshot` is there, or `reasons` say why not.

    in_force: the policies, which may be there without a snapshot · canaries: what its versions expect of it
    """

    snapshot: Snapshot | None = None
    reasons: tuple[Reason, ...] = ()
    artifacts: tuple[ArtifactStatus, ...] = ()
    in_force: InForce | None = None
    device: str = "cpu"
    canaries: tuple[Canary, ...] = ()


def load_root(
    root: Path,
    deployment: Deployment,
    log: Log,
    clock: Callable[[], float] = time.monotonic,
    operators: Operators = BUILT_IN,
    contracts: Contracts | None = None,
) -> Loaded:
    """Load the wanted versions of a deployment root. Never raises for what files say: the reasons are in the result.

    operators: those that policies may use · contracts: those of the root, as earlier attempts know them
    """
    contracts = contracts or Contracts(root, log)
    gate = _Gate(root, deployment, log, clock, operators, contracts)
    try:
        device = resolve_device(deployment.device)
        snapshot = gate.snapshot(device)
    except Rejected as error:
        reason = Reason(error.code, error.message, error.location)
        return Loaded(None, (reason,), gate.artifacts, gate.in_force, deployment.device)
    contracts.keep(snapshot.contract.id)
    return Loaded(snapshot, (), gate.artifacts, gate.in_force, str(device), gate.canaries)


def resolve_device(name: str) -> torch.device:
    """The device behind "auto", "cpu" or "cuda". Raises Rejected("no_cuda") rather than falling back."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise Rejected("no_cuda", "this machine has no CUDA device", location="deployment.toml: device")
    return torch.device(name)


def contract_dtype(deployment: Deployment, precision: Precision | None = None) -> torch.dtype:
    """In what the engine would compute, also where there is no such device. precision: instead of the overlay's."""
    name = deployment.device
    device = resolve_device(name) if name == "auto" else torch.device(name)
    return resolve_precision(precision or deployment.precision, device)


def load_contract(root: Path, deployment: Deployment) -> Contract:
    """The contract of a root from its newest weights' config.json and headers; no tensor is read.

    Takes seconds where none is stored. Raises Rejected as loading would.
    """
    found = wishes(root, root / deployment.server.state_dir, "weights").found
    if not found:
        raise Rejected("no_weights", "no complete version", location="weights")
    kind = family(deployment.family)
    return Contracts(root).make(kind, model_files(found[0].directory), deployment, contract_dtype(deployment)).contract


class _Gate:
    """One attempt at a root; remembers what it saw of each version."""

    def __init__(
        self,
        root: Path,
        deployment: Deployment,
        log: Log,
        clock: Callable[[], float],
        operators: Operators,
        contracts: Contracts,
    ) -> None:
        self._root, self._deployment, self._log, self._clock = root, deployment, log, clock
        self._operators, self._contracts = operators, contracts
        self._state = root / deployment.server.state_dir
        self._notes: dict[tuple[Kind, str], ArtifactStatus] = {}
        self._first: Rejected | None = None
        self._slots = Slots()
        self.in_force: InForce | None = None
        self.canaries: tuple[Canary, ...] = ()

    @property
    def artifacts(self) -> tuple[ArtifactStatus, ...]:
        """What became of each version."""
        return tuple(self._notes.values())

    def snapshot(self, device: torch.device) -> Snapshot:
        """The newest versions that pass and agree. Raises Rejected with what keeps the newest out, if none do."""
        seen = survey(self._root, self._state)
        if seen.problem is not None:
            raise seen.problem.bare()
        self._look(seen)
        heavy, words, apart = dict[str, Weights](), dict[str, Vocab](), set[tuple[str, str]]()
        deployment, contracts = self._deployment, self._contracts
        while True:
            chosen = choose(self._usable(seen, "weights"), self._usable(seen, "vocab"), apart)
            if chosen.weights is None or chosen.vocab is None:
                raise self._why(seen, chosen)
            one, other = chosen.weights, chosen.vocab
            weights = self._load(
                "weights", one, heavy, lambda path: read_weights(path, deployment, device, contracts, self._slots)
            )
            if weights is None:
                continue
            if unread := weights.engine.unread:
                self._log.info("tensors_unread", version=one.version, tensors=len(unread), one_of_them=unread[0])
            vocab = self._load("vocab", other, words, lambda path: read_fitting_vocab(path, deployment, device))
            if vocab is None:
                continue
            try:
                parts = bind(deployment, weights, one, vocab, other)
            except Rejected as error:
                apart.add((one.digest, other.digest))
                self._first = self._first or _bare(error)
                continue
            for (kind, version), why in chosen.waiting.items():
                self._note(kind, version, State.WAITING, reason=Reason("requires", why))
            for kind, version in chosen.superseded:
                self._note(kind, version, State.DISCOVERED, reason=SUPERSEDED)
            self.canaries = self._canaries(one, other)
            self._note("weights", one.version, State.ACTIVE, digest=one.digest)
            self._note("vocab", other.version, State.ACTIVE, digest=other.digest)
            return parts.snapshot(self._policies(parts)).having(takedowns=self._takedowns(seen))

    def _canaries(self, weights: Option, vocab: Option) -> tuple[Canary, ...]:
        places: tuple[tuple[Kind, str], ...] = (("weights", weights.version), ("vocab", vocab.version))
        found = (read_canary(self._root / kind / version, kind) for kind, version in places)
        return tuple(one for one in found if one is not None)

    def _look(self, seen: Survey) -> None:
        for kind, found in seen.candidates.items():
            for one in found:
                if one.problem is not None:
                    self._reject(kind, one.version, one.problem)
                elif one.manifest is None:
                    self._note(kind, one.version, State.INCOMPLETE, reason=unfinished(kind, one.version))
                else:
                    self._note(kind, one.version, State.DISCOVERED)

    def _usable(self, seen: Survey, kind: Kind) -> tuple[Option, ...]:
        """The versions that may be tried, newest first; the one that is asked for, if one is."""
        rejected = {version for (k, version), note in self._notes.items() if k == kind and note.state == State.REJECTED}
        return usable(seen.candidates[kind], seen.ask.get(kind), rejected)

    def _why(self, seen: Survey, chosen: Chosen) -> Rejected:
        """Why there is no pair to try. Whoever raises that refusal makes its traceback hold all that was loaded: so it
        is not kept here, or what is refused would stay in memory until it is collected."""
        first, self._first = self._first, None
        return first or self._nothing(seen, chosen)

    def _nothing(self, seen: Survey, chosen: Chosen) -> Rejected:
        """The same, where no version was refused."""
        for kind in ("weights", "vocab"):
            if kind in seen.ask and not any(
                one.version == seen.ask[kind] and one.manifest for one in seen.candidates[kind]
            ):
                message = f"{kind} {seen.ask[kind]!r} is not there, or not complete"
                return Rejected("no_such_version", message, location=seen.asked_by)
            if not any(one.manifest for one in seen.candidates[kind]):
                return Rejected(f"no_{kind}", "there is no complete version", location=f"{kind}/")
        (kind, version), why = next(iter(chosen.waiting.items()))
        return Rejected("requires", why, location=f"{kind}/{version}/MANIFEST.json")

    def _takedowns(self, seen: Survey) -> Takedowns:
        """The newest usable list."""
        lists: dict[str, Takedowns] = {}
        last = kept(self._state)
        while options := self._usable(seen, "takedowns"):
            found = self._load("takedowns", options[0], lists, lambda directory: load_takedowns(directory)[0])
            if found is not None and self._damaged(last, seen, found) is None:
                self._note("takedowns", found.version, State.ACTIVE, digest=found.digest)
                if found.digest != last.digest:
                    with suppress(OSError):  # it is tried again once this serves
                        keep(self._state, found)
                return found
            if found is not None:
                break
        reason = self._damaged(last, seen, NOTHING)
        if reason is None:
            return NOTHING
        self._note("takedowns", last.version, State.ACTIVE, digest=last.digest, reason=reason)
        return last

    def _damaged(self, last: Takedowns, seen: Survey, found: Takedowns) -> Reason | None:
        """Why the list that was in force last cannot be read, where it is on the disk and is newer than another one."""
        note = self._notes.get(("takedowns", last.version))
        newer = version_key(last.version) > version_key(found.version)
        wanted = seen.ask.get("takedowns") in {None, last.version}
        return note.reason if note and note.state == State.REJECTED and newer and wanted else None

    def _load(self, kind: Kind, option: Option, loaded: dict[str, T], load: Callable[[Path], T]) -> T | None:
        """A version's content, or None where it is refused. What was loaded once is kept for another pair."""
        if option.digest not in loaded:
            directory = self._root / kind / option.version
            try:
                if kind == "takedowns":  # the others are hashed while they are read
                    verify(directory, kind)
                loaded[option.digest] = load(directory)
            except Rejected as error:
                self._reject(kind, option.version, error)
                return None
        return loaded[option.digest]

    def _reject(self, kind: Kind, version: str, error: Rejected) -> None:
        reason = Reason.of(error, f"{kind}/{version}")
        self._note(kind, version, State.REJECTED, reason=reason)
        if kind != "takedowns":
            self._first = self._first or _bare(error, reason.location)
        self._log.error("artifact_rejected", kind=kind, version=version, **reason.document())

    def _note(
        self, kind: Kind, version: str, state: State, *, digest: str | None = None, reason: Reason | None = None
    ) -> None:
        self._notes[kind, version] = ArtifactStatus(kind, version, state, now_iso(), digest, reason)

    def _policies(self, parts: Parts) -> PolicySet:
        """The policies of the root; a default that cannot serve keeps the server from being ready."""
        folder, state = self._root / "policies", self._root / self._deployment.server.state_dir
        listing = scan(folder)  # before the files are read: what changes meanwhile is a change to whoever watches
        files = snapshot(folder, "policies", self._root)
        compile_ = compiler(parts.contract, catalogue_of(parts.vocab, parts.side), Cache(self._operators))
        self.in_force = renew(None, files, listing, compile_, self._clock(), load_last_good(state))
        for name, text in self.in_force.problems().items():
            self._log.error("policy_rejected", policy=name, diagnostics=text)
        found = self.in_force.policies
        if found.plan(found.default) is None:
            there = (folder / f"{found.default}.yaml").exists()
            why = "has errors; `widebeam policy check` shows them" if there else "is not there"
            message = f"the default policy `{found.default}` {why}"
            raise Rejected("no_default_policy", message, location=f"policies/{found.default}.yaml")
        return found


def _bare(error: Rejected, location: str | None = None) -> Rejected:
    """The same refusal without its traceback."""
    return Rejected(error.code, error.message, location=location or error.location)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a snapshot is made of, but for policies: weights and vocab that go together, under one contract."""

    contract: Contract
    engine: Engine
    weights: ArtifactRef
    vocab: Vocab
    vocab_ref: ArtifactRef
    trie: DeviceTrie
    side: SideData

    def snapshot(self, policies: Policies) -> Snapshot:
        """The set with policies, which were compiled for `contract`."""
        new_id = snapshot_id(self.contract.id, self.weights.digest, self.vocab_ref.digest, policies.id)
        parts = self.contract, self.engine, self.weights, self.vocab, self.vocab_ref, self.trie, policies
        return Snapshot(new_id, *parts, side=self.side)


def bind(
    deployment: Deployment,
    weights: Weights,
    weights_option: Option,
    vocab: Vocab,
    vocab_option: Option,
    known: Snapshot | None = None,
    between: Callable[[], None] = lambda: None,
) -> Parts:
    """Check weights, vocab and overlay against each other. Raises Rejected.

    known: a snapshot of the same vocab under the same declarations, whose trie and columns are taken over · between:
    called between pieces of work
    """
    engine = weights.engine
    check_tokens(engine.missing_tokens(), vocab, f"vocab/{vocab_option.version}")
    between()
    since = now_iso()
    side = known.side if known is not None else side_data(vocab, deployment, between)
    return Parts(
        contract=weights.contract,
        engine=engine,
        weights=ArtifactRef(weights_option.version, weights_option.digest, since),
        vocab=vocab,
        vocab_ref=ArtifactRef(vocab_option.version, vocab_option.digest, since),
        trie=known.trie if known is not None else DeviceTrie.of(vocab, engine.device, side),
        side=side,
    )


def check_tokens(missing: Sequence[Sequence[int]], vocab: Vocab, location: str | None = None) -> None:
    """Raise Rejected unless the model has a token for every code that an item uses; with a finding a step.

    missing: per step, the codes without a token
    """
    found = []
    for step, codes in enumerate(missing):
        if not codes:
            continue
        unwritable = np.isin(vocab.codes[:, step], np.array(codes, np.int64))
        if unwritable.any():
            item = int(np.argmax(unwritable))
            code = int(vocab.codes[item, step])
            message = (
                f"step {step + 1}, code {code}: the model has no token for it, and item {vocab.id(item)!r} uses it"
            )
            found.append(Rejected("token_missing", message, location=location))
    if found:
        raise Rejected.together(found)
