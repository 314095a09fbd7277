"""How an operator of the language is declared, built in or from another package, and the registry of those in force.

An operator's `version` is part of the id of every policy that uses it: a change of its meaning changes those ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

ArgForm = Literal["int", "number", "group", "field", "word"]
Precut = Literal["M", "M*", "E"]
OPEN = ("keep", "prune")
"""Phases whose operators are functions of a table, which other packages may add to."""


class Arg(NamedTuple):
    """An argument. Numbers lie in low..high; without a default it must be given. `param`: may be `param.x`."""

    name: str
    form: ArgForm
    low: float = 0.0
    high: float = 0.0
    default: float | str | None = None
    param: bool = False

    @property
    def open(self) -> bool:
        """Whether there is anything to choose: a number that can only have one value is not shown to anybody."""
        return not (self.form == "number" and self.low == self.high)

    @property
    def text(self) -> str:
        """As a policy writes it, with its default where it has one."""
        if self.form == "field":
            return f"{self.name}=item.x"
        shown = f"{self.default:g}" if isinstance(self.default, int | float) else self.default
        return self.name if shown is None else f"{self.name}={shown}"


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: the phase where it stands, what it takes, what it means and how it is computed.

    torch      of a phase in `OPEN`: who stays, [n, F] bool, on the device of its tensors, without a loop over rows.
               Each argument comes as [n, 1] or [1, 1] float32, in the order of `args`.
               keep: `(logp [n, F] float32, valid [n, F] bool, *args)`, for rows whose codes ascend; what is not valid
               has an arbitrary logp. prune: `(rank [n, F] float32, field, *args)`, -inf = out already, for the rows of
               several requests, which `field` (policies/choose.py) tells apart.
               Who was out stays out whatever is returned; of who was in, at least one must stay
    reference  the definition in NumPy, for one row or one request, with arguments as floats; loops are welcome.
               keep: `(logp [m] float32, *args) -> [m] bool`, the valid candidates of a row, best first, ties by code.
               prune: `(rank [W, F] float32, *args) -> [W, F] bool`, -inf = out
    precut     what cutting each row to its best K does to it (policy-language 2.3). M: nothing, who stays is a head of
               the order and the best K know it. M*: who stays is a head of the order, and the whole row is needed to
               know it. E: anything else
    available  compiled in this version; source: the distribution that it is from, "" = Widebeam
    """

    name: str
    phase: str
    args: tuple[Arg, ...]
    about: str
    version: int = 1
    torch: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    precut: Precut = "E"
    available: bool = True
    source: str = ""

    @property
    def tag(self) -> int | str:
        """What stands for it in the id of a policy: its version, with whose it is."""
        return f"{self.source}/{self.version}" if self.source else self.version

    @property
    def signature(self) -> str:
        """As a policy writes it: `gap(drop)`, `mmr(weight=0.7, pool=200, by=prefix)`."""
        return f"{self.name}({', '.join(one.text for one in self.args if one.open)})"


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators in force. broken: names that a package offers and that cannot be used, and why."""

    known: Mapping[str, Operator]
    broken: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Operator:
        return self.known[name]

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.known.values())

    def get(self, name: str) -> Operator | None:
        """An operator by name."""
        return self.known.get(name)

    def of(self, phase: str) -> tuple[Operator, ...]:
        """The operators of a phase that are compiled."""
        return tuple(one for one in self if one.phase == phase and one.available)
