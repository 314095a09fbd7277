"""Small cases of every kernel for compute-sanitizer: whole operators, compared as the tests here compare them.

    compute-sanitizer --tool memcheck --error-exitcode 1 --kernel-regex-exclude kns=at6native \\
        python -m tests.gpu.sanitize all
    compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-regex-exclude kns=at6native \\
        python -m tests.gpu.sanitize selection trie

`--kernel-regex-exclude kns=at6native` leaves torch's own kernels out, which make the operands and compare: with them it
takes hours. From the root of a checkout, on a GPU of compute capability 9.0, with pytest and the bench's packages. Each
case is a line; a kernel of a part that no case launched is an error: so nothing is called clean that did not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from app.ops import cuda
from app.ops.cuda import Build, Kernel

BF16, FP16 = torch.bfloat16, torch.float16


class Part(NamedTuple):
    """cases: yields a name and what to run · kernels: `source:entry` below app/ops, which its cases launch"""

    cases: Callable[[], Iterator[tuple[str, Callable[[], object]]]]
    kernels: frozenset[str]


def _selection() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_selection as of
    from tests.gpu.policies import test_generated as by

    for kind in ("random", "few"):
        yield f"logits, {kind}", partial(of.check, of.case(kind, [3, 17, 9], 700, [20, 30, 5]), "step")
    yield "logits, bad", partial(of.check, of.case("bad", [24] * 2, 1024, [40] * 2), "valid")
    yield "logits, equal", partial(of.check, of.case("equal", [5] * 2, 301, [9] * 2, dtype=torch.float32), "step")
    yield "logits, early", partial(of.check, of.case("random", [6, 11], 512, [12, 20]), "step", early=True)

    def radix(codes: int, widths: list[int], keep: list[int]) -> None:
        x = of.case("random", widths, codes, keep, dtype=torch.float32)
        rank = of.scored(x._replace(logits=of.definition.sanitise(x.logits)[0]), None, plain=True)
        found = of.radix.select(rank, x.order, of.geometry.requests(x.row_start, x.keep, of.DEVICE))
        code = torch.arange(codes, device=of.DEVICE).expand(rank.shape)
        best = of.definition.select_top(rank, code, x.order, codes, x.row_start, x.keep)
        assert all(torch.equal(one, two) for one, two in zip(found, best, strict=True))

    yield "ranks, rows cut first", partial(radix, 900, [20, 3], [60, 2])
    yield "ranks, rows whole", partial(radix, 90, [20, 3], [60, 2])
    plans = {"columns": by.EXACT["columns"], "some": by.EXACT["some"], **by.DRAWN}
    for name in ("columns", "some", "two kinds of noise", "stochastic", "stochastic of few"):
        how = {} if name == "columns" else {"normalize": "given"}
        yield f"expressions, {name}", partial(by.check, plans[name], [20, 3], 700, [40, 5], exact=True, **how)
    yield "candidates and nodes", of.test_bits_of_candidates_and_nodes_of_survivors
    for widths in ([1], [7, 0, 300, 1]):
        yield f"counts, {widths}", partial(of.test_what_was_wrong_is_counted_by_request, widths)


def _trie() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu import test_trie as of

    def walk(index: torch.dtype, widest: int) -> None:
        first, code, node = of.tree(index, fan=widest)
        some = of.trie.children(first, code, node, widest)
        of.same(some, of.reference.children(first, code, node, widest))
        of.same(of.trie.dense(first, code, node, widest, 64), of.reference.dense(first, code, node, widest, 64))
        request, nodes = torch.arange(len(node), device=node.device) // 100, len(code) + 1
        keys = (request.unsqueeze(1) * nodes + some.node)[some.node >= 0][::5].unique()
        for at in (some.node, some.node.t().contiguous().t()):
            found = of.trie.contains(keys, at, request, nodes)
            assert torch.equal(found, of.reference.contains(keys, at, request, nodes))

    for index in (torch.int32, torch.int64):
        for widest in (1, 9):
            yield f"{index}, {widest}", partial(walk, index, widest)


def _transition() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_transition as of

    for sizes in ((1, 4, 40), (2, 300, 513), (5, 33, 1)):
        yield f"{sizes}", partial(of.test_the_kernel_is_the_definition_and_changes_nothing_that_it_reads, *sizes)
    yield "apart", of.test_rows_that_lie_apart_are_taken
    yield "guarded", partial(of.test_nothing_beside_the_output_is_written, 4)


def _attention() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu import test_attention as of

    for dtype, d, h, hkv in ((BF16, 64, 6, 6), (FP16, 40, 8, 2)):
        yield f"prefixes, {d}", partial(of.test_a_prefix_of_every_length_is_the_definition, dtype, d, h, hkv)
    yield "slots in products", partial(of.test_slots_inside_of_products_give_the_same_bits, BF16, 64, 8, 2)
    for sizes in ((7, 3, 64, 8), (33, 2, 256, 4)):
        for test in (
            of.test_a_product_with_its_own_slot_stays_inside_of_its_memory,
            of.test_nothing_outside_of_the_operands_is_read_or_written,
        ):
            yield f"guarded, {sizes}", partial(_patched, test, *sizes)
    yield "with contexts", partial(of.test_what_a_context_gave_counts_as_one_more_key, BF16, 64)
    yield "contexts, 64", partial(of.test_a_ragged_batch_over_its_contexts_is_the_definition, BF16, 64, 8, 2)
    yield "contexts, 128", partial(of.test_contexts_of_many_tiles, FP16, 128, 3, 1)
    yield "contexts, guarded", partial(_patched, of.test_a_context_stays_with_its_rows_and_inside_of_its_memory)


def _norm() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_norm as of

    for sizes in ((33, 24, 8), (9, 264, 16), (7, 4096, 0)):
        yield f"{sizes}", partial(of.test_the_kernel_is_the_definition_and_writes_nothing_else, *sizes, BF16)


def _gated() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_gated as of

    for sizes in ((33, 24, 8), (257, 2816, 2816)):
        yield f"{sizes}", partial(of.test_the_kernel_is_the_definition, *sizes, FP16)


def _gated_product() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_gated_product as of

    for dtype in of.ROUNDING:
        for sizes in ((2048, 128, 64), (2305, 256, 192), (700, 384, 128)):
            test = of.test_it_is_the_definition_and_stays_inside_of_its_memory
            yield f"{dtype}, {sizes}", partial(_patched, test, *sizes, dtype)


def _grouped() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu.ops import test_grouped as of

    for shape in ((7, 53, 3), (65, 1, 1), (300, 512, 10)):
        for how in ((False, True, False), (True, True, True)):
            yield f"choose, {shape}", partial(of.test_the_experts_of_a_row_are_the_definitions, shape, how, BF16)
        arranged = of.test_rows_are_arranged_bit_by_bit_as_a_stable_sort_does
        yield f"dispatch, {shape}", partial(arranged, shape, "random", FP16)
    for onto in (False, True):
        yield "combine", partial(of.test_what_comes_back_is_summed_as_defined, (33, 3, 1408), onto, BF16)


def _fp8() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu import test_fp8 as of

    for shape in ((33, 192), (300, 896), (3, 8192)):
        yield f"rows, {shape}", partial(of.test_rows_are_quantised_bit_by_bit_as_they_are_defined, shape, 1.0)
    for shape in ((33, 192), (5, 3584)):
        yield f"gate, {shape}", partial(of.test_a_gate_in_8_bits_is_the_gate_quantised_bit_by_bit, shape)
        yield f"norm, {shape}", partial(of.test_a_norm_in_8_bits_is_the_norm_quantised_up_to_a_neighbour, shape, 1.0)
        yield f"sum, {shape}", partial(of.test_a_sum_and_its_norm_in_8_bits_are_those_in_two_steps_bit_by_bit, shape)


def _gdn() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu import test_gdn as of

    def replay(geometry: int, widths: list[int], calls: int, out: torch.dtype, **how: Any) -> None:
        found = of.check(of.GEOMETRIES[geometry], widths, calls, out, **how)
        assert found["error"] < of.BAR

    for compact in (False, True):
        how = {"seed": 3, "dtype": BF16, "compact": compact}
        yield f"replay, {how}", partial(replay, 1, [20, 0, 9, 0], 4, torch.float32, **how)
    yield "replay, 16 bit", partial(replay, 0, [13, 1], 3, BF16, seed=2, dtype=BF16, ordered=False)
    yield "replay, keys of 256", partial(replay, 7, [9], 3, torch.float32, seed=4, dtype=FP16, ordered=False)
    for geometry in (0, 8):
        how = {"seed": 4, "dtype": FP16, "ordered": False, "portable": True}
        yield f"replay, portable, {geometry}", partial(replay, geometry, [9], 3, torch.float32, **how)
    for size in (2, 4):
        yield f"convolution, {size}", partial(of.test_the_convolution_kernel_is_torchs_operators, size, BF16)
    yield "gates and norm", partial(of.test_the_kernels_of_gates_and_norm_are_torchs_operators, FP16)


def _patched(test: Callable[..., object], *given: Any) -> None:
    """A test whose last argument is pytest's monkeypatch."""
    with pytest.MonkeyPatch.context() as patch:
        test(*given, monkeypatch=patch)


