"""From typed requests to model inputs and to a batch of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from app.core import Contexts, Inputs, InputSpec, Ragged
from app.ops.upload import upload


def batch_inputs(specs: Sequence[InputSpec], inputs: Sequence[Inputs], device: torch.device) -> Contexts:
    """Lay the requests' inputs end to end, one Ragged an input; an input that a request does not give has no
    positions there."""
    batch = {}
    for spec in specs:
        parts = [given[spec.name] for given in inputs if spec.name in given]
        counts = [len(given[spec.name]) if spec.name in given else 0 for given in inputs]
        start = upload(torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)), device)
        flat = torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, *spec.shape)
        batch[spec.name] = Ragged(upload(flat.to(spec.dtype), device), start, tuple(counts))
    return batch
