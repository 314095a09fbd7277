"""The selection operators as the runtime calls them: registered with `torch.library`, so that torch.export and
torch.compile see one operator where a device has its own way to compute it.

On a CPU it is the definition (`reference.py`); on an NVIDIA GPU `chunk.cu`, one read of what is selected from, and
`radix.cu` where that does not fit. The functions here go there at once, as torch's way to an operator of its own takes
longer than a launch; where a graph is made of them they are its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from app.ops import cuda
from app.ops.library import register, traced
from app.ops.selection import launch, radix, reference
from app.ops.selection.geometry import Requests, described, requests
from app.ops.selection.launch import Ranked
from app.ops.selection.reference import Chosen, Selected


def select_top(
    rank: Tensor, code: Tensor, order: Tensor, size: int, row_start: Sequence[int], keep: Sequence[int]
) -> Selected:
    """`reference.select_top`. On a GPU, and in a graph, a row's codes must ascend, as candidates do, and `order` must
    number the rows of a request from 0."""
    if traced(rank):
        of = _requests(rank, row_start, keep)
        return Selected(*torch.ops.widebeam.select_top(rank, order, *of[:3], of.widest, of.most, of.total))
    if cuda.unfit(rank.device) is not None:
        return reference.select_top(rank, code, order, size, row_start, keep)
    of = requests(row_start, keep, rank.device)
    if of.widest * rank.shape[1] >= 1 << 32 or not rank.numel():
        return reference.select_top(rank, code, order, size, row_start, keep)
    return Selected(*_select_top(rank, order, *of[:3], of.widest, of.most, of.total))


def select_logits(
    logits: Tensor,
    parent: Tensor,
    order: Tensor,
    row_start: Sequence[int],
    keep: Sequence[int],
    *,
    normalize: str,
    mask: Tensor | None = None,
    norm: Tensor | None = None,
    ancestry: Tensor | None = None,
) -> Chosen:
    """The best keep[r] of (logit - norm) + parent of each request under T0: `reference.select_logits`, in one read of
    the logits on a GPU (classes R and L of policy-language 2.3)."""
    of = _requests(logits, row_start, keep)
    given = (logits, mask, norm, parent, order, ancestry, *of[:3], of.widest, of.most, of.total, normalize)
    return Chosen(*(torch.ops.widebeam.select_logits if traced(logits) else _select_logits)(*given))


def one_read(logits: Tensor, row_start: Sequence[int], keep: Sequence[int]) -> bool:
    """Whether `select_logits` has a kernel for these logits; it is not the quicker way elsewhere."""
    if cuda.unfit(logits.device) is not None or logits.dtype not in launch.TYPES or not logits.numel():
        return False
    of = _requests(logits, row_start, keep)
    return launch.layout(logits.shape[1], logits.element_size(), of, logits.device) is not None


def select_ranked(
    logits: Tensor,
    parent: Tensor,
    order: Tensor,
    row_start: Sequence[int],
    keep: Sequence[int],
    *,
    normalize: str,
    ranked: Ranked,
    mask: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Chosen, Tensor, Tensor]:
    """The best keep[r] of each request by a rank that the kernels compute of each logit (policy-language 2.3, classes M
    and E), where `ranked_ready`; operands as of `select_logits`.

    Survivors are exact on the ranks that the kernels compute: those of torch's operators, but for the last place of
    log-sum-exp, exp, log, sigmoid and powers. Returns what was chosen, with the score that a survivor carries; how many
    candidates a NaN or +inf in score or rank cost, [n] int32; and the survivors' ranks [M] float32, -inf = tombstone,
    or [0] where they are not wanted.
    """
    of = _requests(logits, row_start, keep)
    given = (logits, mask, norm, parent, order, *of[:3], of.widest, of.most, of.total, normalize, ranked.definitions)
    how = (ranked.values, list(ranked.columns), ranked.noise, ranked.wanted)
    *chosen, broken, rank = (torch.ops.widebeam.select_ranked if traced(logits) else _select_ranked)(*given, *how)
    row, code, place, score, n_valid, bad = chosen
    slots = (_no_slots.__wrapped__ if traced(logits) else _no_slots)(of.total, logits.device)
    return Chosen(row, code, place, score, n_valid, bad, slots), broken, rank


def ranked_ready(
    logits: Tensor, row_start: Sequence[int], keep: Sequence[int], *, normalize: str, definitions: str
) -> bool:
    """Whether `select_ranked` takes these logits and its kernels are there, so that it compiles nothing."""
    if not one_read(logits, row_start, keep):
        return False
    of = _requests(logits, row_start, keep)
    shape = launch.layout(logits.shape[1], logits.element_size(), of, logits.device)
    kind, whole = launch.TYPES[logits.dtype], launch.whole_vectors(logits)
    assert shape is not None, "one_read"
    builds = launch.ranked_builds(kind, normalize, shape, whole=whole, definitions=definitions)
    return all(cuda.is_ready(one, logits.device) for one in builds)


def _requests(tensor: Tensor, row_start: Sequence[int], keep: Sequence[int]) -> Requests:
    """`requests`, which keeps them: of a graph they are constants, its own."""
    if not traced(tensor):
        return requests(row_start, keep, tensor.device)
    return described(row_start, keep, lambda values: torch.tensor(values, dtype=torch.int32, device=tensor.device))


def _select_top(
    rank: Tensor, order: Tensor, row_start: Tensor, keep: Tensor, out_start: Tensor, widest: int, most: int, total: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of = Requests(row_start, keep, out_start, widest, most, len(rank), total)
    if cuda.unfit(rank.device) is None and 0 < widest * rank.shape[1] < 1 << 32:
        shape = launch.layout(rank.shape[1], 4, of, rank.device)
        if shape is None:
            return radix.select(rank, order, of)
        found = launch.select(rank, launch.Scores(), order, of, shape, early=launch.EARLY)
        return found.row, found.code, found.order, found.n_valid
    code = torch.arange(rank.shape[1], device=rank.device).expand(rank.shape)
    return reference.select_top(rank, code, order, rank.shape[1], row_start.tolist(), keep.tolist())


def _select_logits(
    logits: Tensor, mask: Tensor | None, norm: Tensor | None, parent: Tensor, order: Tensor, ancestry: Tensor | None,
    row_start: Tensor, keep: Tensor, out_start: Tensor, widest: int, most: int, total: int, normalize: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    if cuda.unfit(logits.device) is not None:
        return reference.select_logits(
            logits, mask, norm, parent, order, ancestry, row_start.tolist(), keep.tolist(), normalize
        )
    of = Requests(row_start, keep, out_start, widest, most, len(logits), total)
    shape = launch.layout(logits.shape[1], logits.element_size(), of, logits.device)
    if shape is None:
        raise ValueError(f"select_logits: {widest} rows of {logits.shape[1]} codes and {most} survivors do not fit")
    slots, line = _no_slots(total, logits.device), None
    if ancestry is not None:
        slots, line = slots.new_empty(total, ancestry.shape[1] + 1), ancestry.contiguous()
    given = norm if normalize == "given" else None  # which is written to else
    scores, into = launch.Scores(mask, given, parent, normalize), None if line is None else slots
    found = launch.select(logits, scores, order, of, shape, ancestry=line, ancestry_out=into, early=launch.EARLY)
    return (*found[:5], found.bad, slots)


def _select_ranked(
    logits: Tensor, mask: Tensor | None, norm: Tensor | None, parent: Tensor, order: Tensor, row_start: Tensor,
    keep: Tensor, out_start: Tensor, widest: int, most: int, total: int, normalize: str, definitions: str,
    values: Tensor, columns: Sequence[Tensor], noise: Tensor | None, wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    reason = cuda.unfit(logits.device)
    if reason is not None:
        raise ValueError(f"select_ranked: {reason}; elsewhere ranks are computed by the policy's program")
    of = Requests(row_start, keep, out_start, widest, most, len(logits), total)
    shape = launch.layout(logits.shape[1], logits.element_size(), of, logits.device)
    if shape is None:
        raise ValueError(f"select_ranked: {widest} rows of {logits.shape[1]} codes and {most} survivors do not fit")
    ranked = launch.Ranked(definitions, values, tuple(columns), noise, wanted)
    given = norm if normalize == "given" else None  # which is written to else
    scores = launch.Scores(mask, given, parent, normalize, ranked)
    found = launch.select(logits, scores, order, of, shape, early=launch.EARLY)
    return (*found[:5], found.bad, found.broken, found.rank)


@lru_cache(maxsize=1024)
def _no_slots(survivors: int, device: torch.device) -> Tensor:
    """Their ancestry where none was given."""
    return torch.empty(survivors, 0, dtype=torch.int32, device=device)


def _shapes_of_top(
    rank: Tensor, order: Tensor, row_start: Tensor, keep: Tensor, out_start: Tensor, widest: int, most: int, total: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del order, row_start, out_start, widest, most
    chosen = [torch.empty(total, dtype=torch.int64, device=rank.device) for _ in range(3)]
    return chosen[0], chosen[1], chosen[2], torch.empty(len(keep), dtype=torch.int64, device=rank.device)


def _shapes_of_logits(
    logits: Tensor, mask: Tensor | None, norm: Tensor | None, parent: Tensor, order: Tensor, ancestry: Tensor | None,
    row_start: Tensor, keep: Tensor, out_start: Tensor, widest: int, most: int, total: int, normalize: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    del mask, norm, normalize
    row, code, place, valid = _shapes_of_top(parent, order, row_start, keep, out_start, widest, most, total)
    score = torch.empty(total, dtype=torch.float32, device=logits.device)
    bad = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    depth = 0 if ancestry is None else ancestry.shape[1] + 1
    return row, code, place, score, valid, bad, torch.empty(total, depth, dtype=torch.int32, device=logits.device)


def _shapes_of_ranked(
    logits: Tensor, mask: Tensor | None, norm: Tensor | None, parent: Tensor, order: Tensor, row_start: Tensor,
    keep: Tensor, out_start: Tensor, widest: int, most: int, total: int, normalize: str, definitions: str,
    values: Tensor, columns: Sequence[Tensor], noise: Tensor | None, wanted: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    del definitions, values, columns, noise
    given = (logits, mask, norm, parent, order, None, row_start, keep, out_start, widest, most, total, normalize)
    *chosen, bad, _ = _shapes_of_logits(*given)
    rank = torch.empty(total if wanted else 0, dtype=torch.float32, device=logits.device)
    return (*chosen, bad, torch.empty_like(bad), rank)


register(
    "select_top(Tensor rank, Tensor order, Tensor row_start, Tensor keep, Tensor out_start, int widest, int most, "
    "SymInt total) -> (Tensor, Tensor, Tensor, Tensor)",
    _select_top,
    _shapes_of_top,
)
register(
    "select_logits(Tensor logits, Tensor? mask, Tensor? norm, Tensor parent, Tensor order, Tensor? ancestry, "
    "Tensor row_start, Tensor keep, Tensor out_start, int widest, int most, SymInt total, str normalize) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _select_logits,
    _shapes_of_logits,
)
register(
    "select_ranked(Tensor logits, Tensor? mask, Tensor? norm, Tensor parent, Tensor order, Tensor row_start, "
    "Tensor keep, Tensor out_start, int widest, int most, SymInt total, str normalize, str definitions, "
    "Tensor values, Tensor[] columns, Tensor? noise, bool wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _select_ranked,
    _shapes_of_ranked,
)
