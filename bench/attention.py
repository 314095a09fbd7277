"""Attention of a wide beam over its own prefix on a GPU: RecoGEM's figure 18, and the ancestry form beside it.

Each cell is the median of one graph replay over several input sets, together larger than the L2 cache, divided by the
number of calls. B rows (requests times beam width), H heads, D = 64, S positions; float16 unless --dtype says another.

* compacted: our kernel over compacted slots; copies: what compaction moves before it
* ancestry: over append-only slots of a tree of uniform parents, sorted by parent, W = 512, a BOS slot a request;
  ancestry_no_bos: the same without one
* native: softmax((q * k).sum(-1)) @ v by torch's operators; compiled: the same through torch.compile
* sdpa_*: torch's scaled_dot_product_attention by backend
* per_row: one warp a (row, head), figure 18's third curve

    python -m bench.attention --out bench/results/attention.json
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.ops import cuda
from app.ops.attention import reference
from app.ops.transition import compact
from bench import _plots
from bench._contexts import CONTEXTS, context_cell, context_table
from bench._graph_time import LEAST, graph_time
from bench._plots import Panel, Series
from bench._report import Shown, commit, save

SHAPES = tuple(product((4096, 8192, 16384), (32, 64)))
POSITIONS = (1, 2, 3, 4, 8)
DIM = 64
WIDTH = 512
BANDWIDTH = 4.3e12
"""Bytes a second that an H200 copies."""
SET_BYTES = 256 << 20
OURS = ("compacted", "ancestry", "ancestry_no_bos", "copies")
SDPA = ("flash", "efficient", "cudnn", "math")
TARGETS = {
    ("compacted", 1): 0.069,
    ("compacted", 4): 0.325,
    ("compacted", 8): 0.575,
    ("ancestry", 4): 0.205,
    ("ancestry", 8): 0.305,
    ("ancestry_no_bos", 4): 0.23,
    ("ancestry_no_bos", 8): 0.32,
}
"""Milliseconds to reach at B = 16384, H = 64."""
DRAWN = (
    ("PyTorch native", ("native",), _plots.ORANGE),
    ("torch.compile", ("compiled",), _plots.PURPLE),
    ("SDPA, flash", ("sdpa_flash",), _plots.RED),
    ("SDPA, its quickest backend", tuple(f"sdpa_{name}" for name in SDPA), _plots.BROWN),
    ("one warp a row", ("per_row",), _plots.GREEN),
    ("ours, compacted", ("compacted",), _plots.BLUE),
    ("ours, ancestry", ("ancestry",), _plots.BLACK),
    ("floor", ("floor",), _plots.GREY),
)
"""Lines of the plot: the least of some columns, and a colour."""


class Set(NamedTuple):
    """One input set: q, k, v [B, H, D] and slots [S - 1, B, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_slots: Tensor
    v_slots: Tensor
    tree: Tensor
    no_bos: Tensor


def tree_of(rows: int, columns: int, *, bos: bool, seed: int) -> Tensor:
    """[rows, columns] int32: uniform parents of each step, rows sorted by parent inside a request."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.arange(rows).div(WIDTH, rounding_mode="floor") * WIDTH
    found = torch.empty(rows, 0, dtype=torch.int64)
    for column in range(columns):
        if bos and column == 0:
            parent = base.div(WIDTH, rounding_mode="floor")
            found = parent.unsqueeze(1)
            continue
        drawn = torch.randint(0, WIDTH, (rows // WIDTH, WIDTH), generator=generator).sort(1).values.flatten()
        parent = base + drawn
        before = found if bos and column == 1 else found[parent]
        found = torch.cat([before, parent.unsqueeze(1)], 1)
    return found.to(torch.int32)


def inputs(rows: int, heads: int, positions: int, dtype: torch.dtype, seed: int) -> Set:
    """Random operands."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(rows, heads, DIM, device="cuda", dtype=dtype) for _ in range(3))
    shape = (positions - 1, rows, heads, DIM)
    k_slots, v_slots = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    trees = (tree_of(rows, positions - 1, bos=bos, seed=seed).cuda() for bos in (True, False))
    return Set(q, k, v, k_slots, v_slots, *trees)


def whole(x: Set) -> tuple[Tensor, Tensor]:
    """Keys and values of every row as the peers take them: [B, S, H, D]."""
    own = (torch.cat([slots, last.unsqueeze(0)]).transpose(0, 1).contiguous()
           for slots, last in ((x.k_slots, x.k), (x.v_slots, x.v)))  # fmt: skip
    keys, values = own
    return keys, values


def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, D], k, v [B, S, H, D]: attention as one writes it."""
    scores = (q.unsqueeze(1) * k).sum(-1) * DIM**-0.5
    return (torch.softmax(scores, 1).unsqueeze(-1) * v).sum(1)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch's attention."""
    heads_first = (k.transpose(1, 2), v.transpose(1, 2))
    return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), *heads_first).squeeze(2)


