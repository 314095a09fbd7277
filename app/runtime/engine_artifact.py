"""A compiled engine on the disk (RecoGEM 4): engines/<id>/ with MANIFEST.json, engine.json and one cubin a module.

engine.json says what the engine was made for and with (`Identity`), and which file is which module. What a contract
needs must all be there, and must all have been made for just this; what policies add is found by its content, and where
it is not there nothing is refused. The id is made from both, so that another torch, another compiler, another contract
or another policy's expression is another engine. Cubins are NVIDIA's files, as NVRTC writes them; nothing here is in a
format of our own. There is no part for torch.compile: the engine does not use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import torch

from app.core import Contract
from app.engine.graphs import buckets, most_rows
from app.errors import Rejected, counted
from app.ops import nvrtc
from app.ops.builds import GPUS, Needs, by_torch, needed, of_expressions, sources
from app.ops.cuda import Build
from app.policies.plan import Plan
from app.vocab.manifest import read_file, read_manifest
from app.vocab.manifest import versions as versions_of
from app.vocab.publish import Published, check_free, commit, draft

FILE: Final = "engine.json"
NONE: Final = "none"
"""The version of what is not installed."""
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


class Step(msgspec.Struct, frozen=True):
    """The shapes of one step: codes, survivors a request at most, and the numbers of rows that its graphs have."""

    step: int
    codes: int
    width: int
    rows: tuple[int, ...]


class Identity(msgspec.Struct, frozen=True):
    """What an engine was made for and with.

    contract: its id · arch: "sm_90" · versions: of torch, triton, cupy and nvrtc, "none" where there is none
    sources: SHA-256 of each kernel source · plan: the shapes of each step
    """

    contract: str
    arch: str
    versions: Mapping[str, str]
    sources: Mapping[str, str]
    plan: tuple[Step, ...]

    def differences(self, here: Identity) -> Iterator[tuple[str, str]]:
        """Every field in which this is not `here`, with both values."""
        yield from _differences("", msgspec.to_builtins(self), msgspec.to_builtins(here))


class Module(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cubin: the file, its source, definitions, the architecture where it is not the engine's, and the SHA-256 of
    the lines that a policy puts before the source."""

    file: str
    source: str
    define: Mapping[str, int]
    arch: str = ""
    given: str = ""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of engine.json. policies: the files that each of them added, by its name when this was made."""

    format: Literal[1]
    made_for: Identity
    modules: tuple[Module, ...]
    policies: Mapping[str, tuple[str, ...]] = {}

    @property
    def id(self) -> str:
        """What the engine must be called."""
        return _id(self.made_for, self.added)

    @property
    def added(self) -> frozenset[str]:
        """The files of modules that policies added."""
        return frozenset(one.file for one in self.modules if one.given)

    def has(self, builds: Iterable[Build]) -> tuple[Build, ...]:
        """Those of some modules that are in it."""
        files = {one.file for one in self.modules}
        return tuple(one for one in builds if _module(one).file in files)


class Engine(NamedTuple):
    """What a deployment needs on an architecture: its identity here and now, the modules, and those that policies add,
    by their names."""

    identity: Identity
    builds: tuple[Build, ...]
    policies: Mapping[str, tuple[Build, ...]] = {}

    @property
    def id(self) -> str:
        """What it is called."""
        return _id(self.identity, {_module(one).file for one in self.added})

    @property
    def added(self) -> tuple[Build, ...]:
        """The modules that policies add, once each."""
        return tuple(dict.fromkeys(one for builds in self.policies.values() for one in builds))


def of_contract(contract: Contract, arch: str, plans: Iterable[Plan] = ()) -> Engine:
    """What a contract needs, and plans add. Raises Rejected("unknown_arch")."""
    if arch not in GPUS:
        known = ", ".join(GPUS)
        raise Rejected("unknown_arch", f"no kernels are made for {arch}; known: {known}", location="arch")
    builds = needed(_needs(contract), arch)
    digests = {_name(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in sources(builds)}
    added: dict[str, tuple[Build, ...]] = {}
    for plan in sorted(plans, key=lambda one: one.policy):
        if own := of_plans(contract, arch, [plan]):  # of two by one name both are wanted
            added[plan.policy] = tuple(dict.fromkeys((*added.get(plan.policy, ()), *own)))
    return Engine(Identity(contract.id, arch, versions(), digests, _plan(contract)), builds, added)


def left_to_torch(contract: Contract, arch: str) -> dict[str, str]:
    """The operators of a contract that torch computes on an architecture although there are kernels: why, by name."""
    return by_torch(_needs(contract), arch)


def of_plans(contract: Contract, arch: str, plans: Iterable[Plan]) -> tuple[Build, ...]:
    """The modules of the steps whose expressions the kernels compute."""
    return of_expressions(_needs(contract), arch, [step for plan in plans for step in expressions(contract, plan)])


def expressions(contract: Contract, plan: Plan) -> tuple[tuple[int, str, str], ...]:
    """What the kernels compute of a plan's expressions: codes, what is normalised over, definitions. The same for plans
    that share kernels; what a catalogue numbers (labels) is in the definitions."""
    found: list[tuple[int, str, str]] = []
    for shape, step in zip(contract.steps, plan.structure.steps, strict=True):
        if step.generated is not None:
            over = ("step", "given") if step.normalize == "full" else (step.normalize,)
            found += [(shape.codes, one, step.generated.definitions) for one in over]
    return tuple(found)


def versions() -> dict[str, str]:
    """What this process would compile and launch with."""
    try:
        compiler = nvrtc.version()
    except nvrtc.Missing:
        compiler = NONE
    return {"torch": str(torch.__version__), "triton": _version("triton"), "cupy": _version(*_CUPY), "nvrtc": compiler}


def build(root: Path, engine: Engine, made_by: str, threads: int = 1) -> Published:
    """Compile every module, but for those that an engine of the same identity has, and publish ROOT/engines/<id>.
    Raises Rejected("version_exists" | "compile_failed" | "no_nvrtc")."""
    name, builds = engine.id, (*engine.builds, *engine.added)
    check_free(root, "engine", name)
    known = _known(root, engine.identity, builds)
    with draft(root, "engine") as made, ThreadPoolExecutor(threads) as pool:
        compiled = pool.map(lambda one: known.get(one) or _compiled(one, engine.identity.arch), builds)
        modules = []
        for one, cubin in zip(builds, compiled, strict=True):
            module = _module(one)
            made.write(module.file, [cubin])
            modules.append(module)
        policies = {one: tuple(_module(build).file for build in own) for one, own in engine.policies.items()}
        description = Description(1, engine.identity, tuple(modules), policies)
        text = msgspec.json.encode(description, order="deterministic")
        made.write(FILE, [msgspec.json.format(text, indent=1) + b"\n"])
        return commit(made, "engine", name, made_by, {})


def read(directory: Path) -> Description:
    """What an engine says of itself; engine.json is verified, the cubins are not read. Raises Rejected."""
    manifest = read_manifest(directory, "engine")
    if FILE not in manifest.files:
        raise Rejected("file_missing", "an engine holds this file", location=FILE)
    try:
        found = msgspec.json.decode(read_file(directory, FILE, manifest.files[FILE]), type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected("engine_invalid", f"is no description of an engine: {error}", location=FILE) from error
    if found.id != directory.name:
        message = f"what it was made for makes the id {found.id}, not {directory.name}"
        raise Rejected("engine_invalid", message, location=FILE)
    return found


def check(found: Description, here: Engine) -> None:
    """Raise Rejected("engine_mismatch") for an engine that is not the one for here, with a finding a difference. What
    policies add is no difference."""
    differences = [
        Rejected("engine_mismatch", message, location=f"{FILE}: made_for.{field}")
        for field, message in found.made_for.differences(here.identity)
    ]
    own, needed = {one.file for one in found.modules} - found.added, {_module(one).file for one in here.builds}
    if not differences and own != needed:
        message = f"{_names(needed - own)} missing, {_names(own - needed)} not needed here"
        differences = [Rejected("engine_mismatch", message, location=f"{FILE}: modules")]
    if differences:
        raise Rejected.together(differences)


def cubins(directory: Path, builds: Iterable[Build]) -> dict[Build, bytes]:
    """The cubins of builds, every byte verified while it is read. Raises Rejected with the file."""
    entries = read_manifest(directory, "engine").files
    found = {}
    for one in builds:
        file = _module(one).file
        if file not in entries:
            raise Rejected("file_missing", "not listed in the manifest", location=file)
        found[one] = bytes(read_file(directory, file, entries[file]))
    return found


def _known(root: Path, identity: Identity, builds: Sequence[Build]) -> dict[Build, bytes]:
    """What engines beside have of some modules: another policy costs its own kernels and no others."""
    found: dict[Build, bytes] = {}
    for one in versions_of(root, "engine"):
        with suppress(Rejected, OSError):  # whoever serves with it says why
            description = read(one.directory)
            if description.made_for == identity:
                found |= cubins(one.directory, description.has([build for build in builds if build not in found]))
    return found


def _needs(contract: Contract) -> Needs:
    """From what the contract carries: a row's state of two dims is heads of a prefix, a request's of three in float32
    a delta rule's. Where it is something else, a module is made that nobody asks for."""
    kept = [spec for spec in contract.states if spec.dtype.itemsize == 2]
    dtype = torch.float16 if contract.precision == "float16" else torch.bfloat16
    heads = {s.shape[1] for s in kept if s.scope == "row" and len(s.shape) == 2 and s.dtype == dtype}
    delta = {
        (s.shape[1], s.shape[2])
        for s in contract.states
        if s.scope == "request" and len(s.shape) == 3 and s.dtype == torch.float32
    }
    return Needs(
        dtype=torch.float32 if contract.precision == "float32" else dtype,
        heads=frozenset(heads),
        delta=frozenset(delta),
        sizes=contract.sizes,
        width=max(contract.limits.widths),
        batch=contract.limits.batch,
        eight=contract.precision == "fp8",
        positions=len(contract.steps) if heads else 1,
    )


