"""A folder of policies -> plans or diagnostics by name, and the default policy.

Reading is separate from compiling: `snapshot` takes the bytes once, the rest is a function of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from app.core import Contract
from app.errors import printable
from app.policies.assign import Traffic
from app.policies.cache import Cache
from app.policies.check_contract import Catalogue
from app.policies.diagnostics import Diagnostic, Findings, Span, render
from app.policies.experiments import Loaded as LoadedExperiment
from app.policies.experiments import load_traffic
from app.policies.last_good import Kept, keep
from app.policies.plan import Plan
from app.policies.resolve import Library
from app.policies.source import MAX_BYTES, Source
from app.policies.traffic import FILE as TRAFFIC
from app.policies.traffic_checks import Policies
from app.policies.values import NAME

MAX_FILES = 1000
EXPERIMENTS = "experiments"

_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
_IGNORED = re.compile(r"[._].*|.*~|.*\.(?:swp|tmp|bak)|4913|#.*#")


@dataclass(frozen=True)
class Loaded:
    """One policy of a folder: a plan, or none with the reasons. abstract = only to be extended.

    stale  the file has errors: the plan is that of its last good text
    kept   the texts that the plan, or the abstract policy, is made of; None where there is nothing without errors
    """

    plan: Plan | None
    findings: tuple[Diagnostic, ...]
    abstract: bool = False
    stale: bool = False
    kept: Kept | None = None

    @property
    def state(self) -> str:
        """live | stale | rejected."""
        return "stale" if self.stale else "live" if self.plan else "rejected"

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that keep it from being served."""
        return tuple(one for one in self.findings if one.rule.severity == "error")


@dataclass(frozen=True)
class PolicySet:
    """What a folder gives. default is a name that may have no plan; findings are those of no single policy.

    traffic      how requests are shared among policies · experiments: what became of each file
    """

    policies: Mapping[str, Loaded]
    default: str
    findings: tuple[Diagnostic, ...]
    traffic: Traffic = field(default_factory=lambda: Traffic(None))
    experiments: Mapping[str, LoadedExperiment] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Content id: which policies can be served, the default, and who gets which."""
        parts = [f"{plan.policy} {plan.policy_id}" for plan in self.plans()]
        parts.append(self.traffic.id)
        return hashlib.sha256("\n".join([self.default, *parts]).encode()).hexdigest()[:12]

    def plan(self, name: str) -> Plan | None:
        """The plan of a policy; None where there is none to serve."""
        loaded = self.policies.get(name)
        return loaded.plan if loaded else None

    def plans(self) -> tuple[Plan, ...]:
        """Every plan, by name."""
        return tuple(one.plan for _, one in sorted(self.policies.items()) if one.plan is not None)

    def status(self) -> dict[str, object]:
        """The status document's `policies`: state, id and findings by name; abstract policies are not in it."""
        return {
            name: {
                "state": one.state,
                "policy_id": one.plan.policy_id if one.plan else None,
                "errors": [finding.data() for finding in one.findings],
            }
            for name, one in sorted(self.policies.items())
            if not one.abstract
        }

    def rejections(self) -> tuple[tuple[str, str], ...]:
        """(name, what is wrong as text) of every policy that cannot be served, and ("", ...) for the folder."""
        own = [(name, one.errors) for name, one in sorted(self.policies.items()) if one.errors]
        folder = tuple(one for one in self.findings if one.rule.severity == "error")
        return tuple((name, render(errors)) for name, errors in [*own, *([("", folder)] if folder else [])])


@dataclass(frozen=True)
class Folder:
    """The bytes of a folder at one moment. refused: files that cannot be policies, with code, message and help."""

    sources: Mapping[str, Source]
    traffic: Source | None = None
    refused: tuple[tuple[str, str, str, str], ...] = field(default=())
    experiments: Mapping[str, Source] = field(default_factory=dict)


def snapshot(directory: Path, shown: str = "policies", root: Path | None = None) -> Folder:
    """Read every policy file of a folder. `shown` is how messages call the folder.

    Editor leftovers and hidden files are passed over; links may lead anywhere inside the folder and nowhere else.
    root: where given, the folder itself may be a link to a place inside of it and to no other
    """
    if root is not None and not _inside(directory, root.resolve()):
        hint = "put the folder itself here, or a link to another folder of the root"
        return Folder({}, refused=((shown, "S016", "the folder is a link that leads out of the root", hint),))
    refused: list[tuple[str, str, str, str]] = []
    sources = _sources(directory, shown, directory.resolve(), refused)
    experiments = _sources(directory / EXPERIMENTS, f"{shown}/{EXPERIMENTS}", directory.resolve(), refused)
    traffic = sources.pop(Path(TRAFFIC).stem, None)
    return Folder(sources, traffic, tuple(refused), experiments)


