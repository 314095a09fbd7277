"""The dense products of a decode step on a GPU, in bfloat16 and in 8 bits, and a mixture of experts part by part.

    python -m bench.products [--out bench/results/products.json]

OneRec-V2's shapes: the 0.2B row (d 896, FFN 3584) and the experts of its 4B row (d 1408, 53 routed experts of 1408, 3
of them a row), over 32 x 512 rows. Medians of graph replays over input sets that are together larger than the L2.

product    one matrix alone: rows in bfloat16, with the residual added (`addmm`), rows that are in 8 bits already
rows       what makes the rows of a product: gate and norm in bfloat16, in 8 bits in two kernels, and in one; gate and
           up in bfloat16 as a product and the gate, and together
choice     what a server would choose for such a block and a head in the place of torch's algorithms
layer      all products and rows of a decoder block without its attention, as the family computes them, by what was
           chosen
experts    a mixture part by part, against torch's operators for it, and the dense product of as many FLOP
mixture    all of it, with its router and its shared expert
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.families.onerec import Feed, Projections
from app.engine.families.onerec_config import HistoryConfig, OneRecConfig
from app.engine.fp8 import install, normed_for
from app.engine.layers import keep
from app.engine.moe import Mixture, Routing
from app.ops import fp8, grouped
from app.ops.gated import gated, gated_product
from app.ops.grouped import reference
from app.ops.product import choose, product
from bench._graph_time import graph_time
from bench._report import commit

ROWS, SETS = 16384, 3
D, FFN = 896, 3584
WIDE, EXPERTS, CHOSEN, HIDDEN = 1408, 53, 3, 1408
PRODUCTS = ((D, D), (3 * D, D), (FFN, D), (2 * FFN, D), (D, FFN), (8192, D))
"""[outputs, inputs]: of an attention, q k v together, gate, gate and up together, down, a head."""
Row = dict[str, Any]


def normal(*shape: int) -> Tensor:
    """Standard normal numbers, bfloat16."""
    return torch.randn(*shape, device="cuda").bfloat16()


def timed(make: Callable[[], Callable[[], Any]]) -> float:
    """Milliseconds of a call; make gives one over operands of its own."""
    return graph_time([make() for _ in range(SETS)])


def products() -> Iterator[Row]:
    """Each matrix alone."""
    for outputs, inputs in PRODUCTS:
        weight = normal(outputs, inputs) * inputs**-0.5
        eight = fp8.quantise_rows(weight)

        def plain(weight: Tensor = weight, inputs: int = inputs) -> Callable[[], Any]:
            x = normal(ROWS, inputs)
            return lambda: functional.linear(x, weight)

        def added(weight: Tensor = weight, inputs: int = inputs, outputs: int = outputs) -> Callable[[], Any]:
            x, y = normal(ROWS, inputs), normal(ROWS, outputs)
            return lambda: y.addmm_(x, weight.t())

        def ready(eight: tuple[Tensor, Tensor] = eight, inputs: int = inputs) -> Callable[[], Any]:
            x = fp8.EightBits(*fp8.quantise_rows(normal(ROWS, inputs)))
            return lambda: fp8.linear(x, *eight)

        flop = 2 * ROWS * inputs * outputs
        found = {"bf16": timed(plain), "addmm": timed(added), "fp8": timed(ready)}
        yield {
            "outputs": outputs,
            "inputs": inputs,
            "ms": found,
            "tflops": {k: flop / v / 1e9 for k, v in found.items()},
        }


def two(width: int) -> tuple[Tensor, Tensor]:
    """Gate and up, side by side."""
    gate, up = normal(ROWS, 2 * width).chunk(2, 1)
    return gate, up


def rows() -> Iterator[Row]:
    """What makes the rows of a product. ideal: the bytes of the fused form at 4.3 TB/s."""
    norm = nn.RMSNorm(D, 1e-6, device="cuda", dtype=torch.bfloat16)

    def over(make: Callable[[], Any], call: Callable[..., Any]) -> float:
        def made() -> Callable[[], Any]:
            operands = make()
            return lambda: call(*operands)

        return timed(made)

    def one() -> tuple[Tensor]:
        return (normal(ROWS, D),)

    yield {
        "rows": f"gate, {FFN}", "bf16": over(lambda: two(FFN), gated),
        "then": over(lambda: two(FFN), lambda g, u: fp8.quantise_rows(gated(g, u))),
        "fused": over(lambda: two(FFN), fp8.quantise_gated), "ideal": ROWS * FFN * 5 / 4.3e9,
    }  # fmt: skip
    entry = normal(2 * FFN, D) * D**-0.5
    yield {
        "rows": f"gate and up, {FFN}", "bf16": over(one, lambda x: gated(*functional.linear(x, entry).chunk(2, 1))),
        "together": over(one, lambda x: gated_product(x, entry)),
    }  # fmt: skip
    yield {
        "rows": f"norm, {D}", "bf16": over(one, norm), "then": over(one, lambda x: fp8.quantise_rows(norm(x))),
        "fused": over(one, lambda x: fp8.quantise_normed(x, norm.weight, 1e-6)), "ideal": ROWS * D * 3 / 4.3e9,
    }  # fmt: skip
    yield {"rows": f"quantise, {D}", "fused": over(one, fp8.quantise_rows), "ideal": ROWS * D * 3 / 4.3e9}

    def kept() -> tuple[Tensor, Tensor]:
        return normal(ROWS, D // 64, 64), normal(ROWS, 3 * D // 64, 64)[:, -(D // 64) :]

    yield {
        "rows": f"keep, {D}", "torch": over(kept, Tensor.copy_), "ours": over(kept, keep),
        "together": over(lambda: (kept()[0], kept()[0]), Tensor.copy_), "ideal": ROWS * D * 4 / 4.3e9,
    }  # fmt: skip
    yield {"rows": f"add, {D}", "bf16": over(lambda: (*one(), *one()), Tensor.add_), "ideal": ROWS * D * 6 / 4.3e9}


class Dense(nn.Module):
    """A decoder block of the 0.2B row without its attention operators: what they would give is what they got."""

    def __init__(self, *, eight: bool) -> None:
        super().__init__()
        config = OneRecConfig(
            family="onerec", sizes=(8192,), d_model=D, layers=1, heads=D // 64, head_dim=64, cross_groups=D // 64,
            self_groups=D // 64, ffn=FFN, history=HistoryConfig(short=511),
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.RMSNorm(D, 1e-6) for _ in range(3))
        self.cross, self.own, self.feed = Projections(config, 0), Projections(config, D // 64), Feed(config)
        self.to("cuda", torch.bfloat16).requires_grad_(requires_grad=False)
        if eight:
            for part in [part for part in self.modules() if isinstance(part, nn.Linear)]:
                install(part, "weight", *fp8.quantise_rows(part.weight))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] -> the same, in its memory."""
        first, second, third = cast("list[nn.RMSNorm]", list(self.norms))
        q, _, _ = self.cross.heads(normed_for(x, first, self.cross.qkv.weight))
        q, _, _ = self.own.heads(self.cross.after(x, q, second, self.own.qkv.weight))
        return self.feed.onto(x, self.own.after(x, q, third, self.feed.entry))


