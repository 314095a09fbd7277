"""The gate as one report: every finding about the versions, the contract, the policies and the experiments of a root.

The server stops at the first version that cannot serve and goes on with an older one; this looks at everything of the
versions that are asked about, and says all that is wrong. Nothing is loaded onto a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from app.config import Deployment
from app.core import Contract
from app.engine import facts
from app.engine.fp8 import carrier
from app.engine.registry import family
from app.engine.weights import name_findings, read_entries, value_findings
from app.errors import Rejected
from app.policies.builtin import BUILT_IN
from app.policies.cache import Cache
from app.policies.diagnostics import Diagnostic
from app.policies.load import compile_folder, snapshot
from app.policies.operators import Operators
from app.policies.rules import Severity
from app.runtime.columns import catalogue_of
from app.runtime.contracts import FOLDER, OWN, Contracts
from app.runtime.desired import Option, wishes
from app.runtime.loader import check_tokens, contract_dtype
from app.runtime.reading import model_files
from app.runtime.takedowns import load_takedowns
from app.vocab.aggregates import SideData, side_data
from app.vocab.artifact import load_vocab
from app.vocab.manifest import Kind, is_version, read_manifest, verify
from app.vocab.vocab import Vocab

T = TypeVar("T")


class Finding(NamedTuple):
    """severity "error" keeps something from serving · place: from the root, with line, tensor or row."""

    severity: Severity
    code: str
    place: str
    message: str


class Report(NamedTuple):
    """contract: None where none can be made · weights, vocab: the versions looked at."""

    contract: str | None
    weights: str | None
    vocab: str | None
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """How many findings keep something from serving."""
        return sum(one.severity == "error" for one in self.findings)


def examine(
    root: Path,
    deployment: Deployment,
    *,
    weights: str | None = None,
    vocab: str | None = None,
    operators: Operators = BUILT_IN,
) -> Report:
    """Look at a root: these versions, or those that a start would try first. Takes seconds where no contract is stored,
    and reads the weights once."""
    return _Examination(root, deployment, operators).report(weights, vocab)


class _Examination:
    def __init__(self, root: Path, deployment: Deployment, operators: Operators) -> None:
        self._root, self._deployment, self._operators = root, deployment, operators
        self._found: list[Finding] = []
        self._missing: tuple[tuple[int, ...], ...] | None = None
        self._side: SideData | None = None

    def report(self, weights: str | None, vocab: str | None) -> Report:
        """Everything, in the order in which a server would come to it."""
        one, other = self._version("weights", weights), self._version("vocab", vocab)
        takedowns = self._version("takedowns", None)
        contract, words = None, None
        if one is not None:
            self._files("weights", one)
            contract = self._tried(lambda: self._weights(one), f"weights/{one}")
        if other is not None:
            words = self._vocab(other)
        if takedowns is not None:
            under = f"takedowns/{takedowns}"
            self._tried(lambda: load_takedowns(self._root / under), under)
        if one is not None and other is not None:
            self._together(one, other, words)
        if contract is not None:
            self._policies(contract, words)
        return Report(contract.id if contract else None, one, other, tuple(dict.fromkeys(self._found)))

    def _add(self, error: Rejected, under: str = "") -> None:
        place = "/".join(part for part in (under, error.location) if part)
        self._found.append(Finding("error", error.code, place, error.message))
        for other in error.others:
            self._add(other, under)

    def _tried(self, call: Callable[[], T], under: str = "") -> T | None:
        """What a call gives; None where it is refused, which is written down."""
        try:
            return call()
        except Rejected as error:
            # places in deployment.toml and contracts/ are those of the root, whoever finds them
            self._add(error, "" if (error.location or "").startswith(("deployment.toml", FOLDER, OWN)) else under)
            return None

    def _version(self, kind: Kind, named: str | None) -> str | None:
        """The version to look at; None where there is none."""
        if named is not None:
            if not is_version(named) or not (self._root / kind / named).is_dir():
                self._add(Rejected("no_such_version", f"{kind} {named!r} is not there", location=f"{kind}/"))
                return None
            return named
        wish = self._tried(lambda: wishes(self._root, self._root / self._deployment.server.state_dir, kind))
        if wish is not None and wish.found:
            return wish.found[0].version
        if wish is not None and kind != "takedowns":
            self._add(Rejected(f"no_{kind}", "there is no complete version", location=f"{kind}/"))
        return None

    def _files(self, kind: Kind, version: str) -> bool:
        """The manifest, and the digest of every file; whether the manifest can be read."""
        directory, under = self._root / kind / version, f"{kind}/{version}"
        try:
            manifest = read_manifest(directory, kind)
        except Rejected as error:
            self._add(error, under)
            return False
        for name in manifest.files:
            self._tried(partial(verify, directory, kind, name.__eq__), under)
        return True

    def _weights(self, version: str) -> Contract:
        """The tensors against the family and config.json, and the contract. Raises Rejected where neither is known."""
        directory, under, deployment = self._root / "weights" / version, f"weights/{version}", self._deployment
        kind, files = family(deployment.family), model_files(directory)
        dtype = contract_dtype(deployment)
        model = facts.build(kind, files, deployment.sid, deployment.limits, carrier(dtype)).family
        self._missing, entries = model.missing_tokens(), read_entries(directory)
        for problem in name_findings(model, entries):
            self._add(problem, under)

        def look() -> None:
            for problem in value_findings(model, entries, carrier(dtype)):
                self._add(problem, under)

        self._tried(look, under)
        made = Contracts(self._root).make(kind, files, deployment, dtype, store=False)
        for problem in made.found:
            self._add(problem)
        place = f"{FOLDER}/{made.contract.id}.json"
        if made.file is None:
            message = "is not there: a server makes it before it is ready; `widebeam contract generate` makes it now"
            self._found.append(Finding("warning", "contract_missing", place, message))
        for function in made.functions:
            if not function.exported:
                message = f"{function.name} could not be exported: {function.reason}"
                self._found.append(Finding("note", "not_exported", place, message))
        return made.contract

    def _vocab(self, version: str) -> Vocab | None:
        under = f"vocab/{version}"
        if not self._files("vocab", version):
            return None
        vocab = self._tried(lambda: load_vocab(self._root / under, self._deployment.sid.sizes), under)
        if vocab is not None:
            self._side = self._tried(lambda: side_data(vocab, self._deployment), under)
        return vocab

    def _together(self, one: str, other: str, vocab: Vocab | None) -> None:
        """Weights and vocab against each other: `requires` of both manifests, a token for every code in use."""
        try:
            heavy = Option.of(read_manifest(self._root / "weights" / one, "weights"))
            words = Option.of(read_manifest(self._root / "vocab" / other, "vocab"))
        except Rejected:
            return  # said before
        self._requires("weights", heavy, "vocab", words)
        self._requires("vocab", words, "weights", heavy)
        if vocab is not None and self._missing is not None:
            missing = self._missing
            self._tried(lambda: check_tokens(missing, vocab), f"vocab/{other}")

    def _requires(self, kind: Kind, option: Option, against: Kind, other: Option) -> None:
        if not option.takes(against, other):
            message = f"requires {against} {', '.join(option.requires[against])}; {other.version} is none of these"
            self._add(Rejected("requires", message, location=f"{kind}/{option.version}/MANIFEST.json"))

    def _policies(self, contract: Contract, vocab: Vocab | None) -> None:
        """Every policy, the shares and the experiments, against this contract and this catalogue."""
        if vocab is not None and self._side is None:
            return  # what policies may read of the catalogue is not known; that was said before
        catalogue = None if vocab is None or self._side is None else catalogue_of(vocab, self._side)
        folder = snapshot(self._root / "policies", "policies")
        found = compile_folder(folder, contract, catalogue, cache=Cache(self._operators))
        diagnostics = [one for loaded in found.policies.values() for one in loaded.findings]
        diagnostics += found.findings
        diagnostics += [one for loaded in found.experiments.values() for one in loaded.findings]
        self._found += [_of(one) for one in diagnostics]
        if found.plan(found.default) is None:
            message = f"the default policy `{found.default}` cannot serve"
            self._add(Rejected("no_default_policy", message, location=f"policies/{found.default}.yaml"))


def _of(one: Diagnostic) -> Finding:
    severity, span = one.rule.severity, one.span
    return Finding(severity, one.rule.code, f"{span.file}:{span.line}:{span.col}", one.message)
