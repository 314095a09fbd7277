"""The lowered phases of a step in their order: logits, normalize, mask, keep, score, rank, prune, quota, select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.errors import Fault
from app.policies import choose, keep, noise
from app.policies.groups import Group
from app.policies.lower import INF, Frame, Lowered, tensor_of
from app.policies.operators import Operator
from app.policies.plan import Normalize, Scored, StepInputs
from app.policies.quota import LOOK, Quota, quota

Value = Lowered | np.float32


@dataclass(frozen=True)
class Limit:
    """A cap or a floor: at most or at least `limit` of each group."""

    group: Group
    limit: int


@dataclass(frozen=True)
class Applied:
    """An operator of an open phase, with its arguments."""

    operator: Operator
    args: tuple[Value, ...]

    def stays(self, frame: Frame, shape: torch.Size, *given: Tensor | choose.Field) -> Tensor:
        """Who stays, [n, F] bool. Raises Fault for an operator that answers in another form."""
        if self.operator.torch is None:
            raise Fault(f"operator `{self.operator.name}` passed the checks and cannot be computed")
        out = self.operator.torch(*given, *(tensor_of(one, frame).reshape(-1, 1) for one in self.args))
        if not isinstance(out, Tensor) or out.shape != shape or out.dtype != torch.bool:
            raise Fault(f"operator `{self.operator.name}` gives no tensor of {tuple(shape)} truth values")
        return out


@dataclass(frozen=True)
class Select:
    """How survivors are taken: top, diverse (groups, penalty), stochastic, explore (share)."""

    name: str = "top"
    groups: int = 1
    penalty: Value | None = None
    share: float = 0.0

    @property
    def carries(self) -> bool:
        """Whether a survivor hands a number on to its children."""
        return self.name != "top"


@dataclass(frozen=True)
class Parts:
    """The lowered phases of a step.

    step, params  t, and the structure's parameters in table order
    logits        None = as the model gave them · mask True = no mask beyond the candidates themselves
    rank          None = the score itself
    names         plain names that score and rank read, so that noise and sibling places are made only for who asks
    extra         columns that are read
    """

    step: int
    params: tuple[str, ...]
    children: bool
    logits: Value | None
    normalize: Normalize
    mask: Lowered | bool
    keep: tuple[Applied, ...]
    score: Value
    rank: Value | None
    prune: tuple[Applied, ...]
    caps: tuple[Limit, ...]
    floors: tuple[Limit, ...]
    select: Select
    names: frozenset[str]
    extra: frozenset[str]


def program(parts: Parts) -> Callable[[StepInputs], Scored]:
    """The step as one function."""

    def run(inputs: StepInputs) -> Scored:
        frame = Frame(inputs.logits.device, _known(parts, inputs))
        logits, wrong = _logits(parts, inputs, frame)
        logit = logits.gather(1, inputs.code) if parts.children else logits
        broken = None if wrong is None else wrong.gather(1, inputs.code) & inputs.legal
        valid = _valid(parts, inputs, frame, logit)
        norm = _norm(parts.normalize, inputs, logits, logit, valid, changed=parts.logits is not None)
        logp = logit if norm is None else torch.sub(logit, norm)
        frame.known["logp"] = logp
        for one in parts.keep:
            valid = valid & one.stays(frame, valid.shape, logp, valid)
            _tell(inputs, "keep", valid)
        frame.known["parent"] = inputs.parent[:, None]
        score = tensor_of(parts.score, frame).expand(logit.shape)
        frame.known["score"] = score
        _noise(parts, inputs, frame, valid)
        rank = score if parts.rank is None else tensor_of(parts.rank, frame).expand(logit.shape)
        scored = _finish(score, rank, valid, broken)
        _tell(inputs, "rank", scored.rank)
        return scored if _plain(parts) else _choose(parts, inputs, frame, scored)

    return run


def legality(parts: Parts) -> Callable[[StepInputs], Tensor | None]:
    """Which candidates may be selected before any logit is looked at; None = all of them."""

    def run(inputs: StepInputs) -> Tensor | None:
        if not parts.children and inputs.excluded is None and parts.mask is True:
            return None
        return _allowed(parts, inputs, Frame(inputs.logits.device, _known(parts, inputs)), inputs.legal)

    return run


LEAVE_A_HEAD = frozenset({"within", "above"})
"""Operators of `prune` that leave a head of a request's order: the best K can be taken first."""


