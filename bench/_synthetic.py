"""A server's snapshot in memory around random weights of a public shape, and requests for it. Needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from app.config import Deployment, Limits, Precision, SidConfig
from app.core import History, HistoryIds, Request
from app.engine.engine import Engine
from app.engine.families.base import ModelFiles
from app.engine.families.onerec import OneRec
from app.engine.families.onerec_config import ExpertsConfig, HistoryConfig, OneRecConfig
from app.engine.fp8 import carrier, install
from app.engine.slots import Slots
from app.engine.weights import layout, resolve_precision
from app.ops.fp8 import quantise_rows
from app.policies.assign import Traffic
from app.policies.compile import compile_policy
from app.policies.experiments import Loaded
from app.policies.plan import Plan
from app.policies.source import Source
from app.runtime.canary import Present
from app.runtime.contract import make_contract
from app.runtime.job import Job, plan_rows
from app.runtime.snapshot import ArtifactRef, DeviceTrie, Snapshot
from app.vocab.items import Strings, Table
from app.vocab.vocab import make_vocab


class Shape(NamedTuple):
    """OneRec-V2's 0.2B row (arXiv 2508.20900) with 4 steps: FFN 4 d, a K/V head for each query head everywhere, one
    context K/V set whose values are its keys, no context blocks. Where there are experts, `ffn` is of the blocks before
    them."""

    codes: int = 8192
    steps: int = 4
    width: int = 512
    context: int = 512
    d: int = 896
    layers: int = 12
    heads: int = 14
    ffn: int = 3584
    items: int = 1_000_000
    experts: ExpertsConfig | None = None

    @property
    def config(self) -> OneRecConfig:
        """config.json."""
        return OneRecConfig(
            family="onerec", sizes=(self.codes,) * self.steps, d_model=self.d, layers=self.layers, heads=self.heads,
            head_dim=self.d // self.heads, cross_groups=self.heads, self_groups=self.heads, ffn=self.ffn,
            experts=self.experts, history=HistoryConfig(short=self.context - 1),
        )  # fmt: skip

    @property
    def feed(self) -> int:
        """Multiply-adds of the feed-forward parts of all blocks for a row: of experts, those that it goes to."""
        dense, experts = 3 * self.d * self.ffn, self.experts
        if experts is None:
            return self.layers * dense
        mixed = 3 * self.d * experts.hidden * (experts.top + experts.shared) + self.d * experts.routed
        return experts.dense * dense + (self.layers - experts.dense) * mixed

    def decode_flop(self, requests: int) -> float:
        """Model FLOP of the decode steps of a batch: 2 a multiply-add of the products, 4 s d a layer for an attention
        over s positions; 1 + (steps - 1) * width rows a request."""
        matrices = self.layers * 6 * self.d * self.d + self.feed + self.d * self.codes
        per_row = 2 * matrices + 4 * self.layers * self.d * self.context
        rows = [1] + [self.width] * (self.steps - 1)
        own = sum(n * 4 * self.layers * self.d * t for t, n in enumerate(rows, 1))
        return requests * (sum(rows) * per_row + own)

    def context_flop(self, requests: int) -> float:
        """Model FLOP of the context stage of a batch: one product a position."""
        return requests * self.context * 2 * self.d * self.d


SHAPES = {
    "0.2b": Shape(),
    "4b-moe": Shape(
        d=1408, layers=14, heads=11, ffn=5632, experts=ExpertsConfig(routed=53, top=3, hidden=1408, shared=1, dense=2)
    ),
}
"""Rows of the paper's tables by name."""
FORMULA = (
    "decode: rows * (2 (L 6 d^2 + feed + d C) + 4 L d context) + sum over steps rows_t 4 L d t, rows = R (1 + 3 W); "
    "feed: 3 d f a dense block, 3 d h (k + shared) + d E one with experts; context: R positions 2 d^2"
)


class OnePolicy:
    """`runtime.snapshot.Policies` of one plan."""

    id, default = "bench", "base"
    experiments: Mapping[str, Loaded] = {}

    def __init__(self, plan: Plan) -> None:
        self._plan, self.traffic = plan, Traffic(plan)

    def plan(self, name: str) -> Plan | None:
        """See `Policies`."""
        return self._plan if name == "base" else None

    def plans(self) -> list[Plan]:
        """See `Policies`."""
        return [self._plan]


