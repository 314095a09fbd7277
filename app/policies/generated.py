"""A step as the selection kernels compute it: the text of its expressions, and what they read of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from app.policies.noise import prefix_hash

if TYPE_CHECKING:
    from app.policies.plan import StepInputs


class Generated(NamedTuple):
    """A step as the kernels compute it.

    definitions  C, see ranked.cuh
    values       names of the numbers of a row, in the order of the table: "width", "carry", `param.x`, `user.x`,
                 `head.x`, and conditions on `ctx` by their text
    columns      names of the numbers of a candidate: "trie", "seen", `head.x`, `prior.x`, ..
    noisy        whether numbers are drawn
    carries      whether a survivor hands its rank on to its children, as "carry"
    """

    definitions: str
    values: tuple[str, ...]
    columns: tuple[str, ...]
    noisy: bool = False
    carries: bool = False

    def table(self, inputs: StepInputs, params: tuple[str, ...]) -> Tensor:
        """The values, [n, at least 1] float32. params: `Structure.params`."""
        parts = [_of_row(name, inputs, params) for name in self.values] or [inputs.parent]
        return torch.stack([one.to(torch.float32) for one in parts], dim=1)

    def noise(self, inputs: StepInputs) -> Tensor | None:
        """What numbers are drawn by, [n, 3] int64: the request's seed, the hash of the prefix, the step."""
        if not self.noisy:
            return None
        assert inputs.seed is not None and inputs.prefix is not None, "uses: seed, prefix"
        step = torch.full_like(inputs.seed, inputs.step)
        return torch.stack([inputs.seed, prefix_hash(inputs.prefix), step], dim=1)

    def dense(self, inputs: StepInputs, *, children: bool) -> tuple[Tensor, ...]:
        """The columns by code, [n, at least C] float32 each; what is no candidate has an arbitrary number.

        children  of `StepProgram`: columns other than `head.x` come by candidate, and go to the places of their codes
        """
        return tuple(_by_code(name, inputs, children=children) for name in self.columns)


def _of_row(name: str, inputs: StepInputs, params: tuple[str, ...]) -> Tensor:
    if name == "width":
        return inputs.width
    if name == "carry":  # nobody has handed anything to the first row
        return torch.zeros_like(inputs.parent) if inputs.carry is None else inputs.carry
    if name.startswith("param."):
        return inputs.params[:, params.index(name[6:])]
    return inputs.extra[name]


def _by_code(name: str, inputs: StepInputs, *, children: bool) -> Tensor:
    given = {"trie": inputs.trie, "seen": inputs.seen}.get(name)
    column = (inputs.extra[name] if given is None else given).to(torch.float32)
    if name.startswith("head.") or not children:
        return column.contiguous()
    codes = inputs.logits.shape[1]
    stride = codes // 4 * 4 + 4  # room for padding, in whole 16 bytes
    whole = torch.empty(len(column), stride, dtype=torch.float32, device=column.device)
    return whole.scatter_(1, inputs.code.masked_fill(~inputs.legal, codes), column)