def pruning(parts: Parts) -> Callable[[StepInputs, Tensor, Tensor, Tensor], Tensor]:
    """Which survivors prune leaves, of operators in LEAVE_A_HEAD, where the best K by score have been taken already.

    Takes the inputs of rows, the survivors' scores [M], those of the first of their requests [M], and their rows [M].
    """

    def run(inputs: StepInputs, score: Tensor, best: Tensor, row: Tensor) -> Tensor:
        frame = Frame(score.device, _known(parts, inputs))
        stay = torch.ones_like(score, dtype=torch.bool)
        for one in parts.prune:
            [bound] = (tensor_of(arg, frame).reshape(-1) for arg in one.args)
            bound = bound[row] if len(bound) > 1 else bound
            if one.operator.name == "within":
                stay = stay & (score >= torch.sub(best, bound))
            else:
                stay = stay & ((score >= bound) | (score == best))
        return stay

    return run


def _plain(parts: Parts) -> bool:
    return not (parts.prune or parts.caps or parts.floors or parts.select.carries)


def _known(parts: Parts, inputs: StepInputs) -> dict[str, Tensor]:
    """Named values that need no computing."""
    known = {f"param.{name}": inputs.params[:, at : at + 1] for at, name in enumerate(parts.params)}
    known["width"] = inputs.width[:, None]
    sets = {"trie": inputs.trie, "seen": inputs.seen}
    known.update({name: column for name, column in sets.items() if column is not None})
    for name in parts.extra:
        value = inputs.extra.get(name)
        if value is None:
            raise Fault(f"StepInputs.extra lacks {name}")
        whole = value.dim() == 2 and name.startswith("head.") and value.shape[1] == inputs.logits.shape[1]
        known[name] = value[:, None] if value.dim() == 1 else value.gather(1, inputs.code) if whole else value
    return known


def _logits(parts: Parts, inputs: StepInputs, frame: Frame) -> tuple[Tensor, Tensor | None]:
    """Logits [n, C] after the `logits` phase, and where it gave NaN or +inf, which count as -inf."""
    logits = inputs.logits.float()
    if parts.logits is None:
        return logits, None
    frame.known["logit"] = logits
    changed = tensor_of(parts.logits, frame).expand(logits.shape)
    wrong = (torch.isnan(changed) | (changed == INF)) & (logits > -INF)
    return torch.where(wrong | (logits == -INF), -INF, changed), wrong


def _valid(parts: Parts, inputs: StepInputs, frame: Frame, logit: Tensor) -> Tensor:
    """Candidates that may be selected: real, with a token, not excluded, allowed by the mask."""
    valid = inputs.legal & (logit > -INF)
    _tell(inputs, "logits", valid)
    return _allowed(parts, inputs, frame, valid)


def _allowed(parts: Parts, inputs: StepInputs, frame: Frame, valid: Tensor) -> Tensor:
    """Those of the valid ones that are neither excluded nor masked."""
    if inputs.excluded is not None:
        valid = valid & ~inputs.excluded
    _tell(inputs, "exclude", valid)
    if not isinstance(parts.mask, bool):
        valid = valid & parts.mask(frame)
    elif not parts.mask:
        valid = torch.zeros_like(valid)
    _tell(inputs, "mask", valid)
    return valid


def _tell(inputs: StepInputs, phase: str, left: Tensor) -> None:
    """Who is left after a phase, for whoever wants to know."""
    if inputs.told is not None:
        inputs.told(phase, left)


def _norm(
    normalize: Normalize, inputs: StepInputs, logits: Tensor, logit: Tensor, valid: Tensor, *, changed: bool
) -> Tensor | None:
    """What is subtracted from a logit, [n, 1]; a dead row gets -inf, its candidates are invalid anyway."""
    if normalize == "none":
        return None
    if normalize == "full" and inputs.log_norm is not None and not changed:
        return inputs.log_norm[:, None]
    over = torch.where(valid, logit, -INF) if normalize == "valid" else logits
    return torch.logsumexp(over, dim=1, keepdim=True)


def _noise(parts: Parts, inputs: StepInputs, frame: Frame, valid: Tensor) -> None:
    """Names that are made only where an expression reads them."""
    if "sibling" in parts.names:
        place = keep.ordered(torch.where(torch.isnan(frame.known["score"]), -INF, frame.known["score"]), valid).place
        frame.known["sibling"] = (place + 1).float()
    for name, make, stream in (("gumbel", noise.gumbel, noise.GUMBEL), ("uniform", noise.uniform, noise.UNIFORM)):
        if name in parts.names:
            frame.known[name] = _drawn(parts, inputs, make, stream)