def _named(source: str, *entries: str) -> frozenset[str]:
    return frozenset(f"{source}:{entry}" for entry in entries)


_PREFIXES = (
    *(f"slots_{n}" for n in range(1, 9)), *(f"compact_{n}" for n in range(2, 9)), *(f"walk_{n}" for n in range(6, 9)),
)  # fmt: skip
PARTS = {
    "selection": Part(
        _selection,
        _named("selection/chunk.cu", "scan", "rank_scan", "tail")
        | _named("selection/radix.cu", "precut", "narrow", "collect")
        | _named("selection/candidates.cu", "pack", "child", "children", "count"),
    ),
    "trie": Part(_trie, _named("trie/kernel.cu", "children", "dense", "contains")),
    "transition": Part(_transition, _named("transition/kernel.cu", "advance")),
    "attention": Part(
        _attention, _named("attention/kernel.cu", *_PREFIXES) | _named("attention/context.cu", "context")
    ),
    "norm": Part(_norm, _named("norm/kernel.cu", "rms_norm")),
    "gated": Part(_gated, _named("gated/kernel.cu", "gated")),
    "gated_product": Part(_gated_product, _named("gated/product.cu", "gated_product")),
    "grouped": Part(_grouped, _named("grouped/kernel.cu", "choose", "count", "arrange", "spread", "combine")),
    "fp8": Part(_fp8, _named("fp8/kernel.cu", "quantise", "gated", "normed", "summed")),
    "gdn": Part(
        _gdn,
        _named("gdn/kernel.cu", "replay") | _named("gdn/around.cu", "window_convolution", "gates", "gated_norm"),
    ),
}


