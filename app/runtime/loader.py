"""From a deployment root to a snapshot: every artifact passes the gate, or says why not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from app.config import Deployment
from app.core import Contract
from app.engine.engine import Engine
from app.engine.families.base import Family, ModelFiles
from app.engine.registry import family
from app.engine.tokens import read_json
from app.engine.weights import load as load_weights
from app.engine.weights import read_entries, resolve_precision
from app.errors import Rejected
from app.policies.load import PolicySet, load_policies
from app.runtime.contract import make_contract
from app.runtime.desired import wishes
from app.runtime.logs import Log
from app.runtime.snapshot import ArtifactRef, DeviceTrie, Snapshot
from app.runtime.status import ArtifactStatus, Reason, now_iso
from app.vocab.artifact import load_vocab
from app.vocab.manifest import Found, Kind, Manifest, verify, versions
from app.vocab.vocab import Vocab

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a root. Either `snapshot` is there, or `reasons` say why not.

    policies: the status document's `policies`, by name
    """

    snapshot: Snapshot | None = None
    reasons: tuple[Reason, ...] = ()
    artifacts: tuple[ArtifactStatus, ...] = ()
    policies: Mapping[str, object] = field(default_factory=dict)
    device: str = "cpu"


def load_root(root: Path, deployment: Deployment, log: Log) -> Loaded:
    """Load the wanted versions of a deployment root. Never raises for what files say: the reasons are in the result."""
    gate = _Gate(root, deployment, log)
    try:
        device = resolve_device(deployment.device)
        snapshot, policies = gate.snapshot(family(deployment.family), device)
    except Rejected as error:
        reason = Reason(error.code, error.message, error.location)
        return Loaded(None, (reason,), tuple(gate.artifacts), gate.policies, deployment.device)
    return Loaded(snapshot, (), tuple(gate.artifacts), policies, str(device))