def _drawn(parts: Parts, inputs: StepInputs, make: Callable[..., Tensor], stream: int) -> Tensor:
    if inputs.seed is None or inputs.prefix is None:
        raise Fault("StepInputs lacks seed or prefix")
    return make(inputs.seed, inputs.prefix, inputs.code, parts.step, stream)


def _finish(score: Tensor, rank: Tensor, valid: Tensor, broken: Tensor | None) -> Scored:
    """NaN and +inf are bad: counted and invalid. Adding 0.0 makes -0.0 a tie of +0.0."""
    fine = score < INF  # false for NaN too
    if rank is not score:
        fine = fine & (rank < INF)
    good = valid & fine
    bad = _count(valid ^ good, broken)
    if rank is score:
        final = torch.where(good, score, -INF).add_(0.0)
        return Scored(final, final, bad)
    good = good & (score > -INF) & (rank > -INF)
    kept = torch.where(good, score, -INF).add_(0.0)
    return Scored(kept, torch.where(good, rank, -INF).add_(0.0), bad)


def _count(bad: Tensor, broken: Tensor | None) -> Tensor:
    return (bad if broken is None else bad | broken).sum(dim=1)


def _choose(parts: Parts, inputs: StepInputs, frame: Frame, scored: Scored) -> Scored:
    """Prune, quota and select, as ranks."""
    if inputs.request is None or inputs.order is None or not inputs.widths or not inputs.rows:
        raise Fault("StepInputs lacks request, order, widths or rows")
    field = choose.Field.of(inputs)
    rank, carry = scored.rank, None
    if parts.select.name == "stochastic":
        drawn = _drawn(parts, inputs, noise.gumbel, noise.GUMBEL)
        parent = torch.zeros_like(inputs.parent) if inputs.carry is None else inputs.carry
        rank = carry = choose.stochastic(scored.score, drawn, parent[:, None])
    for one in parts.prune:
        rank = torch.where(one.stays(frame, rank.shape, rank, field), rank, -INF)
        _tell(inputs, "prune", rank)
    if parts.caps or parts.floors:
        rank = _quota(parts, inputs, frame, rank, field)
        _tell(inputs, "quota", rank)
    if parts.select.name == "explore":
        drawn = _drawn(parts, inputs, noise.gumbel, noise.EXPLORE)
        rank, explored = choose.explore(rank, field, drawn, parts.select.share)
        before = torch.zeros_like(inputs.parent) if inputs.carry is None else inputs.carry
        carry = torch.maximum(explored.float(), before[:, None])
    if parts.select.name == "diverse" and parts.select.penalty is not None:
        own = None if inputs.carry is None else inputs.carry.to(torch.int64)
        penalty = tensor_of(parts.select.penalty, frame).reshape(-1, 1)
        rank, carry = choose.diverse(rank, field, penalty, parts.select.groups, own)
    if parts.select.carries:
        _tell(inputs, "select", rank)
    return Scored(scored.score, rank, scored.bad, carry)


def _quota(parts: Parts, inputs: StepInputs, frame: Frame, rank: Tensor, field: choose.Field) -> Tensor:
    def of(one: Limit) -> Quota:
        group = one.group
        number = group.number(inputs, frame.known)
        return Quota(one.limit, number, group.values, nested=group.nested, once=group.once)

    inner_first = sorted(parts.caps, key=lambda one: -(one.group.depth or 0))
    caps, floors = [of(one) for one in inner_first], [of(one) for one in parts.floors]
    return quota(rank, field, caps, floors, cut=_nested(parts))


def _nested(parts: Parts) -> bool:
    """Whether every group of a quota is a union of rows."""
    return all(one.group.nested for one in (*parts.caps, *parts.floors))


def cuts(parts: Parts) -> str:
    """What may be cut from the rows of a step before its survivors are taken, for `explain`."""
    if parts.caps or parts.floors:
        if _nested(parts):
            return "rows to their best K: every group of the quota is a union of rows"
        return f"none: groups of the quota cross rows; {LOOK} K of a request a look, without groups that are full then"
    return {
        "explore": "rows to their best K by rank, and again by rank with noise",
        "diverse": "rows to their best K, once and unpenalised, for all groups",
        "stochastic": "rows to their best K by Gumbel, which keeps the order of a row",
    }.get(parts.select.name, "rows to their best K")
