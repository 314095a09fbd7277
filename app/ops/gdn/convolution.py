"""The causal depthwise convolution in front of the gated delta rule, over prompts and over beams' own windows.

y_p = silu(sum_i w[:, i] * x_{p - J + 1 + i}), i = 0..J-1, with zeros in front of the first position. What a row needs
of the positions before it are inputs, not outputs: they are kept in the slots of its ancestors and, for the prompt's
last J - 1 positions, once per request.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from app.ops.gdn import around
from app.ops.graph import as_node


def _causal_shapes(x: Tensor, weight: Tensor, start: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    del position
    return torch.empty_like(x), x.new_empty(start.shape[0] - 1, weight.shape[1] - 1, x.shape[1])


@as_node("(Tensor x, Tensor weight, Tensor start, Tensor position) -> (Tensor, Tensor)", _causal_shapes)
def causal_convolution(x: Tensor, weight: Tensor, start: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged prompts that lie end to end.

    x         [T, D] float: the channels of all prompts
    weight    [D, J]
    start     [R + 1] int; position [T] int of each token in its prompt
    Returns y [T, D] and the tails [R, J - 1, D]: each prompt's last inputs, oldest first, zeros where it is shorter.
    """
    size = weight.shape[1]
    wide, kernel = x.float(), weight.float().t().contiguous()
    y = wide * kernel[-1]
    for back in range(1, size):
        y[back:].addcmul_(wide[:-back], kernel[size - 1 - back])
    front = (start[:-1].long().unsqueeze(1) + torch.arange(size - 1, device=x.device)).view(-1).clamp_(max=len(x) - 1)
    y[front] = _in_front(wide, kernel, front, position[front])  # there it reached into the prompt before
    index = start[1:].long().unsqueeze(1) + torch.arange(1 - size, 0, device=x.device)
    real = index >= start[:-1].unsqueeze(1)
    tail = x[index.clamp(min=0)].masked_fill_(~real.unsqueeze(2), 0.0)
    return functional.silu(y, inplace=True).to(x.dtype), tail


def _in_front(x: Tensor, kernel: Tensor, rows: Tensor, position: Tensor) -> Tensor:
    """Some rows [M] of x [T, D] at positions [M] of their prompts, before silu: [M, D]. kernel [J, D]."""
    y, size = x[rows] * kernel[-1], len(kernel)
    for back in range(1, size):
        seen = (position >= back).unsqueeze(1)
        y.addcmul_(x[(rows - back).clamp_(min=0)].masked_fill_(~seen, 0.0), kernel[size - 1 - back])
    return y


def window_convolution(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    slots: Tensor,
    *,
    request: Tensor,
    ancestry: Tensor,
    first: int = 0,
    compact: bool = False,
    key: Tensor | None = None,
) -> Tensor:
    """One new position a row: its own input, those of its ancestors, and the prompt's tail for what is left.

    x         [N, D] float
    weight    [D, J]
    tail      [R, J - 1, D] of the rows' requests, as `causal_convolution` gives it
    slots     [steps, rows, D]: slot (j, n) holds the input of row n of step j + 1
    request   [N] int
    ancestry  [N, t - 1] int; of its columns first..t-2 the newest J - 1 are read; entries of tombstones may be anything
    compact   the ancestry is the identity: slots 0..N-1 are read in place
    key       [N, C] in x's dtype, dense: gets channels C..2C of y, which need not be in y then
    Returns y [N, D]. On NVIDIA GPUs 16-bit operands take one kernel.
    """
    if around.convolution_fits(x, weight, tail, slots):
        return around.window_convolution(
            x, weight, tail, slots, request=request, ancestry=ancestry, first=first, compact=compact, key=key
        )
    n, size, columns = x.shape[0], weight.shape[1], ancestry.shape[1]
    own = range(max(first, columns - size + 1), columns)
    kernel = weight.float().t().contiguous()
    older, wide = size - 1 - len(own), x.float()
    if older:
        prompt = (tail[:, len(own) :].float() * kernel[:older]).sum(1)
        y = prompt.index_select(0, request).addcmul_(wide, kernel[-1])
    else:
        y = wide * kernel[-1]
    if not compact:
        slot = ancestry.clamp(0, slots.shape[1] - 1)
    for j in own:
        earlier = slots[j, :n] if compact else slots[j].index_select(0, slot[:, j])
        y.addcmul_(earlier.float(), kernel[size - 1 - (columns - j)])
    y = functional.silu(y, inplace=True).to(x.dtype)
    if key is not None:
        key.copy_(y[:, key.shape[1] : 2 * key.shape[1]])
    return y
