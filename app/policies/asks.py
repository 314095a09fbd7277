"""What a policy reads of a request's own fields: numbers of `user`, and conditions on the texts of `ctx`."""

from __future__ import annotations

from collections.abc import Iterator

from app.policies.expr import Compare, Expr, Field, OneOf, Operation, Text, show, walk
from app.policies.plan import Asks, Condition
from app.policies.read import Content
from app.policies.resolve import Policy


def asks_of(policy: Policy) -> Asks:
    """The fields that steps and `final` of a checked policy read."""
    user: set[str] = set()
    ctx: dict[str, Condition] = {}
    for settings in (*policy.steps, policy.final):
        for resolved in settings.values():
            for part in _parts(resolved.value):
                if isinstance(part, Field) and part.space == "user":
                    user.add(part.name)
                elif isinstance(part, Compare | OneOf) and (condition := condition_of(part)) is not None:
                    ctx[show(part)] = condition
    return Asks(tuple(sorted(user)), ctx)


def condition_of(node: Compare | OneOf) -> Condition | None:
    """A comparison with a text of the request; None for any other."""
    if not (isinstance(node.left, Field) and node.left.space == "ctx"):
        return None
    if isinstance(node, OneOf):
        return Condition(node.left.name, frozenset(node.values), different=False)
    if not isinstance(node.right, Text):
        return None
    return Condition(node.left.name, frozenset({node.right.value}), different=node.op == "!=")


def _parts(value: Content) -> Iterator[Expr]:
    """Every node of what a phase holds."""
    calls = (value,) if isinstance(value, Operation) else value if isinstance(value, tuple) else ()
    for call in calls:
        for given in call.args:
            yield from walk(given.value)
    if not calls and value is not None and not isinstance(value, str | int | tuple | Operation):
        yield from walk(value)
