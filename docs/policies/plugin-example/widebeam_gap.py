"""`gap(drop)`: a row's candidates, best first, down to the first fall of more than `drop` nats.

A model that is sure writes a few codes far above the rest. Where `top_k` keeps a fixed number of them and `min_p` all
that are near the best one, `gap` ends where the model itself draws the line.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.policies.keep import ordered
from app.policies.operators import Arg, Operator


def stays(logp: Tensor, valid: Tensor, drop: Tensor) -> Tensor:
    """Who stays, [n, F]. logp [n, F] float32, valid [n, F] bool, drop [n, 1] or [1, 1] float32."""
    best, place = ordered(logp, valid)
    falls = (best[:, :-1] - best[:, 1:]) > drop  # from one place to the next; -inf at the end of a row falls far
    head = torch.nn.functional.pad(torch.cumsum(falls, dim=1) == 0, (1, 0), value=True)
    return valid & head.gather(1, place)


def definition(logp: npt.NDArray[np.float32], drop: float) -> npt.NDArray[np.bool_]:
    """The same for one row, best first, as one would say it."""
    kept = np.ones(len(logp), np.bool_)
    for at in range(1, len(logp)):
        kept[at] = kept[at - 1] and logp[at - 1] - logp[at] <= np.float32(drop)
    return kept


GAP = Operator(
    name="gap",
    phase="keep",
    args=(Arg("drop", "number", 0, 100, default=2.0, param=True),),
    about="a row's codes, best first, down to the first fall of more than drop nats",
    version=1,
    torch=stays,
    reference=definition,
    precut="M",
)
"""The declaration that the entry point names."""