def resolve_device(name: str) -> torch.device:
    """The device behind "auto", "cpu" or "cuda". Raises Rejected("no_cuda") rather than falling back."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise Rejected("no_cuda", "this machine has no CUDA device", location="deployment.toml: device")
    return torch.device(name)


def load_contract(root: Path, deployment: Deployment) -> Contract:
    """The contract of a root from its newest weights' config.json and headers; no tensor is read.

    Raises Rejected as loading would.
    """
    found = wishes(root, root / deployment.server.state_dir, "weights").found
    if not found:
        raise Rejected("no_weights", "no complete version", location="weights")
    directory = found[0].directory
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    shapes = {name: entry.shape for name, entry in read_entries(directory).items()}
    dtype = resolve_precision(deployment.precision, resolve_device(deployment.device))
    kind = family(deployment.family)
    model = kind.build(ModelFiles(config, directory, shapes), deployment.sid, deployment.limits, dtype)
    return make_contract(model, config, deployment, _name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Gate:
    """One attempt at a root; remembers what it saw of each version."""

    def __init__(self, root: Path, deployment: Deployment, log: Log) -> None:
        self._root, self._deployment, self._log = root, deployment, log
        self.artifacts: list[ArtifactStatus] = []
        self.policies: Mapping[str, object] = {}

    def snapshot(self, kind: type[Family], device: torch.device) -> tuple[Snapshot, Mapping[str, object]]:
        """Raises Rejected with the first thing that keeps this root from serving."""
        sid, limits = self._deployment.sid, self._deployment.limits

        def weights(directory: Path) -> Engine:
            precision = self._deployment.precision
            return load_weights(directory, kind, sid, limits, precision=precision, device=device)

        engine, weights_manifest = self._first("weights", weights)
        vocab, vocab_manifest = self._first("vocab", lambda directory: load_vocab(directory, sid.sizes))
        _agree(engine, weights_manifest, vocab, vocab_manifest)
        config = read_json(self._root / "weights" / weights_manifest.version / "config.json")
        assert isinstance(config, dict), "the engine was built from it"
        contract = make_contract(engine, config, self._deployment, _name(engine.dtype))
        trie = DeviceTrie.of(vocab, device)
        policies = self._policies(contract, trie)
        since = now_iso()
        parts = [contract.id, weights_manifest.digest, vocab_manifest.digest, policies.id]
        snapshot = Snapshot(
            id=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12],
            contract=contract,
            engine=engine,
            weights=ArtifactRef(weights_manifest.version, weights_manifest.digest, since),
            vocab=vocab,
            vocab_ref=ArtifactRef(vocab_manifest.version, vocab_manifest.digest, since),
            trie=trie,
            policies=policies,
        )
        return snapshot, self.policies

    def _first(self, kind: Kind, load: Callable[[Path], T]) -> tuple[T, Manifest]:
        """The first wanted version that passes. Where nobody asks for a certain one, older ones are tried in turn.

        Raises Rejected: none there, or the reason of the newest.
        """
        wish = wishes(self._root, self._root / self._deployment.server.state_dir, kind)
        for found in versions(self._root, kind):
            if not found.complete:
                self._note(kind, found, "incomplete")
        first: Rejected | None = None
        for found in wish.found:
            try:
                manifest = verify(found.directory, kind)
                loaded = load(found.directory)
            except Rejected as error:
                place = f"{kind}/{found.version}" + (f"/{error.location}" if error.location else "")
                reason = Reason(error.code, error.message, place)
                self._note(kind, found, "rejected", reason=reason)
                self._log.error(
                    "artifact_rejected",
                    kind=kind,
                    version=found.version,
                    code=error.code,
                    message=error.message,
                    location=place,
                )
                first = first or Rejected(error.code, error.message, location=place)
                continue
            self._note(kind, found, "active", digest=manifest.digest)
            return loaded, manifest
        raise first or Rejected(f"no_{kind}", "there is no complete version", location=f"{kind}/")

    def _note(
        self, kind: Kind, found: Found, state: str, *, digest: str | None = None, reason: Reason | None = None
    ) -> None:
        self.artifacts.append(ArtifactStatus(kind, found.version, state, now_iso(), digest, reason))

    def _policies(self, contract: Contract, trie: DeviceTrie) -> PolicySet:
        """The policies of the root; a default that cannot serve keeps the server from being ready."""
        found = load_policies(self._root / "policies", contract, prefixes=trie.prefixes)
        self.policies = found.status()
        for name, text in found.rejections():
            self._log.error("policy_rejected", policy=name, diagnostics=text)
        if found.plan(found.default) is None:
            message = f"the default policy `{found.default}` cannot serve; see `policies` in the status"
            raise Rejected("no_default_policy", message, location="policies/")
        return found


def _agree(engine: Engine, weights: Manifest, vocab: Vocab, vocab_manifest: Manifest) -> None:
    """Weights and vocab fit each other: what their manifests require, and a token for every code in use."""
    for one, kind, other in ((weights, "vocab", vocab_manifest), (vocab_manifest, "weights", weights)):
        wanted = {name: versions for name, versions in one.requires.items() if name == kind}.get(other.kind)
        if wanted is not None and other.version not in wanted and other.digest not in wanted:
            message = f"requires {kind} {', '.join(wanted)}; {other.version} is loaded"
            raise Rejected("requires", message, location=f"{one.kind}/{one.version}/MANIFEST.json")
    for step, missing in enumerate(engine.missing_tokens()):
        unwritable = np.isin(vocab.codes[:, step], np.array(missing, np.int64))
        if unwritable.any():
            item = int(np.argmax(unwritable))
            code = int(vocab.codes[item, step])
            message = (
                f"step {step + 1}, code {code}: the model has no token for it, and item {vocab.id(item)!r} uses it"
            )
            raise Rejected("token_missing", message, location=f"vocab/{vocab_manifest.version}")
