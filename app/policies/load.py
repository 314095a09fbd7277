"""A folder of policies -> plans or diagnostics by name, and the default policy.

Reading is separate from compiling: `snapshot` takes the bytes once, the rest is a function of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.core import Contract
from app.policies.cache import Cache
from app.policies.check_contract import Catalogue
from app.policies.diagnostics import Diagnostic, Findings, Span, render, suggest
from app.policies.last_good import Kept, keep
from app.policies.plan import Plan
from app.policies.resolve import Library
from app.policies.source import MAX_BYTES, Source, compose
from app.policies.values import NAME, Values

MAX_FILES = 1000
DEFAULT = "base"
TRAFFIC = "traffic.yaml"
EXPERIMENTS = "experiments"

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
    """What a folder gives. default is a name that may have no plan; findings are those of no single policy."""

    policies: Mapping[str, Loaded]
    default: str
    findings: tuple[Diagnostic, ...]

    @property
    def id(self) -> str:
        """Content id: which policies can be served, and the default."""
        parts = [f"{plan.policy} {plan.policy_id}" for plan in self.plans()]
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


def snapshot(directory: Path, shown: str = "policies") -> Folder:
    """Read every policy file of a folder. `shown` is how messages call the folder.

    Editor leftovers and hidden files are passed over; links may lead anywhere inside the folder and nowhere else.
    """
    sources: dict[str, Source] = {}
    refused: list[tuple[str, str, str, str]] = []
    traffic: Source | None = None
    root = directory.resolve()
    paths = sorted(path for path in directory.iterdir() if not _IGNORED.fullmatch(path.name)) if root.is_dir() else []
    for path in paths:
        file = f"{shown}/{path.name}"
        if path.name == EXPERIMENTS and path.is_dir() and any(path.glob("*.yaml")):
            refused.append((file, "P003", "experiments are not available in this version", ""))
        if path.suffix == ".yml":
            refused.append((file, "S016", "a policy file ends in `.yaml`", f"rename it to `{path.stem}.yaml`"))
        if path.suffix != ".yaml":
            continue
        if not NAME.fullmatch(path.stem):
            refused.append(
                (file, "S016", f"`{path.stem}` is no policy name", "names are a-z, 0-9 and _, a letter first")
            )
        elif not _inside(path, root):
            refused.append(
                (file, "S016", "the file is a link that leads out of the folder", "put the file itself here")
            )
        elif len(sources) == MAX_FILES:
            refused.append((file, "S012", f"more than {MAX_FILES} policy files", ""))
            break
        elif (source := _read(path, file)) is None:
            refused.append((file, "S016", "the file cannot be read", ""))
        elif path.name == TRAFFIC:
            traffic = source
        else:
            sources[path.stem] = source
    return Folder(sources, traffic, tuple(refused))


def _inside(path: Path, root: Path) -> bool:
    """Whether a path, links followed, lies below the folder."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        return False
    return real.is_relative_to(root)


def _read(path: Path, file: str) -> Source | None:
    """At most one byte over the limit, so that a huge file costs nothing; None for what is no plain file."""
    try:
        if not path.is_file():  # a pipe would block
            return None
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
            size = path.stat().st_size if len(data) > MAX_BYTES else len(data)
        return Source(file, data, size)
    except OSError:
        return None


def load_policies(
    directory: Path, contract: Contract, *, prefixes: Sequence[int] | None = None, shown: str = "policies"
) -> PolicySet:
    """Compile every policy of a folder for a contract. Never raises for what the files say.

    prefixes: distinct prefixes of the catalogue by depth, where it is known · shown: the folder's name in messages.
    """
    return compile_folder(snapshot(directory, shown), contract, Catalogue(tuple(prefixes)) if prefixes else None)


def compile_folder(
    folder: Folder,
    contract: Contract,
    catalogue: Catalogue | None = None,
    *,
    last_good: Mapping[str, Kept] | None = None,
    cache: Cache | None = None,
) -> PolicySet:
    """Plans or diagnostics for every policy, and the default.

    last_good: what to serve, marked stale, in place of policies with errors · cache: what earlier calls compiled
    """
    cache = cache or Cache()
    library = cache.library(folder.sources)
    policies = {name: _load(name, library, contract, catalogue, cache) for name in folder.sources}
    for name, kept in (last_good or {}).items():
        if name in policies and policies[name].errors:
            good = _load(name, cache.library(kept.files), contract, catalogue, cache)
            if not good.errors:
                policies[name] = replace(good, findings=policies[name].findings, stale=True)
    files = {source.file: source.lines() for source in [folder.traffic] if source}
    found = Findings(lambda file: files.get(file, []))
    for file, code, message, hint in folder.refused:
        found.add(code, Span(file, 1, 1, 2), message, hint)
    default = _default(folder.traffic, policies, found) if folder.traffic else DEFAULT
    return PolicySet(policies, default, tuple(found))


def _load(name: str, library: Library, contract: Contract, catalogue: Catalogue | None, cache: Cache) -> Loaded:
    plan, found = cache.compile(name, library, contract, catalogue)
    chain = library.chain(name)
    if chain is None or any(one.rule.severity == "error" for one in found):
        return Loaded(plan, found)
    return Loaded(plan, found, abstract=plan is None, kept=keep(name, chain, library.sources))


def _default(source: Source, policies: Mapping[str, Loaded], found: Findings) -> str:
    """The default policy that traffic.yaml names."""
    root = compose(source, found)
    if root is None:
        return DEFAULT
    reader = Values(found)
    entries = reader.fields(root, "traffic", ("widebeam", "kind", "default", *_LATER))
    reader.version(entries.get("widebeam"), Span(source.file, 1, 1, 2))
    if "kind" not in entries:
        found.add("S009", Span(source.file, 1, 1, 2), "`kind` is missing", "write `kind: traffic`")
    reader.choice(entries.get("kind"), ("traffic",))
    for word in _LATER:
        if word in entries:
            found.add("P003", entries[word][0].span, f"`{word}` is not available in this version")
    name = reader.name(entries.get("default"))
    if name is None:
        return DEFAULT
    if name.value not in policies:
        others = ", ".join(sorted(policies))
        found.add(
            "E002", name.span, f"unknown policy `{name.value}`", suggest(name.value, policies) or f"policies: {others}"
        )
    elif policies[name.value].abstract:
        found.add("E002", name.span, f"policy `{name.value}` is abstract", "name a policy that extends it")
    return name.value


_LATER = ("unit", "missing_unit", "holdout", "layers")
