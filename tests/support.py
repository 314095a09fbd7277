"""Small real things for tests: random models behind the engine seam, catalogues, jobs, and deployment roots on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save

from app.config import Deployment, Limits, Server, SidConfig, parse
from app.core import Contract, HistoryIds, Ranked, Request
from app.engine.apart import export_apart
from app.engine.engine import Engine
from app.engine.families.base import Binding, Family, ModelFiles
from app.engine.families.onerec import OneRec
from app.engine.families.onerec_config import parse as parse_onerec
from app.engine.families.onerec_reference import OneRecReference
from app.engine.functions import Function
from app.errors import WidebeamError
from app.policies.assign import Traffic
from app.policies.compile import compile_policy
from app.policies.experiments import Loaded
from app.policies.plan import Plan
from app.policies.source import Source
from app.runtime import contracts
from app.runtime.admission import Admission
from app.runtime.contract import make_contract
from app.runtime.job import Batch, Job
from app.runtime.loader import load_contract
from app.runtime.metrics import Metrics
from app.runtime.snapshot import ArtifactRef, DeviceTrie, Snapshot
from app.runtime.steps import StepLoop
from app.vocab.artifact import save_vocab
from app.vocab.items import Column, Numbers, Strings, Table, Texts
from app.vocab.publish import commit, draft
from app.vocab.vocab import Vocab, arrange, make_vocab

ONEREC: Mapping[str, object] = {
    "family": "onerec",
    "d_model": 16,
    "layers": 2,
    "heads": 2,
    "head_dim": 8,
    "cross_groups": 2,
    "self_groups": 1,
    "ffn": 32,
    "history": {"short": 6, "long": 2, "pool": 2},
}


def onerec_config(sizes: Sequence[int], **changes: object) -> dict[str, object]:
    """config.json of a small random onerec."""
    return {**ONEREC, "sizes": list(sizes), **changes}


def onerec_weights(config: Mapping[str, object], seed: int = 0, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Random weights, large enough that prefixes matter to the logits."""
    reference = OneRecReference(parse_onerec(dict(config))).eval()
    generator = torch.Generator().manual_seed(seed)
    reference.reset_parameters(generator)
    state = reference.state_dict()
    return {name: w + scale * torch.randn(w.shape, generator=generator) for name, w in sorted(state.items())}


