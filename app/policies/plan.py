"""What the compiler makes of a policy, and the only thing of it that the step loop sees.

A *structure* is a policy with its parameters and widths left open; a *plan* binds them. All requests of a batch that
share a structure share one selection launch a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Normalize = Literal["full", "step", "valid", "none"]


class StepInputs(NamedTuple):
    """The candidates of one step for the n rows that use one structure; F candidates a row, codes ascending in it.

    logits    [n, C] float32    bad values already -inf
    log_norm  [n] float32       None where it is log-sum-exp over the step's codes (or where nothing asks for `full`)
    code      [n, F] int64      with `StepProgram.children` the legal children of the row's trie node, else 0..C-1
    legal     [n, F] bool       False = padding or not a candidate of a live row
    trie      [n, F] bool       prefix + code is a prefix of the catalogue; None unless the program `uses` it
    seen      [n, F] bool       every item below prefix + code is in exclude or history; None unless used
    excluded  [n, F] bool       every item below is in `exclude`: always masked; None = nothing is excluded
    parent    [n] float32       carried score
    params    [n, P] float32    parameter values of the row's request, in `Structure.params` order
    step      t
    width     [n] float32       K_t of the row's request
    """

    logits: Tensor
    log_norm: Tensor | None
    code: Tensor
    legal: Tensor
    trie: Tensor | None
    seen: Tensor | None
    excluded: Tensor | None
    parent: Tensor
    params: Tensor
    step: int
    width: Tensor


class Scored(NamedTuple):
    """score, rank [n, F] float32 (-inf = invalid; never NaN or +inf) and bad [n] int64: candidates whose expressions
    gave NaN or +inf."""

    score: Tensor
    rank: Tensor
    bad: Tensor


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One step of a structure, lowered to torch.

    children  candidates are the trie's children of the row (the mask has `trie` as a conjunct), else all codes
    uses      which optional columns of StepInputs `run` reads: "trie", "seen"
    normalize what log-probabilities are normalised over
    precut    class of the exact per-row cut (policy-language 2.3): "R", "L", "M", "E"
    run       masks before scores before ranks; computed in fp32, in the written order
    """

    children: bool
    uses: frozenset[str]
    normalize: Normalize
    precut: str
    run: Callable[[StepInputs], Scored]


@dataclass(frozen=True, slots=True)
class Structure:
    """id = H(operators and expressions with parameters open, operator versions); params = names, in table order."""

    id: str
    params: tuple[str, ...]
    steps: tuple[StepProgram, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy ready to serve.

    policy, policy_id  name and content id (policy-language 3.7)
    plan_id            H(structure_id, contract_id, compiler)
    widths             K_1..K_L
    params             values in the structure's order
    limit              longest list that `final` lets through
    per_sid            items that one SID may give
    resolved           the resolved policy as canonical JSON data, for `explain` and the status
    """

    policy: str
    policy_id: str
    plan_id: str
    structure: Structure
    widths: tuple[int, ...]
    params: tuple[float, ...]
    limit: int
    per_sid: int
    resolved: Mapping[str, object]
    underfill: Literal["allow", "error"] = "allow"

    @property
    def trie(self) -> bool:
        """Whether every step is confined to the catalogue."""
        return all(step.children for step in self.structure.steps)
