"""What a deployment declares for policies to read: extra model outputs, attributes, priors, lists, request fields.

A name that is not declared is an error of the policy (T002); so is one that a step does not have yet (K007).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from app.config import RequestFields
from app.core import Contract
from app.policies.names import Dependence

Space = Literal["head", "prior", "attr", "blocked", "boosted", "user", "ctx", "item"]
Form = Literal["number", "condition", "text"]


class Column(NamedTuple):
    """A named value that the catalogue or the requests of a deployment have.

    space   attr, prior, blocked, boosted: of a prefix and a code · item: of an item · user, ctx: of a request
    form    number, condition (a flag) or text (a category; `labels` are its values, in the order of their numbers)
    first   the first step at which a prefix has it
    fixed   whether the prefix of the row alone determines it, whatever the code
    low, high  bounds of a number, where known
    aggregate  of a prefix: how it is made from the items below, "any" or another word; "" = not known
    about      what it is, for people
    """

    space: Space
    name: str
    form: Form = "number"
    first: int = 1
    fixed: bool = False
    low: float = float("-inf")
    high: float = float("inf")
    labels: tuple[str, ...] = ()
    aggregate: str = ""
    about: str = ""

    @property
    def key(self) -> str:
        """As an expression names it."""
        return f"{self.space}.{self.name}"

    @property
    def text(self) -> str:
        """What it is, in a line for people: `number 0 to 1 from step 2: share of ...`."""
        known = float("-inf") < self.low <= self.high < float("inf")
        form = {"condition": "flag", "text": f"text, {len(self.labels) or 'many'} values"}.get(self.form, "number")
        limits = f" {self.low:g} to {self.high:g}" if known else ""
        first = f" from step {self.first}" if self.first > 1 else ""
        return f"{form}{limits}{first}" + (f": {self.about}" if self.about else "")

    @property
    def dependence(self) -> Dependence:
        """How it depends on the candidate."""
        if self.space in ("user", "ctx"):
            return ""
        return "r" if self.fixed else "c"


class Catalogue(NamedTuple):
    """What is known of the catalogue: prefixes[t - 1] = distinct prefixes of depth t, and its columns."""

    prefixes: tuple[int, ...]
    columns: tuple[Column, ...] = ()


Facts = Mapping[str, Column]
"""Everything that is declared, by `space.name`."""


def facts_of(contract: Contract, catalogue: Catalogue | None) -> Facts:
    """The heads and request fields of the contract and the columns of the catalogue."""
    heads = [Column("head", one.name, fixed=one.scope == "row", about="output of the model") for one in contract.heads]
    fields = request_columns(contract.request)
    return {one.key: one for one in (*heads, *fields, *(catalogue.columns if catalogue else ()))}


def request_columns(fields: RequestFields) -> tuple[Column, ...]:
    """What a deployment declares of its requests."""
    numbers = [
        Column("user", name, low=_or(one.low, float("-inf")), high=_or(one.high, float("inf")))
        for name, one in fields.user.items()
    ]
    return (*numbers, *(Column("ctx", name, "text", labels=labels) for name, labels in fields.ctx.items()))


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