def choices() -> Iterator[Row]:
    """Whether and by how much another algorithm is quicker."""
    blocks, x, head = [Dense(eight=eight) for eight in (False, True)], normal(ROWS, D), normal(8192, D) * D**-0.5
    for number, one in enumerate(choose([*(lambda b=b: b(x) for b in blocks), lambda: product(x, head)])):
        yield {"choice": number, **one.document()}


def layers() -> Iterator[Row]:
    """A block in bfloat16 and in 8 bits."""
    flop = 2 * ROWS * (6 * D * D + 3 * D * FFN)
    for eight in (False, True):
        block = Dense(eight=eight)

        def made(block: Dense = block) -> Callable[[], Any]:
            x = normal(ROWS, D)
            return lambda: block(x)

        ms = timed(made)
        yield {"layer": "fp8" if eight else "bf16", "ms": ms, "tflops": flop / ms / 1e9}


def experts() -> Iterator[Row]:
    """A mixture, part by part. Rows choose as a random router makes them."""
    x, logits = normal(ROWS, WIDE), normal(ROWS, EXPERTS)
    how: Any = {"sigmoid": False, "normalise": True, "factor": 1.0}
    up, down = normal(EXPERTS, 2 * HIDDEN, WIDE) * WIDE**-0.5, normal(EXPERTS, WIDE, HIDDEN) * HIDDEN**-0.5
    expert, weight = grouped.choose(logits, None, CHOSEN, **how)
    sent = grouped.dispatch(x, expert, EXPERTS)
    most = int(sent.ends.diff(prepend=sent.ends.new_zeros(1)).max())
    gate = grouped.product(sent.x, up, sent.ends)
    hidden = gated(*gate.chunk(2, 1))
    back = grouped.product(hidden, down, sent.ends)

    def torch_dispatch() -> Tensor:
        row, _, _ = reference.arrange(expert, EXPERTS)
        return x[row]

    def whole() -> Tensor:
        chosen, share = grouped.choose(logits, None, CHOSEN, **how)
        rows = grouped.dispatch(x, chosen, EXPERTS)
        middle = gated(*grouped.product(rows.x, up, rows.ends).chunk(2, 1))
        return grouped.combine(grouped.product(middle, down, rows.ends), rows.place, share, x)

    many, flat_up, flat_down = ROWS * CHOSEN, up[0], down[0]
    parts: dict[str, Callable[[], Any]] = {
        "choose": lambda: grouped.choose(logits, None, CHOSEN, **how),
        "choose, torch": lambda: reference.choose(logits, None, CHOSEN, **how),
        "dispatch": lambda: grouped.dispatch(x, expert, EXPERTS),
        "dispatch, torch": torch_dispatch,
        "gate and up": lambda: grouped.product(sent.x, up, sent.ends),
        "gate and up, one matrix": lambda: functional.linear(sent.x, flat_up),
        "gate": lambda: gated(*gate.chunk(2, 1)),
        "down": lambda: grouped.product(hidden, down, sent.ends),
        "down, one matrix": lambda: functional.linear(hidden, flat_down),
        "combine": lambda: grouped.combine(back, sent.place, weight, x),
        "combine, torch": lambda: reference.combine(back, sent.place, weight, x),
        "whole": whole,
    }
    flops = {
        "gate and up": 4 * many * WIDE * HIDDEN,
        "down": 2 * many * WIDE * HIDDEN,
        "whole": 6 * many * WIDE * HIDDEN,
    }
    for name, call in parts.items():
        ms = graph_time([call])
        flop = flops.get(name.removesuffix(", one matrix"))
        yield {"part": name, "ms": ms, "tflops": flop / ms / 1e9 if flop else None, "largest_group": most}


