"""A family's encode and step functions by torch.export: what they take, give, read and write (RecoGEM 3.1).

Nothing is computed and no weights are there: parameters, inputs and the arena lie on the meta device. Requests, rows
and context positions are symbolic. What is kept are facts, not graphs: two versions of torch that see the same
functions give the same facts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from app.core import Arena, Ragged, Rows, StepOutput
from app.engine.families.base import Family
from app.engine.functions import Function, TensorFact, check_functions

MOST: Final = 1 << 20
"""Rows of the arena in a trace, and the bound of every symbolic size: larger than any deployment's."""
_SOME: Final = (7, 5, 11)
"""Rows, requests and positions that a trace begins with; different, so that no two sizes are taken for one."""


def export_family(family: Family, sizes: Sequence[int]) -> tuple[Function, ...]:
    """Trace `encode`, and each step that the runtime will call.

    sizes: C_1..C_L
    A function that torch.export cannot follow is `exported: false`. Raises Rejected("bad_family") where what a function
    does contradicts what its family declares. Not beside running computation: that an export is being made is a state
    of the process. The family is of no use afterwards: its buffers have no memory any more.
    """
    family.to("meta").requires_grad_(requires_grad=False)  # as the engine's are: a product may be written in its place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own export, about itself
        encode = _exported("encode", _Encode(family), _encode_arguments(family))
        first = 2 if encode.outputs or (not encode.exported and family.log_norm) else 1
        steps = range(first, family.steps + 1)
        found = (encode, *(_exported(f"step {t}", _Step(family, t), _step_arguments(family, t)) for t in steps))
    check_functions(family, found, sizes)
    return found


class _Arguments(NamedTuple):
    """names: of the inputs, in order · inputs · sizes: words for dims of each input, as torch.export takes them."""

    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    sizes: tuple[Mapping[int, Any], ...]
    arena: Arena