def _sources(directory: Path, shown: str, root: Path, refused: list[tuple[str, str, str, str]]) -> dict[str, Source]:
    """The files of one directory by name; what cannot be a file of ours goes to `refused`."""
    sources: dict[str, Source] = {}
    try:
        if not directory.is_dir():
            return sources
        found = sorted(path for path in directory.iterdir() if not _IGNORED.fullmatch(path.name))
    except OSError as error:
        refused.append((shown, "S016", f"cannot be read: {error.strerror}", "let the server's user read the folder"))
        return sources
    for path in found:
        file, stem = f"{shown}/{printable(path.name)}", printable(path.stem)
        if path.suffix == ".yml":
            refused.append((file, "S016", "a policy file ends in `.yaml`", f"rename it to `{stem}.yaml`"))
        if path.suffix != ".yaml":
            continue
        if not NAME.fullmatch(path.stem):
            refused.append((file, "S016", f"`{stem}` is no policy name", "names are a-z, 0-9 and _, a letter first"))
        elif not _inside(path, root):
            refused.append(
                (file, "S016", "the file is a link that leads out of the folder", "put the file itself here")
            )
        elif len(sources) == MAX_FILES:
            refused.append((file, "S012", f"more than {MAX_FILES} policy files", ""))
            break
        elif isinstance(source := _read(path, file), str):
            refused.append((file, "S016", source, "put a plain file there that the server may read"))
        else:
            sources[path.stem] = source
    return sources


def _inside(path: Path, root: Path) -> bool:
    """Whether a path, links followed, lies below the folder."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        return False
    return real.is_relative_to(root)


def _read(path: Path, file: str) -> Source | str:
    """At most one byte over the limit, so that a huge file costs nothing; why not, for what cannot be read."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would block
            return f"a {_KINDS.get(stat.S_IFMT(mode), 'special file')} stands where a file should"
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
            size = path.stat().st_size if len(data) > MAX_BYTES else len(data)
        return Source(file, data, size)
    except OSError as error:
        return f"the file cannot be read: {os.strerror(error.errno) if error.errno else error}"


def compile_folder(
    folder: Folder,
    contract: Contract,
    catalogue: Catalogue | None = None,
    *,
    last_good: Mapping[str, Kept] | None = None,
    cache: Cache | None = None,
    running: Traffic | None = None,
    now: float | None = None,
    between: Callable[[], None] = lambda: None,
) -> PolicySet:
    """Plans or diagnostics for every policy, and the default.

    last_good: what to serve, marked stale, in place of policies with errors, and of experiments (`experiments/NAME`) ·
    cache: what earlier calls compiled · running: the traffic that runs now, of the same contract: what experiments may
    not change, and what they fall back to · now: wall-clock unix seconds · between: called between pieces
    of work
    """
    cache = cache or Cache()
    library = cache.library(folder.sources)
    policies = {name: _load(name, library, contract, catalogue, cache, between) for name in folder.sources}
    for name, kept in (last_good or {}).items():
        if name in policies and policies[name].errors:
            good = _load(name, cache.library(kept.files), contract, catalogue, cache, between)
            if not good.errors:
                policies[name] = replace(good, findings=policies[name].findings, stale=True)
    found = Findings(lambda _: ())
    for file, code, message, hint in folder.refused:
        found.add(code, Span(file, 1, 1, 2), message, hint)
    plans = {name: one.plan for name, one in policies.items() if one.plan is not None}
    known = Policies(
        plans=plans,
        abstract=[name for name, one in policies.items() if one.abstract],
        broken=[name for name, one in policies.items() if one.plan is None and not one.abstract],
        stale=[name for name, one in policies.items() if one.stale],
    )
    now = datetime.now(UTC).timestamp() if now is None else now
    prefix = f"{EXPERIMENTS}/"
    kept_texts = {
        name.removeprefix(prefix): one.source for name, one in (last_good or {}).items() if name.startswith(prefix)
    }
    shared = load_traffic(folder.traffic, folder.experiments, known, now, running, kept_texts, contract.request)
    findings = tuple(sorted((*found, *shared.findings), key=lambda one: (one.span, one.rule.code, one.message)))
    return PolicySet(policies, shared.default, findings, shared.traffic, shared.experiments)


def _load(
    name: str,
    library: Library,
    contract: Contract,
    catalogue: Catalogue | None,
    cache: Cache,
    between: Callable[[], None],
) -> Loaded:
    plan, found = cache.compile(name, library, contract, catalogue, between)
    chain = library.chain(name)
    if chain is None or any(one.rule.severity == "error" for one in found):
        return Loaded(plan, found)
    return Loaded(plan, found, abstract=plan is None, kept=keep(name, chain, library.sources))
