"""Operators of other packages: read from entry points once, when a program is composed.

A package offers an operator as `name = "module:OPERATOR"` under `widebeam.policy_operators`, with an
`app.policies.operators.Operator` behind it. One that cannot be used is remembered with the reason: policies that name
it get P004, everything else goes on.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from app.policies.builtin import BUILT_IN
from app.policies.names import FUNCTIONS
from app.policies.operators import OPEN, Arg, Operator, Operators

GROUP: Final = "widebeam.policy_operators"
MAX_ARGS: Final = 8
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


def installed() -> Operators:
    """The operators of Widebeam and those that the installed packages offer. Never raises for what a package does."""
    return read(entry_points(group=GROUP))


def read(offers: Iterable[EntryPoint]) -> Operators:
    """The operators of Widebeam and those behind entry points; what cannot be used is in `broken`, with the reason."""
    by_name: dict[str, list[EntryPoint]] = {}
    for one in offers:
        by_name.setdefault(one.name, []).append(one)
    known, broken = dict(BUILT_IN.known), dict[str, str]()
    for name, given in sorted(by_name.items()):
        owners = " and ".join(sorted(_owner(one) for one in given))
        if name in BUILT_IN.known or name in FUNCTIONS:
            broken[name] = f"{owners} gives it the name of what Widebeam has itself"
        elif len(given) > 1:
            broken[name] = f"{owners} offer it both"
        else:
            found = _load(given[0])
            if isinstance(found, Operator):
                known[name] = found
            else:
                broken[name] = f"{owners} {found}"
    return Operators(known, broken)


def _owner(offer: EntryPoint) -> str:
    """The distribution, with its version."""
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist else offer.value


def _load(offer: EntryPoint) -> Operator | str:
    """An operator, or what is wrong with it."""
    try:
        operator = offer.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever another package does when it is imported
        return f"fails when it is imported: {type(error).__name__}: {error}"
    if not isinstance(operator, Operator):
        return f"has no Operator at `{offer.value}`, but a {type(operator).__name__}"
    if operator.name != offer.name:
        return f"offers it under the name `{offer.name}`, and it calls itself `{operator.name}`"
    try:
        wrong = fault(operator)
    except Exception as error:  # noqa: BLE001  of a wrong form, so that not even the checks can read it
        wrong = f"{type(error).__name__}: {error}"
    source = offer.dist.name if offer.dist else offer.value
    return replace(operator, source=source) if wrong is None else f"declares it wrongly: {wrong}"


def fault(operator: Operator) -> str | None:
    """What is wrong with the declaration of an operator of another package; None = nothing."""
    given: Mapping[str, object] = {one.name: getattr(operator, one.name) for one in fields(operator)}
    name, phase, about, version = (given[key] for key in ("name", "phase", "about", "version"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"`name` is {name!r}; names are a-z, 0-9 and _, a letter first"
    if phase not in OPEN:
        return f"`phase` is {phase!r}; other packages may add to {', '.join(OPEN)}"
    if not isinstance(about, str) or not about.strip() or "\n" in about:
        return "`about` is no line of text"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return f"`version` is {version!r}, not a whole number from 1 on"
    if given["precut"] not in ("M", "M*", "E"):
        return f"`precut` is {given['precut']!r}; it is M, M* or E"
    return _args_fault(given["args"]) or _call_fault(operator)


def _args_fault(args: object) -> str | None:
    if not isinstance(args, tuple) or not all(isinstance(one, Arg) for one in args) or len(args) > MAX_ARGS:
        return f"`args` is no tuple of at most {MAX_ARGS} Arg"
    names = [one.name for one in args]
    if len(set(names)) < len(names):
        return "two arguments have one name"
    optional = [one.default is not None for one in args]
    if optional != sorted(optional):
        return "an argument without a default follows one with a default"
    return next((wrong for one in args if (wrong := _arg_fault(one))), None)


def _arg_fault(arg: Arg) -> str | None:
    name: object = arg.name
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"an argument is called {name!r}; names are a-z, 0-9 and _, a letter first"
    if arg.form not in ("int", "number"):
        return f"argument `{name}` is of the form {arg.form!r}; it is int or number"
    given: list[object] = [arg.low, arg.high, *([] if arg.default is None else [arg.default])]
    numbers = [float(one) for one in given if isinstance(one, int | float) and math.isfinite(one)]
    if len(numbers) < len(given):
        return f"argument `{name}` has a bound or a default that is no finite number"
    low, high, *default = numbers
    if low >= high or not all(low <= one <= high for one in default):
        return f"argument `{name}` has no range, or a default outside of it"
    if arg.form == "int" and any(one != int(one) for one in (low, high, *default)):
        return f"argument `{name}` is a whole number, and its bounds or its default are not"
    return None


def _call_fault(operator: Operator) -> str | None:
    """Whether both functions can be called with what they are given."""
    for word, function, least in (("torch", operator.torch, 2), ("reference", operator.reference, 1)):
        if not callable(function):
            return f"`{word}` is no function"
        try:
            inspect.signature(function).bind(*[None] * (least + len(operator.args)))
        except TypeError:
            return f"`{word}` cannot be called with {least + len(operator.args)} arguments"
        except ValueError:  # a function without a signature: the self-check will call it
            continue
    return None