def _plan(contract: Contract) -> tuple[Step, ...]:
    most = most_rows(contract.limits, contract.sizes)
    return tuple(
        Step(one.t, one.codes, one.width, tuple(buckets(rows))) for one, rows in zip(contract.steps, most, strict=True)
    )


def _compiled(one: Build, arch: str) -> bytes:
    try:
        return one.compiled(arch)
    except nvrtc.Missing as error:
        raise Rejected("no_nvrtc", str(error)) from error
    except nvrtc.CompileError as error:
        raise Rejected("compile_failed", str(error)[:2000], location=f"{one.name} {dict(one.define)}") from error


def _module(one: Build) -> Module:
    """The file of a build: named by all that it is compiled from, so that the same build has the same name everywhere.
    The source's own text is the identity's."""
    key = hashlib.sha256(repr((one.name, one.options(), one.given)).encode()).hexdigest()[:12]
    file = f"{one.name.replace('/', '-').removesuffix('.cu')}-{key}.cubin"
    given = hashlib.sha256(one.given.encode()).hexdigest() if one.given else ""
    return Module(file, one.name, dict(one.define), one.arch, given)


def _id(identity: Identity, added: Collection[str]) -> str:
    """12 hex digits of the SHA-256 over an identity as canonical JSON, and over the files that policies added."""
    whole = (identity, sorted(added)) if added else identity
    return hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()[:12]


def _names(files: Collection[str]) -> str:
    few = sorted(files)[:2]
    return (
        f"{', '.join(few)} and {len(files) - len(few)} more" if len(files) > len(few) else " and ".join(few) or "none"
    )


def _name(source: Path) -> str:
    return f"{source.parent.name}/{source.name}"


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return NONE


def _differences(place: str, made: object, here: object) -> Iterator[tuple[str, str]]:
    if isinstance(made, dict) and isinstance(here, dict):
        for key in sorted(made.keys() | here.keys()):
            yield from _differences(f"{place}.{key}" if place else key, made.get(key, NONE), here.get(key, NONE))
    elif made != here:
        yield place, f"made for {_short(made)}, here it is {_short(here)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def shown(found: Description) -> Sequence[tuple[str, object]]:
    """Lines for people."""
    made = found.made_for
    return (
        ("contract", made.contract),
        ("architecture", made.arch),
        *made.versions.items(),
        ("modules", len(found.modules) - len(found.added)),
        ("modules of policies", len(found.added)),
        *((f"policy {name}", counted(len(files), "module")) for name, files in sorted(found.policies.items())),
        *((f"rows of step {one.step}", f"{len(one.rows)} sizes up to {max(one.rows)}") for one in made.plan),
    )