def mixtures() -> Iterator[Row]:
    """The whole mixture with its router and shared expert, as a block calls it."""
    flop = 2 * ROWS * (3 * WIDE * HIDDEN * (CHOSEN + 1) + WIDE * EXPERTS)
    for eight in (False, True):
        part = Mixture(Routing(EXPERTS, CHOSEN, HIDDEN, shared=HIDDEN), WIDE).to("cuda", torch.bfloat16)
        for parameter in part.parameters():
            parameter.requires_grad_(False).normal_().mul_(parameter.shape[1] ** -0.5)
        for name in part.projections() if eight else ():
            install(part, name, *fp8.quantise_rows(getattr(part, name)))
        x, onto = normal(ROWS, WIDE), normal(ROWS, WIDE)
        ms = graph_time([lambda part=part, x=x, onto=onto: part(x, onto)])
        yield {"mixture": "fp8" if eight else "bf16", "ms": ms, "tflops": flop / ms / 1e9}


def shown(row: Row) -> str:
    """A line of the table."""
    flat: Row = {}
    for name, value in row.items():
        flat |= {f"{k} {name}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in flat.items()
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    tables: dict[str, list[Row]] = {}
    parts = {
        "experts": experts,
        "mixtures": mixtures,
        "products": products,
        "rows": rows,
        "choices": choices,
        "layers": layers,
    }
    for name, table in parts.items():
        tables[name] = []
        for row in table():
            tables[name].append(row)
            print(name, shown(row), flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit(), "batch_rows": ROWS}
    if args.out:
        args.out.write_text(json.dumps(about | tables, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
