"""What weights answer before anybody serves them, as the canary.jsonl that they bring along (`weights publish`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from app.config import Deployment
from app.engine.registry import family
from app.engine.weights import load, resolve_precision
from app.errors import Rejected
from app.policies.load import PolicySet
from app.runtime.contracts import Contracts
from app.runtime.desired import Option, wishes
from app.runtime.expectations import PLAIN, Asked, Requests, record
from app.runtime.job import Batch, Served
from app.runtime.loader import bind, resolve_device
from app.runtime.metrics import Metrics
from app.runtime.reading import Weights, model_files, read_vocab
from app.runtime.steps import StepLoop
from app.vocab.manifest import read_manifest


def recorded(
    root: Path, deployment: Deployment, directory: Path, vocab: Sequence[str], asked: Sequence[Asked]
) -> bytes:
    """The text of canary.jsonl: the answers of the weights in a directory with a vocab of the root.

    vocab  versions or digests that the weights go with, the newest of which is taken; none: the newest that serves
    Raises Rejected where the weights, the vocab or a request cannot be used.
    """
    device, wish = resolve_device(deployment.device), wishes(root, root / deployment.server.state_dir, "vocab")
    found = [(one.directory, read_manifest(one.directory, "vocab")) for one in wish.found]
    fitting = [pair for pair in found if not vocab or pair[1].version in vocab or pair[1].digest in vocab]
    if not fitting:
        raise Rejected("no_vocab", "there is no vocab to record answers with", location="vocab")
    place, manifest = fitting[0]
    kind, sid, limits, precision = family(deployment.family), deployment.sid, deployment.limits, deployment.precision
    engine = load(directory, kind, sid, limits, precision=precision, device=device)
    files, dtype = model_files(directory), resolve_precision(precision, device)
    contract = Contracts(root).make(kind, files, deployment, dtype, store=False).contract
    nobody = Option(directory.name, "", {})
    parts = bind(deployment, Weights(engine, contract), nobody, read_vocab(place, sid.sizes), Option.of(manifest))
    snapshot, steps = parts.snapshot(PolicySet({}, "", ())), StepLoop(time.monotonic, Metrics())

    async def serve(batch: Batch) -> Sequence[Served]:
        return steps.serve(batch)

    return asyncio.run(record(Requests.under(snapshot, PLAIN), asked, manifest.digest, serve))
