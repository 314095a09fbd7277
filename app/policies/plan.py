"""What the compiler makes of a policy, and the only thing of it that the step loop sees.

A *structure* is a policy with its parameters and widths left open; a *plan* binds them. All requests of a batch that
share a structure share one selection launch a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from app.core import Level
from app.policies.generated import Generated
from app.policies.operators import Operator, Operators

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

    The rest is read only by programs that name it in `uses`; "request" stands for request, order, widths and rows.

    request   [n] int64         the row's request among those of the structure, 0.., non-decreasing
    order     [n] int64         the row's place in its request
    widths    K_t of those requests, on the host
    rows      how many rows each of them has, on the host
    prefix    [n, t - 1] int64  the row's codes
    seed      [n] int64         the request's seed
    carry     [n] float32       what the survivor's `Scored.carry` was; None at step 1
    extra     columns by name: `head.x` [n] or [n, C] float32; `prior.x`, `attr.x` (numbers float32, flags bool,
              categories int64 with -1 = unknown), `blocked.x`, `boosted.x` (bool) [n, F]; `user.x` [n] float32;
              a condition on `ctx` by its text, `ctx.country in ["BR"]`, [n] bool

    told  for explanations only: called after each phase with its name and who is left, [n, F] bool, or float32 ranks
          with -inf = out
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
    request: Tensor | None = None
    order: Tensor | None = None
    widths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    prefix: Tensor | None = None
    seed: Tensor | None = None
    carry: Tensor | None = None
    extra: Mapping[str, Tensor] = {}
    told: Callable[[str, Tensor], None] | None = None


class Scored(NamedTuple):
    """What the fast path takes the best K of, whatever the policy's operators.

    score  [n, F] float32, nats, carried; -inf = invalid
    rank   [n, F] float32: the best K under T0 are the survivors, in their order; -inf = invalid; never NaN or +inf
    bad    [n] int64: candidates whose expressions gave NaN or +inf
    carry  [n, F] float32 where the program `carries`: the runtime hands a survivor's on as `StepInputs.carry`
    """

    score: Tensor
    rank: Tensor
    bad: Tensor
    carry: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One step of a structure, lowered to torch.

    children  candidates are the trie's children of the row (the mask has `trie` as a conjunct), else all codes
    uses      which optional columns of StepInputs `run` reads: "trie", "seen", "request", "prefix", "seed", "carry",
              and names of `extra`
    normalize what log-probabilities are normalised over
    precut    class of the exact per-row cut (policy-language 2.3): "R", "L", "M", "E"
    run       masks before scores before ranks; computed in fp32, in the written order. Operators that are more than
              the best by rank (prune, quota, diverse, stochastic, explore) are done here too: what they do not select
              gets rank -inf, and where they order otherwise the rank is their order. So the best K of `Scored.rank`
              are the survivors, whatever the policy; it serves wherever the kernels cannot select without it
    carries   `Scored.carry` is given and must be handed to the next step
    legal     given where the kernels can select without `run`: which candidates may be selected, [n, F] bool; None =
              all of them. Without `generated`, score and rank are parent + logp of the model's own logits (classes R
              and L): selection from the logits themselves (`app.ops.selection.select_logits`) gives what `run` and the
              best K of its ranks give
    generated score and rank as the kernels compute them (`app.ops.selection.select_ranked`), close to those of `run`;
              what a survivor `carries` then comes with it
    after     given with `legal` where survivors are pruned by scores after they were taken: of the inputs of rows, the
              survivors' scores [M], those of the first of their requests [M], and their rows [M]: who stays, [M] bool
    unfit     why there is neither, for `explain`
    masked    whether the mask says more than `children`; where not, only what the request excludes is left out
    cuts      what may be cut from the rows before the survivors are taken, in words (policy-language 2.3)
    """

    children: bool
    uses: frozenset[str]
    normalize: Normalize
    precut: str
    run: Callable[[StepInputs], Scored]
    carries: bool = False
    legal: Callable[[StepInputs], Tensor | None] | None = None
    masked: bool = True
    cuts: str = ""
    generated: Generated | None = None
    after: Callable[[StepInputs, Tensor, Tensor, Tensor], Tensor] | None = None
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """id = H(operators and expressions with parameters open, operator versions); params = names, in table order."""

    id: str
    params: tuple[str, ...]
    steps: tuple[StepProgram, ...]


