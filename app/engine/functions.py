"""What an exported function of a family takes, gives, reads and writes; whether that is what the family declares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from app.engine.families.base import Family
from app.errors import Rejected


class TensorFact(msgspec.Struct, frozen=True, order=True):
    """One named input or output. Sizes are numbers, or words: rows, requests, positions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Function(msgspec.Struct, frozen=True):
    """One exported function.

    name      "encode" or "step t"
    exported  False: torch.export cannot follow it, `reason` says why; then only what the family declares is known
    inputs    what the runtime gives · outputs: logits, log_norm and heads; none where `encode` has no output
    reads, writes   carried state that the outputs depend on, and that it changes
    """

    name: str
    exported: bool
    reason: str | None = None
    inputs: tuple[TensorFact, ...] = ()
    outputs: tuple[TensorFact, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


class Link(msgspec.Struct, frozen=True):
    """Carried state: what `source` writes is what `target` reads."""

    state: str
    source: str
    target: str


def links(functions: Iterable[Function]) -> tuple[Link, ...]:
    """The output-to-input links of carried state, in the order of the functions."""
    known = tuple(functions)
    return tuple(
        Link(state, one.name, later.name)
        for place, one in enumerate(known)
        for state in one.writes
        for later in known[place + 1 :]
        if state in later.reads
    )


def check_stored(family: Family, functions: Sequence[Function], sizes: Sequence[int]) -> None:
    """Raise Rejected("bad_family") where functions that a file names cannot be this family's: others than `encode` and
    a step each (from the second on, where `encode` gives the first one's output), or others' state. So whoever goes
    through them has no more to do than the family makes."""
    called, whole = [one.name for one in functions], ["encode", *(f"step {t}" for t in range(1, len(sizes) + 1))]
    given = bool(functions) and (bool(functions[0].outputs) or not functions[0].exported)
    if called != whole and not (given and called == [whole[0], *whole[2:]]):
        raise Rejected("bad_family", f"has other functions than encode and {len(sizes)} steps")
    declared = {spec.name for spec in family.state_specs()}
    for function in functions:
        for names in (function.reads, function.writes):
            if len(set(names)) < len(names) or not declared.issuperset(names):
                raise _bad(family, function, "names state that the family does not declare, or names it twice")
    check_functions(family, functions, sizes)


def check_functions(family: Family, functions: Sequence[Function], sizes: Sequence[int]) -> None:
    """Raise Rejected("bad_family") where exported functions contradict what the family declares."""
    for function in functions:
        if not function.exported:
            continue
        step = int(function.name.removeprefix("step ")) if function.name != "encode" else 1
        rows = "requests" if function.name == "encode" else "rows"
        if function.name == "encode" and not function.outputs:
            continue
        found = {one.name: one for one in function.outputs}
        wanted: dict[str, tuple[int | str, ...]] = {"logits": (rows, sizes[step - 1])}
        if family.log_norm:
            wanted["log_norm"] = (rows,)
        for head in family.head_specs():
            wanted[f"head.{head.name}"] = (rows,) if head.scope == "row" else (rows, sizes[step - 1])
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                raise _bad(family, function, f"gives no `{name}`, which the family declares")
            if name not in wanted:
                raise _bad(family, function, f"gives `{name}`, which the family does not declare")
            if found[name].shape != wanted[name]:
                raise _bad(family, function, f"`{name}` is {list(found[name].shape)}, expected {list(wanted[name])}")
            if not found[name].dtype.startswith(("float", "bfloat")):
                raise _bad(family, function, f"`{name}` is {found[name].dtype}, no float")
    _check_carried(family, functions)


def _check_carried(family: Family, functions: Sequence[Function]) -> None:
    """What is read of a request must have been written before; only where every function could be followed.

    Row slots are not looked at: an operator takes them whole, and finds in the ancestry that there is nothing to read.
    """
    if not all(function.exported for function in functions):
        return
    written = {spec.name for spec in family.state_specs() if spec.scope == "row"}
    for function in functions:
        written |= set(function.writes)
        for state in function.reads:
            if state not in written:
                raise _bad(family, function, f"reads the state `{state}`, which nothing has written before")


def _bad(family: Family, function: Function, message: str) -> Rejected:
    return Rejected("bad_family", message, location=f"{type(family).__name__}, {function.name}")
