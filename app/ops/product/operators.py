"""Products of rows with a matrix as the engine calls them: by the algorithm of cuBLASLt that was chosen for the shape
(`choice.py`), else by torch.

Registered with `torch.library`: torch.compile sees one node each, whose algorithm is found when it runs, and torch need
not look into how. An export, which is of what is computed and not of how, sees torch's own operator, one as well. The
engine's own tensors go to the function at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from app.ops.library import register, traced
from app.ops.product import lt
from app.ops.product.lt import Algorithm
from app.ops.product.reference import Scales, multiply
from app.ops.product.table import LEAST, TABLE, Key


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., k] weight [m, k]^T -> [.., m]: torch's linear, up to the order of its sums."""
    out: Tensor = (torch.ops.widebeam.product if _compiling() else _product)(x, weight)
    return out


def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """`product` of x [n, k] in the place of out [n, m], whose rows may lie apart. Raises ValueError for another shape:
    torch would give out other memory."""
    if out.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(f"out is {list(out.shape)}, the product [{x.shape[0]}, {weight.shape[0]}]")
    (torch.ops.widebeam.product_into if _compiling() else _product_into)(out, x, weight)


def product_onto(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """out [n, m] += `product` of x [n, k], in out's memory: `out.addmm_(x, weight.t())`."""
    (torch.ops.widebeam.product_onto if _compiling() else _product_onto)(out, x, weight)
    return out


def scaled(
    x: Tensor, weight: Tensor, scales: Scales, out: Tensor | None = None, *, onto: bool = False
) -> Tensor | None:
    """The product of rows x [n, k] and a matrix [m, k] in 8 bits (float8_e4m3fn), bfloat16 [n, m]: in the place of out
    where that is given, or added to it and rounded once. None where no algorithm was chosen: nothing was done."""
    algorithm = _chosen(x, weight, onto=onto)
    if algorithm is None:
        return None
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    return out if _launched(algorithm, out, x, weight, scales, onto=onto) else None


def _compiling() -> bool:
    """Whether torch.compile makes a graph of what is called, and not torch.export."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    algorithm = _chosen(x, weight, onto=False)
    if algorithm is not None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if _launched(algorithm, out, x, weight, None, onto=False):
            return out
    return functional.linear(x, weight)


def _product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    algorithm = _chosen(x, weight, onto=False)
    if algorithm is None or not _launched(algorithm, out, x, weight, None, onto=False):
        multiply(out, x, weight, None, onto=False)


def _product_onto(out: Tensor, x: Tensor, weight: Tensor) -> None:
    algorithm = _chosen(x, weight, onto=True)
    if algorithm is None or not _launched(algorithm, out, x, weight, None, onto=True):
        multiply(out, x, weight, None, onto=True)


def _chosen(x: Tensor, weight: Tensor, *, onto: bool) -> Algorithm | None:
    """The algorithm for such a product, of many rows on a GPU. A tracer's tensors have none."""
    if traced(x) or not x.is_cuda or x.dim() != 2 or x.shape[0] < LEAST or lt.library() is None:
        return None
    if x.dtype not in lt.TYPES or weight.dtype != x.dtype:
        return None
    return TABLE.find(Key(x.device.index, x.dtype, weight.shape[0], weight.shape[1], onto), x.shape[0])


def _launched(
    algorithm: Algorithm, out: Tensor, x: Tensor, weight: Tensor, scales: Scales | None, *, onto: bool
) -> bool:
    """Whether an algorithm takes these operands, and has been launched."""
    if out.dtype != (x.dtype if scales is None else torch.bfloat16) or not all(map(_whole, (out, x, weight))):
        return False
    (n, k), device = x.shape, x.device
    rows = x.stride(0), weight.stride(0), out.stride(0)
    made = lt.product(lt.Shape(device.index, x.dtype, n, weight.shape[0], k, *rows))
    places = None if scales is None else (scales.x.data_ptr(), scales.weight.data_ptr())
    with torch.cuda.device(device):
        return made.launched(algorithm, x.data_ptr(), weight.data_ptr(), out.data_ptr(), onto=onto, scales=places)


def _whole(x: Tensor) -> bool:
    """Whether rows are whole, and begin where cuBLASLt was told that they do."""
    size = x.element_size()
    return x.stride(1) == 1 and not (x.data_ptr() % lt.ALIGNMENT or x.stride(0) * size % lt.ALIGNMENT)


def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


register("product(Tensor x, Tensor weight) -> Tensor", _product, _shape)
register("product_into(Tensor(a!) out, Tensor x, Tensor weight) -> ()", _product_into, lambda *_: None)
register("product_onto(Tensor(a!) out, Tensor x, Tensor weight) -> ()", _product_onto, lambda *_: None)