def bound(binding: Binding, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A parameter as its binding says."""
    whole = torch.cat([weights[source] for source in binding.sources])
    return whole if binding.rows is None else torch.cat([whole, torch.zeros_like(whole[:1])])[binding.rows]


def onerec_engine(sizes: Sequence[int], limits: Limits, seed: int = 0, **changes: object) -> Engine:
    """A small onerec in memory, bound as the engine binds it."""
    config = msgspec.to_builtins(parse_onerec(onerec_config(sizes, **changes)))
    weights = onerec_weights(config, seed)
    files = ModelFiles(config, Path(), {name: tuple(w.shape) for name, w in weights.items()})
    family = OneRec.build(files, SidConfig(sizes=tuple(sizes)), limits, torch.float32)
    for name, binding in family.bindings().items():
        owner, _, leaf = name.rpartition(".")
        setattr(family.get_submodule(owner), leaf, torch.nn.Parameter(bound(binding, weights), requires_grad=False))
    return Engine(family.eval(), device=torch.device("cpu"), dtype=torch.float32)


def random_sids(sizes: Sequence[int], items: int, seed: int = 0) -> np.ndarray:
    """Distinct random SIDs [items, L] int32 in SID order."""
    generator = np.random.default_rng(seed)
    total = int(np.prod(sizes))
    flat = np.sort(generator.choice(total, size=min(items, total), replace=False))
    return np.stack(np.unravel_index(flat, sizes), axis=1).astype(np.int32)


class Present:
    """A client that stays."""

    def gone(self, now: float) -> WidebeamError | None:
        """Never."""


BASE = "widebeam: 1\n"


def plan_of(
    contract: Contract, text: str = BASE, *, name: str = "base", others: Mapping[str, str] | None = None
) -> Plan:
    """Compile one policy text; a fault of the text fails the test with the rendered findings."""
    texts = {**(others or {}), name: text}
    sources = {key: Source(f"policies/{key}.yaml", value.encode()) for key, value in texts.items()}
    plan, findings = compile_policy(name, sources, contract)
    assert plan is not None, findings
    return plan


class Policies:
    """Plans by name, as a snapshot holds them."""

    id = "test"

    def __init__(self, plans: Mapping[str, Plan], default: str = "base", traffic: Traffic | None = None) -> None:
        self._plans, self.default = plans, default
        self.traffic = traffic or Traffic(plans.get(default))
        self.experiments: Mapping[str, Loaded] = {}

    def plan(self, name: str) -> Plan | None:
        """See `runtime.snapshot.Policies`."""
        return self._plans.get(name)

    def plans(self) -> list[Plan]:
        """See `runtime.snapshot.Policies`."""
        return list(self._plans.values())


def catalogue(sids: np.ndarray, sizes: Sequence[int], ids: Sequence[str] | None = None, version: str = "v1") -> Vocab:
    """A vocab of SIDs that are in SID order; ids default to "i0", "i1", .."""
    names = [f"i{item}" for item in range(len(sids))] if ids is None else list(ids)
    table = Table(Strings.of([name.encode() for name in names]), np.asarray(sids, np.int32), {})
    return make_vocab(table, sizes, version=version, digest=version)


def deployment_of(sizes: Sequence[int], **limits: object) -> Deployment:
    """A deployment of a small onerec."""
    given = {"widths": (64,) * len(sizes), "rows": 4096, "batch": 16, "context": 64, "k": 1000, **limits}
    sid = SidConfig(sizes=tuple(sizes))
    server = Server(policy_override=True)
    return Deployment(family="onerec", sid=sid, device="cpu", limits=Limits(**given), server=server)


def snapshot_of(
    engine: Engine, vocab: Vocab, deployment: Deployment, policies: Mapping[str, str] | None = None
) -> Snapshot:
    """A snapshot in memory; policies are texts by name (default: an empty `base`)."""
    contract = make_contract(engine, {}, deployment, "float32")
    texts = {"base": BASE, **(policies or {})}
    plans = {name: plan_of(contract, text, name=name, others=texts) for name, text in texts.items()}
    ref = ArtifactRef("v1", "w" * 8, "now")
    return Snapshot(
        "s1", contract, engine, ref, vocab, ArtifactRef(vocab.version, vocab.digest, "now"),
        DeviceTrie.of(vocab, engine.device), Policies(plans),
    )  # fmt: skip


def job_of(snapshot: Snapshot, deployment: Deployment, history: Sequence[str] = (), **fields: object) -> Job:
    """An admitted job of a client that stays. fields: those of core.Request (`policy`, `k`, `exclude`)."""
    request = Request(**{"request_id": "r", "context": HistoryIds(tuple(history)), "k": 10, **fields})
    admission = Admission(deployment)
    choice = admission.choose(request, snapshot)
    own = admission.admit(request, choice, snapshot)
    return Job(
        request, Present(), snapshot, choice.plan, own.inputs, choice.planned, own.excluded, own.seen, 0.0, own.fields
    )  # fmt: skip


def run_batch(jobs: Sequence[Job], transition: str = "ancestry") -> list[Ranked]:
    """One batch through the step loop; a job that failed fails the test."""
    served = StepLoop(lambda: 0.0, Metrics(), transition).serve(Batch(tuple(jobs)))
    results = {id(end.job): end.result for end in served}
    for result in results.values():
        assert isinstance(result, Ranked), result
    return [results[id(job)] for job in jobs]


def not_exported(
    kind: type[Family], files: ModelFiles, sid: SidConfig, limits: Limits, dtype: torch.dtype
) -> tuple[Function, ...]:
    """In the place of `export_apart`: a contract that says that nothing was exported; but for the demo's own."""
    if Path(__file__).parents[1] in files.directory.resolve().parents:
        return export_apart(kind, files, sid, limits, dtype)
    names = ["encode", *(f"step {t}" for t in range(1, len(sid.sizes) + 1))]
    return tuple(Function(name, exported=False, reason="a test's") for name in names)


@contextmanager
def without_exports() -> Iterator[None]:
    """Contracts in this process are made without exports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contracts, "export_apart", not_exported)
        yield


def store_contract(root: Path) -> Path:
    """The contract file of a root, so that whoever loads the root next need not make one."""
    deployment = parse((root / "deployment.toml").read_text())
    with without_exports():
        load_contract(root, deployment)
    return root


def write_root(
    root: Path,
    sizes: Sequence[int] = (4, 5, 6),
    items: Sequence[Mapping[str, object]] | None = None,
    policies: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
    extra: str = "",
    limits: str = "rows = 4096\nbatch = 16\ncontext = 64",
) -> Path:
    """A deployment root on disk: a random onerec as weights/v1, a catalogue as vocab/v1, policies, free ports.

    items: lines of the plain form; default: 40 random SIDs with ids "i0", "i1", ..
    """
    root.mkdir(parents=True, exist_ok=True)
    widths = ", ".join(["64"] * len(sizes))
    (root / "deployment.toml").write_text(
        f'family = "onerec"\ndevice = "cpu"\n{extra}\n[sid]\nsizes = {list(sizes)}\n'
        f"[limits]\nwidths = [{widths}]\n{limits}\n"
        '[server]\nport = 0\nadmin_port = 0\nadmin_auth = "none"\npolicy_override = true\ndrain_delay_s = 0.05\n'
        "threads = 1\n"  # two that meet after each small product wait for each other where others want the cores
    )
    write_weights(root, onerec_config(sizes), onerec_weights(onerec_config(sizes), seed))
    write_vocab(root, sizes, items)
    (root / "policies").mkdir(exist_ok=True)
    for name, text in {"base": BASE, **(policies or {})}.items():
        (root / "policies" / f"{name}.yaml").write_text(text)
    return store_contract(root)


def replace_text(file: Path, text: str) -> None:
    """Another text for a file, whole at every moment: whoever looks meanwhile sees the one or the other."""
    made = file.with_name(f".{file.name}.next")
    made.write_text(text)
    made.replace(file)


def write_weights(
    root: Path, config: Mapping[str, object], weights: Mapping[str, torch.Tensor], version: str = "v1"
) -> None:
    """A weights version with its manifest."""
    with draft(root, "weights") as made:
        made.write("config.json", [json.dumps(config).encode()])
        made.write("model.safetensors", [save(dict(weights))])
        commit(made, "weights", version, "tests", {})


def write_vocab(
    root: Path, sizes: Sequence[int], items: Sequence[Mapping[str, object]] | None = None, version: str = "v1"
) -> None:
    """A vocab version with its manifest, from lines of the plain form; `attrs` as there."""
    if items is None:
        items = [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(random_sids(sizes, 40).tolist())]
    names = Strings.of([str(item["id"]).encode() for item in items])
    table = Table(names, np.array([item["sid"] for item in items], np.int32), columns_of(items))
    save_vocab(arrange(table, sizes), sizes, root, version, made_by="tests")


def columns_of(items: Sequence[Mapping[str, object]]) -> dict[str, Column]:
    """The attributes of lines of the plain form: an attribute is a number or a text, and may be absent."""
    names = sorted({name for item in items for name in item.get("attrs", ())})
    columns: dict[str, Column] = {}
    for name in names:
        values = [item.get("attrs", {}).get(name) for item in items]
        words = sorted({value for value in values if isinstance(value, str)})
        if words:
            codes = [-1 if value is None else words.index(value) for value in values]
            columns[name] = Texts(np.array(codes, np.int32), Strings.of([word.encode() for word in words]))
        else:
            numbers = np.array([0 if value is None else value for value in values], np.float32)
            columns[name] = Numbers(numbers, np.array([value is not None for value in values]))
    return columns
