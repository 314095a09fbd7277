"""What torch's tracers make of a function that calls registered operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

GRAPHS = ("test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = ("test_schema", *GRAPHS)


def check(name: str, *arguments: Any, checks: Sequence[str] = CHECKS) -> None:
    """torch's own checks of `torch.ops.widebeam.<name>`: what it changes and shares is what it says, its shapes without
    data are those that come, and a functional graph of it with dynamic sizes computes the same."""
    torch.library.opcheck(getattr(torch.ops.widebeam, name).default, arguments, test_utils=tuple(checks))


class _Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def exported(
    function: Callable[..., Any], arguments: Sequence[Any], dynamic: Sequence[Any], expected: Callable[..., Any]
) -> list[str]:
    """Our operators in an export of the function, which gives and changes what `expected` does.
    dynamic: of each argument, as torch.export takes it"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own export, about itself
        program = torch.export.export(
            _Called(function), tuple(arguments), dynamic_shapes=(tuple(dynamic),), strict=False
        )
        lowered = program.run_decompositions({})
    for one in (program, lowered):
        same(one.module(), expected, arguments)
    return ours(program.graph)


def compiled(function: Callable[..., Any], arguments: Sequence[Any], expected: Callable[..., Any]) -> list[str]:
    """Our operators in the one graph that torch.compile makes of the function, which gives and changes the same."""
    found: list[str] = []

    def keep(module: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        found.extend(ours(module.graph))
        return module.forward

    torch.compiler.reset()
    same(torch.compile(function, backend=keep, fullgraph=True), expected, arguments)
    same(torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True), expected, arguments)
    return found


def same(one: Callable[..., Any], other: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Both give the same, bit by bit, and leave their arguments so."""
    mine, theirs = (pytree.tree_map_only(Tensor, torch.clone, list(arguments)) for _ in range(2))
    results = one(*mine), other(*theirs)
    for a, b in zip(*(pytree.tree_leaves((each, left)) for each, left in zip(results, (mine, theirs), strict=True)),
                    strict=True):  # fmt: skip
        if isinstance(a, Tensor):
            torch.testing.assert_close(_bits(a), _bits(b), rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


def ours(graph: torch.fx.Graph) -> list[str]:
    """The names of our operators in a graph, in their order."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in called if name.startswith("widebeam.")]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