def with_backend(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`sdpa` by one backend."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return run


def per_row(x: Set, positions: int) -> Tensor:
    """One warp a (row, head), 4 bytes a lane."""
    out = torch.empty_like(x.q)
    source = Path(__file__).with_name("_per_row.cu")
    kernel = cuda.load(source, "per_row", x.q.device, S=positions, BF16=int(x.q.dtype == torch.bfloat16))
    rows = x.q.shape[0] * x.q.shape[1]
    pointers = (y.data_ptr() for y in (x.q, x.k, x.v, x.k_slots, x.v_slots, out))
    kernel.launch(-(-rows // 4), 128, *pointers, rows)
    return out


def ours(x: Set, tree: Tensor, *, compacted: bool) -> Tensor:
    """The registered operator."""
    out: Tensor = torch.ops.widebeam.prefix_attention(
        x.q, x.k, x.v, x.k_slots, x.v_slots, tree, DIM**-0.5, 0, None, compacted
    )
    return out


def copies(x: Set, standby: tuple[Tensor, Tensor], positions: int) -> None:
    """What compaction moves before a step of so many positions."""
    parent = x.tree[:, -1].long() if positions > 1 else x.tree
    for active, other in zip((x.k_slots, x.v_slots), standby, strict=True):
        compact(active, other, parent, positions - 1)


def floor(rows: int, heads: int, positions: int) -> float:
    """Milliseconds to move q, output, keys and values once; with one position v and output."""
    return 1e3 * rows * heads * DIM * 2 * (2 if positions == 1 else 2 + 2 * positions) / BANDWIDTH


def check(x: Set, positions: int) -> float:
    """Largest error of both forms against the definition in float32 on some rows."""
    some = torch.arange(0, len(x.q), max(1, len(x.q) // 64), device="cuda")
    worst = 0.0
    for tree, compacted in (
        (x.tree, False),
        (x.no_bos, False),
        (torch.arange(len(x.q), device="cuda")[:, None].repeat(1, positions - 1), True),
    ):
        found = ours(x, tree, compacted=compacted)[some].float()
        slots = (x.k_slots.float(), x.v_slots.float()) if positions > 1 else (x.k_slots.float(),) * 2
        expected, _ = reference.prefix_attention(
            x.q[some].float(), x.k[some].float(), x.v[some].float(), *slots, ancestry=tree[some], scale=DIM**-0.5
        )
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def cell(rows: int, heads: int, positions: int, dtype: torch.dtype, peers: bool, compiled: Any) -> dict[str, Any]:
    """All contestants of one shape and length."""
    size = rows * heads * DIM * 2 * (2 + 2 * positions)
    sets = [inputs(rows, heads, positions, dtype, n) for n in range(max(2, -(-SET_BYTES // size)))]
    found: dict[str, Any] = {"B": rows, "H": heads, "S": positions, "floor": floor(rows, heads, positions)}
    found["error"] = check(sets[0], positions)
    found["compacted"] = graph_time([lambda x=x: ours(x, x.tree, compacted=True) for x in sets], least=LEAST)
    found["ancestry"] = graph_time([lambda x=x: ours(x, x.tree, compacted=False) for x in sets], least=LEAST)
    found["ancestry_no_bos"] = graph_time([lambda x=x: ours(x, x.no_bos, compacted=False) for x in sets], least=LEAST)
    standby = (torch.empty_like(sets[0].k_slots), torch.empty_like(sets[0].v_slots))
    if positions > 1:
        found["copies"] = graph_time([lambda x=x: copies(x, standby, positions) for x in sets], least=LEAST)
    found["per_row"] = graph_time([lambda x=x: per_row(x, positions) for x in sets], least=LEAST)
    if peers:
        kv = [whole(x) for x in sets[:2]]
        own = list(zip(sets[:2], kv, strict=True))
        expected = native(sets[0].q.float(), *(y.float() for y in kv[0]))
        off = (per_row(sets[0], positions).float() - expected).abs().max()
        assert off < 0.05, f"per_row: {off}"
        found["native"] = graph_time([lambda x=x, y=y: native(x.q, *y) for x, y in own], 5)
        if compiled is not None:
            found["compiled"] = graph_time([lambda x=x, y=y: compiled(x.q, *y) for x, y in own], 5)
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ):
            name = f"sdpa_{backend.name.partition('_')[0].lower()}"
            try:
                run = with_backend(backend)
                found[name] = graph_time([lambda x=x, y=y, run=run: run(x.q, *y) for x, y in own], 3)
            except RuntimeError as error:
                found[name] = None
                print(f"{name}: {str(error).splitlines()[0][:150]}")
    return found


def plot(document: dict[str, Any]) -> str:
    """Milliseconds by prefix length, a panel a shape."""
    shapes = dict.fromkeys((one["B"], one["H"]) for one in document["ms"])
    panels = []
    for letter, (rows, heads) in zip("abcdef", sorted(shapes, key=lambda x: (x[1], x[0])), strict=False):
        table = {one["S"]: one for one in document["ms"] if (one["B"], one["H"]) == (rows, heads)}
        series = [
            Series(name, tuple(min((x[c] for c in columns if x.get(c)), default=None) for x in table.values()), colour,
                   dash="4 3" if name == "floor" else "")
            for name, columns, colour in DRAWN
        ]  # fmt: skip
        known = tuple(one for one in series if any(one.values))
        places = tuple(map(str, table))
        panels.append(Panel(f"({letter}) B={rows}, H={heads}", "KV length S", "ms", places, known, log=True))
    notes = [
        f"{document['device']}, {document['dtype']}, D = {DIM}, commit {document['commit'][:7]}; graph-captured "
        "medians. B: rows, H: heads. Floor: q, output, keys and values moved once.",
        "Ours, compacted: without a compaction's copies (in the table), which the ancestry form does not need.",
    ]
    title = "Attention over SID prefixes (as RecoGEM's figure 18)"
    return _plots.figure(title, _plots.alike(panels), columns=3, height=270, notes=notes)


def shown(document: dict[str, Any], stem: str) -> Shown:
    """A result's tables, and its plot for STEM.svg."""
    picture = f"{stem}.svg"
    return Shown(markdown(document, picture), {picture: plot(document)})


def markdown(document: dict[str, Any], picture: str = "") -> str:
    """The tables of a result. picture: the plot beside it."""
    columns = ("floor", *OURS, "per_row", "compiled", "native", *(f"sdpa_{name}" for name in SDPA))
    lines = [
        "# Attention over SID prefixes and contexts", "",
        f"{document['device']}, torch {document['torch']}, CUDA {document['cuda']}, commit {document['commit']}, "
        f"{document['dtype']}. Milliseconds, graph-captured medians; [README](../README.md) says of what.", "",
        "## Prefixes, D = 64 (figure 18)", "",
        *([f"![Latency by prefix length, a panel a shape, as in figure 18]({picture})", ""] if picture else []),
        "| B | H | S | " + " | ".join(columns) + " |", "| ---: " * (3 + len(columns)) + "|",
    ]  # fmt: skip
    for one in document["ms"]:
        cells = [f"{one[name]:.4g}" if one.get(name) else "-" for name in columns]
        lines.append(f"| {one['B']} | {one['H']} | {one['S']} | " + " | ".join(cells) + " |")
    missed = "; ".join(document["missed"]) or "nothing"
    lines += ["", f"Missed: {missed}.", "", *context_table(document["context"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--ours", action="store_true", help="without the peers")
    parser.add_argument("--only", nargs=2, type=int, metavar=("B", "H"), help="one shape")
    args = parser.parse_args()
    compiled = None if args.ours else torch.compile(native, dynamic=True)
    table = []
    for (rows, heads), positions in product([tuple(args.only)] if args.only else SHAPES, POSITIONS):
        one = cell(rows, heads, positions, getattr(torch, args.dtype), not args.ours, compiled)
        table.append(one)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in one.items()), flush=True)
        torch.cuda.empty_cache()
    contexts = [] if args.ours else [context_cell(*shape) for shape in CONTEXTS]
    for one in contexts:
        print(json.dumps(one), flush=True)
    missed = [
        f"{name} S={s}: {one[name]:.4f} over {ms}" for (name, s), ms in TARGETS.items() for one in table
        if (one["B"], one["H"], one["S"]) == (16384, 64, s) and one[name] > ms
    ]  # fmt: skip
    print("targets:", missed or "reached")
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": platform.python_version(), "commit": commit(), "dtype": args.dtype, "missed": missed,
        }  # fmt: skip
        document = {**about, "ms": table, "context": contexts}
        save(args.out, document, shown(document, args.out.stem))


if __name__ == "__main__":
    main()