def engine_of(shape: Shape, limits: Limits, device: torch.device, precision: Precision) -> Engine:
    """Random weights; logits of about 2 standard deviations."""
    sid, wanted = SidConfig(sizes=(shape.codes,) * shape.steps), resolve_precision(precision, device)
    config, dtype = msgspec.to_builtins(shape.config), carrier(wanted)
    family = OneRec.build(ModelFiles(config, Path(), {}), sid, limits, dtype)
    slot = Slots().take(layout(family, wanted, device))
    torch.manual_seed(1)
    for name, parameter in dict(family.named_parameters()).items():
        memory, scale = slot.tensors[name], slot.tensors.get(f"{name}.scale")
        values = torch.ones(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() > 1:
            values.normal_().mul_(deviation(name, parameter.shape[1], shape))
        if scale is None:
            memory.copy_(values)
        else:
            for into, made in zip((memory, scale), quantise_rows(values), strict=True):
                into.copy_(made)
        owner, _, leaf = name.rpartition(".")
        install(family.get_submodule(owner), leaf, memory, scale)
    return Engine(family.to(device).eval(), device=device, dtype=dtype, slot=slot)


def deviation(name: str, inputs: int, shape: Shape) -> float:
    """Standard deviation of a parameter's random values; inputs: its second size."""
    if ".heads." in f".{name}":
        return 2 / math.sqrt(inputs)
    if "codes" in name or "age" in name:
        return 1.0
    quiet = (
        math.sqrt(2 * shape.layers) if name.endswith(("o.weight", "down.weight", "ffn.down", "shared_down")) else 1.0
    )
    return 1 / math.sqrt(inputs) / quiet


def snapshot_of(
    shape: Shape, batch: int, device: torch.device, policy: str, precision: Precision = "bfloat16"
) -> Snapshot:
    """A snapshot with a random catalogue and one policy."""
    sizes = (shape.codes,) * shape.steps
    limits = Limits(
        widths=(shape.width,) * shape.steps, rows=batch * shape.width, batch=batch, context=shape.context, k=shape.width
    )
    deployment = Deployment(family="onerec", sid=SidConfig(sizes=sizes), precision=precision, limits=limits)
    engine = engine_of(shape, limits, device, precision)
    contract = make_contract(engine, {}, deployment, precision)
    plan, findings = compile_policy("base", {"base": Source("base.yaml", policy.encode())}, contract)
    assert plan is not None, findings
    vocab = make_vocab(catalogue(shape), sizes, version="bench", digest="bench")
    ref = ArtifactRef("bench", "bench", "now")
    return Snapshot("bench", contract, engine, ref, vocab, ref, DeviceTrie.of(vocab, device), OnePolicy(plan))


def catalogue(shape: Shape) -> Table:
    """Random items, in the order of their SIDs."""
    generator = np.random.default_rng(1)
    flat = np.unique(generator.integers(0, shape.codes**shape.steps, shape.items, dtype=np.int64))
    codes = np.stack(np.unravel_index(flat, (shape.codes,) * shape.steps), 1).astype(np.int32)
    return Table(Strings.of([b"item-%d" % n for n in range(len(codes))]), codes, {})


def jobs_of(snapshot: Snapshot, requests: int, seed: int, k: int) -> tuple[Job, ...]:
    """Requests with full contexts of random items."""
    generator, vocab = np.random.default_rng(seed), snapshot.vocab
    [plan] = snapshot.policies.plans()
    planned = plan_rows(plan, snapshot.contract, snapshot.trie.prefixes)
    made = []
    for n in range(requests):
        history = vocab.sids(generator.integers(0, len(vocab), snapshot.contract.limits.context))
        request = Request(f"r{n}", HistoryIds(()), k=k)
        inputs: Mapping[str, Any] = snapshot.engine.prepare(History(history))
        made.append(Job(request, Present(), snapshot, plan, inputs, planned, None, None, 0.0))
    return tuple(made)