class _Encode(nn.Module):
    """`encode` over plain tensors."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family

    def forward(self, inputs: list[Tensor], arena: dict[str, Tensor]) -> dict[str, Tensor]:
        """inputs: values and start of each input, in the order of `input_specs`."""
        specs = self.family.input_specs()
        pairs = zip(specs, inputs[::2], inputs[1::2], strict=True)
        output = self.family.encode({spec.name: Ragged(values, start) for spec, values, start in pairs}, arena)
        return {} if output is None else _flat(output)


class _Step(nn.Module):
    """Step t over plain tensors."""

    def __init__(self, family: Family, t: int) -> None:
        super().__init__()
        self.family, self.t = family, t

    def forward(self, inputs: list[Tensor], arena: dict[str, Tensor]) -> dict[str, Tensor]:
        """inputs: the tensors of `core.Rows`."""
        codes, request, row_start, ancestry = inputs
        rows = Rows(codes, request, row_start, ancestry, compact=False, full=True)
        return _flat(self.family.step(self.t, rows, arena))


def _flat(output: StepOutput) -> dict[str, Tensor]:
    norm = {} if output.log_norm is None else {"log_norm": output.log_norm}
    return {"logits": output.logits, **norm, **{f"head.{name}": head for name, head in output.heads.items()}}


def _arena(family: Family) -> dict[str, Tensor]:
    slots = max(family.steps - 1, 1)
    return {
        spec.name: torch.empty(
            (*((MOST,) if spec.scope == "request" else (slots, MOST)), *spec.shape), dtype=spec.dtype, device="meta"
        )
        for spec in family.state_specs()
    }


def _size(word: str) -> Any:
    return Dim(word, min=1, max=MOST)


def _encode_arguments(family: Family) -> _Arguments:
    names, inputs, sizes = [], [], []
    _, requests, positions = _SOME
    starts = _size("requests") + 1
    for place, spec in enumerate(family.input_specs()):
        values = torch.empty(positions + 2 * place, *spec.shape, dtype=spec.dtype, device="meta")
        start = torch.empty(requests + 1, dtype=torch.int32, device="meta")
        names += [spec.name, f"{spec.name}.start"]
        inputs += [values, start]
        sizes += [{0: _size(f"positions_{place}")}, {0: starts}]
    return _Arguments(tuple(names), tuple(inputs), tuple(sizes), _arena(family))


def _step_arguments(family: Family, t: int) -> _Arguments:
    rows, requests, _ = _SOME
    shapes = {"codes": (rows,), "request": (rows,), "row_start": (requests + 1,), "ancestry": (rows, t - 1)}
    inputs = tuple(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes.values())
    many, starts = _size("rows"), _size("requests") + 1
    sizes = tuple({0: starts} if name == "row_start" else {0: many} for name in shapes)
    return _Arguments(tuple(shapes), inputs, sizes, _arena(family))


def _exported(name: str, module: _Encode | _Step, arguments: _Arguments) -> Function:
    dynamic = (list(arguments.sizes), dict.fromkeys(arguments.arena))
    try:
        program = torch.export.export(
            module, (list(arguments.inputs), dict(arguments.arena)), dynamic_shapes=dynamic, strict=False
        ).run_decompositions({})
    except Exception as error:  # noqa: BLE001  whatever a family's code does to torch's tracer is a fact about it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Function(name, exported=False, reason=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300])
    return _facts(name, program, arguments)


def _facts(name: str, program: ExportedProgram, arguments: _Arguments) -> Function:
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    given = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    (ours, arena), _ = pytree.tree_unflatten(given, program.call_spec.in_spec)
    state_of = {node: state for state, node in arena.items()}
    results = [spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    outputs = pytree.tree_unflatten(results, program.call_spec.out_spec)
    changed = {
        state_of[spec.target]: nodes[spec.arg.name]
        for spec in signature.output_specs
        if spec.kind is OutputKind.USER_INPUT_MUTATION and spec.target in state_of
    }
    sinks = {nodes[one]: "" for one in results} | {node: state for state, node in changed.items()}
    words = _words(arguments, [nodes[one] for one in ours])
    return Function(
        name,
        exported=True,
        inputs=tuple(_fact(n, nodes[one], words) for n, one in zip(arguments.names, ours, strict=True)),
        outputs=tuple(sorted(_fact(n, nodes[one], words) for n, one in outputs.items())),
        reads=tuple(sorted(state for state, one in arena.items() if _reaches(nodes[one], state, sinks))),
        writes=tuple(sorted(changed)),
    )


def _reaches(start: Node, state: str, sinks: Mapping[Node, str]) -> bool:
    """Whether anything but the state itself depends on what a state holds at the beginning."""
    seen, left = {start}, [start]
    while left:
        node = left.pop()
        if node in sinks and node is not start and sinks[node] != state:
            return True
        new = [user for user in node.users if user not in seen]
        seen.update(new)
        left += new
    return False


def _words(arguments: _Arguments, nodes: Sequence[Node]) -> dict[sympy.Symbol, sympy.Expr]:
    """The symbols of an export, and what they are called here."""
    words: dict[sympy.Symbol, sympy.Expr] = {}
    for name, sizes, node in zip(arguments.names, arguments.sizes, nodes, strict=True):
        for dim in sizes:
            size = node.meta["val"].shape[dim].node.expr
            word: sympy.Expr = sympy.Symbol("rows")
            if name == "row_start" or name.endswith(".start"):
                word = sympy.Symbol("requests") + 1
            elif name not in {"codes", "request", "ancestry"}:
                word = sympy.Symbol(f"positions of {name}")
            [symbol] = size.free_symbols
            words[symbol] = sympy.solve(size - word, symbol)[0]
    return words


def _fact(name: str, node: Node, words: dict[sympy.Symbol, sympy.Expr]) -> TensorFact:
    value = node.meta["val"]
    shape = tuple(size if isinstance(size, int) else str(size.node.expr.xreplace(words)) for size in value.shape)
    return TensorFact(name, str(value.dtype).removeprefix("torch."), shape)
