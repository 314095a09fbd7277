"""Precision "fp8": dense projections in 8 bits, everything else in bfloat16 (RecoGEM 5.1's precision, on any family).

A projection's weight is held as float8_e4m3fn with a scale for each output channel, made while the weights are read;
its input is quantised by rows when it comes. Norms, embeddings, heads, carried state and attention stay in bfloat16.
Families need not know: what stands in the place of a weight tells torch how it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.families.base import Family
from app.errors import Rejected
from app.ops import fp8, grouped
from app.ops import product as products
from app.ops.fp8 import FP8, EightBits
from app.ops.gated import gated, gated_product, gates_itself
from app.ops.norm import rms_norm

UNIT: Final = 16
"""Both sizes of a weight in 8 bits are multiples of this: the tensor cores' tile."""


def carrier(dtype: torch.dtype) -> torch.dtype:
    """In what activations and carried state are, of a precision as `resolve_precision` gives it."""
    return torch.bfloat16 if dtype == FP8 else dtype


def precision_name(dtype: torch.dtype) -> str:
    """Of a precision as `resolve_precision` gives it, as a contract says it."""
    return "fp8" if dtype == FP8 else str(dtype).removeprefix("torch.")


def quantised(family: Family, dtype: torch.dtype) -> tuple[str, ...]:
    """The parameters that a precision holds in 8 bits: projections of the family whose sizes are multiples of 16.

    Raises Rejected("unsupported_precision") where there is none to hold.
    """
    if dtype != FP8:
        return ()
    parameters = dict(family.named_parameters())
    projections = sorted(family.projections())
    found = tuple(name for name in projections if all(size % UNIT == 0 for size in parameters[name].shape))
    if not found:
        message = f"`{family.name}` has no projection here that could be held in 8 bits: sizes are multiples of {UNIT}"
        raise Rejected("unsupported_precision", message, location="deployment.toml: precision")
    return found


def install(owner: nn.Module, leaf: str, data: Tensor, scale: Tensor | None) -> None:
    """Make memory the parameter of a module: as it is, or in 8 bits where there is a scale."""
    if scale is None:
        setattr(owner, leaf, nn.Parameter(data, requires_grad=False))
        return
    delattr(owner, leaf)
    owner.add_module(leaf, Quantised(data, scale))