class FinalInputs(NamedTuple):
    """The items of one request after `expand`, in search order (T0 of the last step, then the order of `expand`).

    score   [M] float32   the search's score of the item's SID
    item    [M] int64     item numbers of the pinned vocab
    sid     [M, L] int32
    seen    [M] bool      in history or exclude; None unless the program `uses` "seen"
    extra   columns by name: `item.x` [M] (numbers float32, flags bool, categories int64 with -1 = unknown), `user.x` as
            a number, a condition on `ctx` by its text as a truth value
    told    for explanations only: called after mask, numbers, dedupe, quota, rerank and limit with the phase, the
            places of who is left, in their order, and the final scores of all
    """

    score: npt.NDArray[np.float32]
    item: npt.NDArray[np.int64]
    sid: npt.NDArray[np.int32]
    seen: npt.NDArray[np.bool_] | None = None
    extra: Mapping[str, npt.NDArray[np.generic]] = {}
    told: Callable[[str, npt.NDArray[np.int64], npt.NDArray[np.float32]], None] | None = None


@dataclass(frozen=True, slots=True)
class FinalList:
    """index [m] int64 into the inputs, best first; score [m] float32, finite; bad = items that NaN or +inf cost."""

    index: npt.NDArray[np.int64]
    score: npt.NDArray[np.float32]
    bad: int


@dataclass(frozen=True, slots=True)
class FinalProgram:
    """What `final` does beyond expand and limit: mask, score, dedupe, quota, rerank, and the limit of the result.

    uses  "seen" and names of `FinalInputs.extra`
    run   of the items and the request's parameters, by name (`Structure.params` and `Plan.params`, or an arm's)
    """

    uses: frozenset[str]
    run: Callable[[FinalInputs, Mapping[str, float]], FinalList]


class Condition(NamedTuple):
    """A condition on a text of a request: whether `ctx.field` is one of the values, or none of them.

    An absent text equals nothing, so it is none of them.
    """

    field: str
    values: frozenset[str]
    different: bool

    def holds(self, ctx: Mapping[str, str]) -> bool:
        """Its truth for a request's texts."""
        return (ctx.get(self.field) in self.values) != self.different


class Asks(NamedTuple):
    """What a plan reads of a request's own fields. user: names of numbers · ctx: conditions by their text, as
    `StepInputs.extra` and `FinalInputs.extra` name them."""

    user: tuple[str, ...] = ()
    ctx: Mapping[str, Condition] = {}


NOTHING = Asks()


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy ready to serve.

    policy, policy_id  name and content id (policy-language 3.7)
    plan_id            H(structure_id, contract_id, compiler)
    widths             K_1..K_L
    params             values in the structure's order
    limit              longest list that `final` lets through
    per_sid            items that one SID may give
    by                 the item number, `item.x`, by which those are the largest; "" = the first in the vocab's order
    resolved           the resolved policy as canonical JSON data, for `explain` and the status
    asks               what it reads of a request's own fields
    levels             the plan at each load level that has widths of its own: the same structure, parameters and ids;
                       widths, limit and the list's program are the level's
    operators          the registry that it was compiled with, for whoever holds it against the oracle
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
    operators: Operators
    underfill: Literal["allow", "error"] = "allow"
    final: FinalProgram | None = None
    by: str = ""
    asks: Asks = NOTHING
    levels: Mapping[Level, Plan] = field(default_factory=dict)

    def at(self, level: Level) -> Plan:
        """The plan at a load level: this one where the policy says nothing of it."""
        return self.levels.get(level, self)

    @property
    def plugins(self) -> tuple[Operator, ...]:
        """The operators of other packages that it uses."""
        used = self.resolved["operators"]
        assert isinstance(used, dict)
        return tuple(self.operators[name] for name in used if self.operators[name].source)

    @property
    def trie(self) -> bool:
        """Whether every step is confined to the catalogue."""
        return all(step.children for step in self.structure.steps)

    @property
    def seen(self) -> bool:
        """Whether the plan reads the user's seen items."""
        steps = any("seen" in step.uses for step in self.structure.steps)
        return steps or (self.final is not None and "seen" in self.final.uses)