def run(names: Sequence[str]) -> int:
    """Every case of some parts. Returns how many of their kernels were never launched, and says which."""
    missed = 0
    with pytest.MonkeyPatch.context() as patch:
        launched = _watched(patch)
        for name in names:
            launched.clear()
            for case, body in PARTS[name].cases():
                body()
                torch.cuda.synchronize()
                _say(f"{name}: {case}")
            missing = sorted(PARTS[name].kernels - launched)
            missed += len(missing)
            said = f"never launched: {', '.join(missing)}" if missing else f"{len(PARTS[name].kernels)} kernels"
            _say(f"{name}: {said}")
    return missed


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _watched(patch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that are launched from now on, as `Part` names them."""
    launched: set[str] = set()
    names: dict[Kernel, str] = {}
    entry, launch = cuda.entry, Kernel.launch

    def named(build: Build, name: str, device: torch.device, *, memory: int = 0) -> Kernel:
        kernel = entry(build, name, device, memory=memory)
        names[kernel] = f"{build.name}:{name}"
        return kernel

    def noted(kernel: Kernel, *given: Any, early: bool = False) -> None:
        launched.add(names[kernel])
        launch(kernel, *given, early=early)

    patch.setattr(cuda, "entry", named)
    patch.setattr(Kernel, "launch", noted)
    return launched


def parts(arguments: Sequence[str] | None = None) -> list[str]:
    """The parts that a command line names. Exits with usage where it names none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.sanitize", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="+", choices=[*PARTS, "all"], metavar="NAME", help=", ".join([*PARTS, "all"]))
    asked = parser.parse_args(arguments).names
    return list(PARTS) if "all" in asked else list(dict.fromkeys(asked))


if __name__ == "__main__":
    sys.exit(1 if run(parts()) else 0)