class Quantised(nn.Module):
    """In the place of a weight [M, K]: data [M, K] float8_e4m3fn, scale [M] float32. torch's functional.linear and
    `x.addmm_(y, weight.t())` take it; anything else is a TypeError."""

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.data = nn.Parameter(data, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def t(self) -> _Transposed:
        """For `addmm_`."""
        return _Transposed(self)

    def product(self, x: Tensor | QuantisedRows, bias: Tensor | None = None) -> Tensor:
        """x [.., K] -> [.., M]."""
        if isinstance(x, QuantisedRows):
            return self._product(x.rows, bias)
        out = self._product(_rows(x.reshape(-1, x.shape[-1])), bias)
        return out.view(*x.shape[:-1], out.shape[1])

    def _product(self, rows: Tensor | EightBits, bias: Tensor | None) -> Tensor:
        found = self._chosen(rows) if bias is None else None
        return fp8.linear(rows, self.data, self.scale, bias) if found is None else found

    def into(self, out: Tensor, x: Tensor | QuantisedRows) -> None:
        """out [n, M] = `product` of x [n, K]."""
        rows = _rows(x)
        if self._chosen(rows, out) is None:
            fp8.linear_into(out, rows, self.data, self.scale)

    def added(self, out: Tensor, x: Tensor | QuantisedRows) -> Tensor | None:
        """For out [n, M] += `product` of x [n, K]: what is still to be added, None where one launch has done it."""
        rows = _rows(x)
        return fp8.linear(rows, self.data, self.scale) if self._chosen(rows, out, onto=True) is None else None

    def _chosen(self, rows: Tensor | EightBits, out: Tensor | None = None, *, onto: bool = False) -> Tensor | None:
        """See `products.scaled`; a CPU has no algorithms."""
        if not isinstance(rows, EightBits):
            return None
        return products.scaled(rows.q, self.data, products.Scales(rows.scale, self.scale), out, onto=onto)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """torch asks here how an operator works on one of us."""
        del types
        return _linear(*args, **(kwargs or {})) if func is functional.linear else NotImplemented


def _linear(input: Tensor | QuantisedRows, weight: Quantised, bias: Tensor | None = None) -> Tensor:  # noqa: A002  torch's own names
    return weight.product(input, bias)


def _rows(x: Tensor | QuantisedRows) -> Tensor | EightBits:
    """Rows [n, K] as `ops.fp8` multiplies them. A CPU's, which may be of any precision, it makes itself."""
    if isinstance(x, QuantisedRows):
        return x.rows
    return fp8.quantise_rows(x) if x.is_cuda else x


class QuantisedRows:
    """In the place of a tensor [n, K] that is multiplied by weights in 8 bits and used for nothing else: made once for
    all of them, in the pass that computes it. Anything but such a product is a TypeError."""

    def __init__(self, rows: EightBits) -> None:
        self.rows = rows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """torch asks here where we come first."""
        for kind in (Quantised, _Transposed):
            if kind in types:
                return kind.__torch_function__(func, types, args, kwargs)
        return NotImplemented


def product(x: Tensor, weight: Tensor | Quantised, bias: Tensor | None = None) -> Tensor:
    """x [n, K] weight^T [M, K] -> [n, M]: without a bias by the quickest algorithm that was found for it."""
    if isinstance(weight, Quantised):
        return weight.product(x, bias)
    return products.product(x, weight) if bias is None else functional.linear(x, weight, bias)


def product_into(out: Tensor, x: Tensor, weight: Tensor | Quantised) -> None:
    """`product` in the place of out [n, M], whose rows may lie apart."""
    if isinstance(weight, Quantised):
        weight.into(out, x)
    else:
        products.product_into(out, x, weight)


def product_onto(out: Tensor, x: Tensor, weight: Tensor | Quantised) -> Tensor:
    """out [n, M] += `product`, in out's memory."""
    if not isinstance(weight, Quantised):
        return products.product_onto(out, x, weight)
    added = weight.added(out, x)
    return out if added is None else out.add_(added)


def gated_for(gate: Tensor, up: Tensor, weight: Tensor | Quantised) -> Tensor:
    """`ops.gated`, to be multiplied by `weight` and used for nothing else."""
    if isinstance(weight, Quantised):
        return cast(Tensor, QuantisedRows(fp8.quantise_gated(gate, up)))
    return gated(gate, up)


def gated_product_for(x: Tensor, gate_up: Tensor | Quantised, weight: Tensor | Quantised) -> Tensor:
    """silu(x gate^T) * (x up^T) of gate_up [2 F, d], gate before up: to be multiplied by `weight` and used for nothing
    else."""
    eight = isinstance(gate_up, Quantised) or isinstance(weight, Quantised)
    if not eight and gates_itself(x, cast(Tensor, gate_up)):
        return gated_product(x, cast(Tensor, gate_up))
    gate, up = product(x, gate_up).chunk(2, 1)
    return gated_for(gate, up, weight)


def normed_for(x: Tensor, norm: nn.RMSNorm, *weights: Tensor | Quantised) -> Tensor:
    """`norm(x)`, to be multiplied by `weights` and used for nothing else."""
    assert norm.eps is not None
    if all(isinstance(weight, Quantised) for weight in weights):
        return cast(Tensor, QuantisedRows(fp8.quantise_normed(x, norm.weight, norm.eps)))
    return rms_norm(x, norm.weight, norm.eps)


def normed_after(x: Tensor, y: Tensor, weight: Tensor | Quantised, norm: nn.RMSNorm, *weights: Tensor) -> Tensor:
    """`normed_for` of x, behind x += y weight^T in x's memory."""
    if isinstance(weight, Quantised) and all(isinstance(one, Quantised) for one in weights):
        assert norm.eps is not None
        rows = fp8.quantise_normed(x, norm.weight, norm.eps, weight.added(x, y))
        return cast(Tensor, QuantisedRows(rows))
    return normed_for(product_onto(x, y, weight), norm, *weights)


def dispatched_for(x: Tensor, expert: Tensor, experts: int, weight: Tensor | Quantised) -> grouped.Dispatched:
    """`grouped.dispatch`, its rows to be multiplied by `grouped_for` with `weight`: rows in 8 bits are made before they
    are spread."""
    if not isinstance(weight, Quantised):
        return grouped.dispatch(x, expert, experts)
    q, scale = fp8.quantise_rows(x)
    sent = grouped.dispatch(q.view(torch.bfloat16), expert, experts)  # two numbers in one
    each = scale.unsqueeze(1).expand_as(expert).reshape(-1)
    scales = torch.empty_like(each).scatter_(0, sent.place.flatten().long(), each)
    rows = EightBits(sent.x.view(FP8), scales)
    return sent._replace(x=cast(Tensor, QuantisedRows(rows)))


def grouped_for(rows: Tensor, weight: Tensor | Quantised, ends: Tensor) -> Tensor:
    """`grouped.product` of rows by expert with the matrices of all experts, one behind the other: [E * M, K]."""
    experts = ends.shape[0]
    if not isinstance(weight, Quantised):
        return grouped.product(rows, weight.view(experts, -1, weight.shape[1]), ends)
    own = rows.rows if isinstance(rows, QuantisedRows) else EightBits(*fp8.quantise_rows(rows))
    matrices = weight.data.view(experts, -1, weight.data.shape[1])
    return fp8.grouped_linear(own, matrices, weight.scale.view(experts, -1), ends)


class _Transposed:
    """A weight as `addmm_` takes it."""

    def __init__(self, weight: Quantised) -> None:
        self.weight = weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """See `Quantised`."""
        del types
        if func is Tensor.addmm_ and not kwargs and len(args) == 3 and isinstance(args[2], cls):
            x, y, weight = args
            return product_onto(x, y, weight.weight)
        return NotImplemented
