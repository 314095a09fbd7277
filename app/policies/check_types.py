"""Types of expressions and operator calls, and how a number depends on the candidate.

A faulty part has the type None: it was reported, and nothing that holds it is reported again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from app.policies.diagnostics import Findings, Span, listing, suggest
from app.policies.expr import (
    Argument,
    Binary,
    Call,
    Compare,
    Expr,
    Field,
    Index,
    Logic,
    Name,
    Negate,
    Not,
    Number,
    OneOf,
    Operation,
    Text,
    children,
)
from app.policies.facts import Facts
from app.policies.names import (
    EVERYWHERE,
    FINAL_PHASES,
    FUNCTIONS,
    FUNCTIONS_HELP,
    NAMES,
    SPACES,
    STEP_PHASES,
    Dependence,
    Phase,
)
from app.policies.operators import Arg, Operator, Operators
from app.policies.resolve import Param, Policy, Resolved

MOST_LISTED = 12
"""Values that a message names one by one."""

Type = Literal["number", "condition", "text"] | None


def check_types(policy: Policy, facts: Facts, contract: str, found: Findings) -> None:
    """Check every phase of every step, and `final`; report unused parameters. contract: its id, for messages."""
    checker = _Checker(policy.params, facts, contract, policy.operators, found)
    for settings, phases, scope in [
        *((step, STEP_PHASES, "") for step in policy.steps),
        (policy.final, FINAL_PHASES, "final."),
    ]:
        for word, resolved in settings.items():
            if not resolved.broken and resolved.span is not None:
                checker.phase(phases[word], resolved, scope + word)
    if not any(one.broken for step in (*policy.steps, policy.final) for one in step.values()):
        _unused(policy, checker.used, found)


def _unused(policy: Policy, used: set[str], found: Findings) -> None:
    for param in policy.params.values():
        if not param.broken and param.name not in used and param.span.file == policy.file and not policy.abstract:
            hint = f"remove it, or use `param.{param.name}`"
            found.add("W004", param.span, f"param {param.name} is never used", hint)


@dataclass
class _Checker:
    params: Mapping[str, Param]
    facts: Facts
    contract: str
    operators: Operators
    found: Findings

    def __post_init__(self) -> None:
        self.used: set[str] = set()

    def phase(self, phase: Phase, resolved: Resolved, where: str) -> None:
        value = resolved.value
        if isinstance(value, Operation):
            self.operation(phase.name, value, where)
        elif isinstance(value, tuple):
            for one in value:
                self.operation(phase.name, one, where)
        elif phase.form == "field" and isinstance(value, Field):
            if value.name != "id":
                self.declared(value)
        elif phase.form in ("number", "condition") and value is not None and not isinstance(value, str | int):
            self.want(value, "condition" if phase.form == "condition" else "number", where)

    # ---- expressions -----------------------------------------------------------------------------------------------

    def want(self, node: Expr, type_: Literal["number", "condition"], phase: str) -> None:
        got = self.type(node, phase)
        if got is None or got == type_:
            return
        if got == "text":
            self.found.add("T011", node.span, "a text stands where a " + type_ + " is needed")
        elif type_ == "number":
            self.found.add(
                "T004", node.span, "a condition stands where a number is needed", "write `where(condition, a, b)`"
            )
        else:
            self.found.add("T005", node.span, "a number stands where a condition is needed", "compare it: `x > 0`")

    def type(self, node: Expr, phase: str) -> Type:  # noqa: PLR0911  one case a node type
        match node:
            case Number():
                return "number"
            case Text():
                return "text"
            case Name():
                return self.name(node, phase)
            case Field():
                return self.field(node, phase)
            case Index():
                self.found.add("T003", node.span, f"`{node.base}[...]` stands only in groups of `quota`")
                return None
            case Call():
                return self.call(node, phase)
            case Negate(value=value):
                self.want(value, "number", phase)
                return "number"
            case Binary():
                return self.binary(node, phase)
            case Compare() | OneOf():
                return self.comparison(node, phase)
            case Not(value=value):
                self.want(value, "condition", phase)
                return "condition"
            case Logic(items=items):
                for item in items:
                    self.want(item, "condition", phase)
                return "condition"

    def name(self, node: Name, phase: str) -> Type:
        known = NAMES.get(phase, {}).get(node.name)
        if known is None:
            homes = [other for other, names in NAMES.items() if node.name in names]
            if homes:
                hint = f"it exists in {listing(homes)}"
                self.found.add("T003", node.span, f"`{node.name}` does not exist in `{phase}`", hint)
            else:
                words = [*NAMES.get(phase, {}), *(f"{space}." for space in SPACES.get(phase, ()))]
                self.found.add(
                    "T001",
                    node.span,
                    f"unknown name `{node.name}`",
                    suggest(node.name, words) or f"names here: {', '.join(words)}",
                )
            return None
        return known.form

    def field(self, node: Field, phase: str) -> Type:
        here = SPACES.get(phase, frozenset()) | EVERYWHERE
        if node.space not in here:
            homes = [other for other, spaces in SPACES.items() if node.space in spaces]
            if homes:
                self.found.add(
                    "T003", node.span, f"`{node.space}` does not exist in `{phase}`", f"it exists in {listing(homes)}"
                )
            else:
                place = Span(node.span.file, node.span.line, node.span.col, node.span.col + len(node.space))
                self.found.add("T001", place, f"unknown namespace `{node.space}`", suggest(node.space, here))
            return None
        if node.space != "param":
            return self.declared(node)
        if node.name not in self.params:
            hint = suggest(node.name, self.params) or "declare it under `params:`"
            self.found.add("T001", node.name_span, f"unknown parameter `{node.name}`", hint)
            return None
        self.used.add(node.name)
        return None if self.params[node.name].broken else "number"

    def declared(self, node: Field) -> Type:
        """The type of a name that the deployment declares."""
        column = self.facts.get(f"{node.space}.{node.name}")
        if column is not None:
            return column.form
        known = [one.name for one in self.facts.values() if one.space == node.space]
        owner = f"the active contract {self.contract}" if node.space == "head" else "this deployment"
        hint = suggest(node.name, known) or (f"declared: {listing(sorted(known))}" if known else "")
        self.found.add("T002", node.name_span, f"{node.space} has no `{node.name}` in {owner}", hint)
        return None

    def call(self, node: Call, phase: str) -> Type:
        function = FUNCTIONS.get(node.function)
        if function is None:
            hint = suggest(node.function, FUNCTIONS) or FUNCTIONS_HELP
            self.found.add("T007", node.name_span, f"unknown function `{node.function}`", hint)
            return None
        count = len(node.args)
        if count < function.least or (function.most is not None and count > function.most):
            wanted = f"{function.least}" if function.most is not None else f"{function.least} or more"
            self.found.add(
                "T006", node.span, f"`{node.function}` takes {wanted} arguments, not {count}", function.about
            )
            return None
        for at, arg in enumerate(node.args):
            self.want(arg, "condition" if node.function == "where" and at == 0 else "number", phase)
        return "number"

    def binary(self, node: Binary, phase: str) -> Type:
        self.want(node.left, "number", phase)
        self.want(node.right, "number", phase)
        if node.op == "**" and constant(node.right) is None:
            self.found.add("T009", node.right.span, "the exponent is not a constant", "write a number, like `x ** 2`")
        low, high = bounds(node.right, self.params)
        if node.op == "/" and low <= 0.0 <= high and low > float("-inf"):
            zero = low == high == 0.0
            what = "zero" if zero else f"a value whose range {low:g} to {high:g} holds zero"
            hint = "" if zero else "give the parameter a range without zero"
            self.found.add("T008", node.right.span, f"division by {what}", hint)
        return "number"

    def comparison(self, node: Compare | OneOf, phase: str) -> Type:
        left = self.type(node.left, phase)
        right = self.type(node.right, phase) if isinstance(node, Compare) else "text"
        sides = [(node.left, left), *([(node.right, right)] if isinstance(node, Compare) else [])]
        for side, type_ in sides:
            if type_ == "condition":
                hint = "join conditions with and, or, not"
                self.found.add("T004", side.span, "a condition stands where a number is needed", hint)
        texts = [isinstance(side, Text) for side, _ in sides]
        wrong = {left, right} == {"text", "number"} or (left == right == "text" and sum(texts) == len(texts) == 2)
        if wrong or (left == right == "text" and not isinstance(node.left, Field)):
            place = next((side for side, type_ in sides if isinstance(side, Text)), node.left)
            self.found.add("T011", place.span, "a text is compared only with a field that is text")
        elif left == right == "text" and isinstance(node, Compare) and not isinstance(node.right, Text):
            self.found.add(
                "T011", node.right.span, "two fields are compared", "a field is compared with a text in quotes"
            )
        elif left == right == "text" and isinstance(node, Compare) and node.op not in ("==", "!="):
            self.found.add("T011", node.span, f"texts are not compared with `{node.op}`", "use ==, != or in")
        elif isinstance(node, OneOf):
            for value in node.values:
                self.label(node.left, value, node.span)
        elif isinstance(node.right, Text):
            self.label(node.left, node.right.value, node.right.span)
        return "condition"

    def label(self, field: Expr, value: str, span: Span) -> None:
        """A category has only its declared values."""
        column = self.facts.get(f"{field.space}.{field.name}") if isinstance(field, Field) else None
        if column is None or column.form != "text" or value in column.labels:
            return
        if column.space == "ctx" and not column.labels:
            return  # any text
        if column.labels:
            few = f"values: {listing(column.labels)}" if len(column.labels) <= MOST_LISTED else ""
            message = f"{column.key} has no value `{value}` in this deployment"
            hint = suggest(value, column.labels) or few
        else:
            message, hint = f"{column.key} has too many values to be compared with one", "it can be a group of `quota`"
        self.found.add("T002", span, message, hint)

    # ---- operators -------------------------------------------------------------------------------------------------

    def operation(self, phase: str, call: Operation, where: str) -> None:
        operator = self.operators.get(call.op)
        if operator is None and call.op in self.operators.broken:
            why = f"`{call.op}` cannot be used: {self.operators.broken[call.op]}"
            self.found.add("P004", call.name_span, why, "mend or update that package, or take the operator out")
        elif operator is None:
            here = [one.name for one in self.operators if one.phase == phase]
            hint = suggest(call.op, self.operators.known) or f"operators of `{phase}`: {', '.join(here)}"
            self.found.add("P001", call.name_span, f"unknown operator `{call.op}`", hint)
        elif operator.phase != phase:
            hint = f"`{call.op}` belongs under `{operator.phase}:`"
            self.found.add("P002", call.name_span, f"`{call.op}` is not a `{phase}` operator", hint)
        elif not operator.available:
            self.found.add("P003", call.name_span, f"`{call.op}` is not available in this version")
        else:
            self.arguments(operator, call, where)

    def arguments(self, operator: Operator, call: Operation, where: str) -> None:
        bound, faults = bind(operator, call)
        for span, message in faults:
            args = ", ".join(arg.name for arg in operator.args) or "none"
            self.found.add("T012", span, message, f"arguments of `{operator.name}`: {args}")
        for arg in operator.args:
            if arg.name in bound:
                self.argument(operator, arg, bound[arg.name], where)

    def argument(self, operator: Operator, arg: Arg, given: Argument, where: str) -> None:
        node, name = given.value, f"`{arg.name}` of `{operator.name}`"
        if arg.form == "field":
            self.item_number(node, name)
        elif arg.form == "word":
            if not (isinstance(node, Name) and node.name == arg.default):
                self.found.add("T013", node.span, f"{name} is `{arg.default}`")
        elif arg.form == "group":
            self.group(node, where)
        elif arg.param and isinstance(node, Field) and node.space == "param":
            self.param_argument(node, arg, name)
        else:
            self.number_argument(node, arg, name)

    def item_number(self, node: Expr, name: str) -> None:
        """A number of the items, whatever orders by it."""
        form = self.declared(node) if isinstance(node, Field) and node.space == "item" and node.name != "id" else "text"
        if form not in ("number", None):
            self.found.add("T013", node.span, f"{name} is a number of the items", "such as `item.quality`")

    def number_argument(self, node: Expr, arg: Arg, name: str) -> None:
        value = constant(node)
        if value is None or (arg.form == "int" and value != int(value)):
            what = "a whole number" if arg.form == "int" else "a number or a parameter" if arg.param else "a number"
            self.found.add("T013", node.span, f"{name} is {what}")
        elif arg.low == arg.high != value:
            self.found.add("P003", node.span, f"{name} other than {arg.low:g} is not available in this version")
        elif not arg.low <= value <= arg.high:
            self.found.add("T013", node.span, f"{name} is {value:g}; allowed is {arg.low:g} to {arg.high:g}")

    def param_argument(self, node: Field, arg: Arg, name: str) -> None:
        if self.field(node, "rank") is None:
            return
        param = self.params[node.name]
        if not arg.low <= param.low <= param.high <= arg.high:
            message = f"{name} may be {param.low:g} to {param.high:g}; allowed is {arg.low:g} to {arg.high:g}"
            self.found.add("T013", node.span, message, "narrow the range of the parameter")

    def group(self, node: Expr, where: str) -> None:
        """`parent`, `token[i]`, `prefix[i]`, a field, or a field compared with one of its values."""
        final = where.startswith("final.")
        spaces = ("item",) if final else ("attr", "boosted")
        match node:
            case Name(name="parent") if not final:
                return
            case Index(base="token" | "prefix") if not final:
                return
            case Field(space=found) if found in spaces:
                if self.declared(node) == "number":
                    self.found.add("T013", node.span, "a group needs a flag or a category, not a number")
            case Compare(op="==", left=Field(space=found) as field, right=Text(value=value) as text) if found in spaces:
                if self.declared(field) not in ("text", None):
                    self.found.add("T011", text.span, "a text is compared only with a field that is text")
                self.label(field, value, text.span)
            case _:
                shapes = '`item.x` or `item.x == "value"`' if final else "`parent`, `token[1]`, `prefix[1]`, `attr.x`"
                self.found.add("T013", node.span, "this is no group", f"groups: {shapes}")


def bind(operator: Operator, call: Operation) -> tuple[dict[str, Argument], list[tuple[Span, str]]]:
    """Arguments by name, and what is wrong with them."""
    names = [arg.name for arg in operator.args]
    bound: dict[str, Argument] = {}
    faults: list[tuple[Span, str]] = []
    for at, given in enumerate(call.args):
        name = given.name if given.name is not None else (names[at] if at < len(names) else None)
        if name is None:
            faults.append((given.span, f"`{operator.name}` takes {len(names)} arguments"))
        elif name not in names:
            faults.append((given.span, f"`{operator.name}` has no argument `{name}`"))
        elif name in bound:
            faults.append((given.span, f"`{name}` is given twice"))
        else:
            bound[name] = given
    missing = [arg.name for arg in operator.args if arg.default is None and arg.name not in bound]
    if missing and not faults:
        faults.append((call.name_span, f"`{operator.name}` needs {listing(missing)}"))
    return bound, faults


def constant(node: Expr) -> float | None:
    """The value of a plain number, with or without a minus."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Negate) and isinstance(node.value, Number):
        return -node.value.value
    return None


def bounds(node: Expr, params: Mapping[str, Param]) -> tuple[float, float]:  # noqa: PLR0911  one case a node type
    """Lowest and highest value of a number that does not depend on the candidate; infinite where unknown."""
    wide = (float("-inf"), float("inf"))
    match node:
        case Number(value=value):
            return value, value
        case Field(space="param", name=name) if name in params and not params[name].broken:
            return params[name].low, params[name].high
        case Negate(value=value):
            low, high = bounds(value, params)
            return -high, -low
        case Binary(op=op, left=left, right=right) if op in ("+", "-", "*"):
            (a, b), (c, d) = bounds(left, params), bounds(right, params)
            if wide in ((a, b), (c, d)):
                return wide
            if op == "*":
                ends = [a * c, a * d, b * c, b * d]
                return min(ends), max(ends)
            return (a + c, b + d) if op == "+" else (a - d, b - c)
    return wide


def dependence(  # noqa: PLR0911  one case a node type
    node: Expr, phase: str, params: Mapping[str, Param], facts: Facts, score: Dependence = "c"
) -> Dependence:
    """How a number of `phase` depends on the candidate; `score` is the dependence of the score expression."""

    def of(part: Expr) -> Dependence:
        return dependence(part, phase, params, facts, score)

    match node:
        case Name(name="score"):
            return score
        case Name(name=name):
            return NAMES[phase][name].dependence
        case Number() | Text() | Field(space="param"):
            return ""
        case Field(space=space, name=name):
            return facts[f"{space}.{name}"].dependence
        case Binary(op="+", left=left, right=right):
            return _sum(of(left), of(right))
        case Binary(op="-", left=left, right=right):
            a, b = of(left), of(right)
            return _sum(a, b) if b in ("", "r") else "c"
        case Binary(op="*", left=left, right=right):
            a, b = of(left), of(right)
            if b == "L" and not a:
                return "L" if bounds(left, params)[0] > 0 else "c"
            if a == "L" and not b:
                return "L" if bounds(right, params)[0] > 0 else "c"
            return _flat(a, b)
        case Binary(op="/", left=left, right=right):
            a, b = of(left), of(right)
            if a == "L" and not b:
                return "L" if bounds(right, params)[0] > 0 else "c"
            return _flat(a, b)
    parts = [of(part) for part in children(node)]
    return "c" if any(part in ("L", "c") for part in parts) else "r" if "r" in parts else ""


def _sum(a: Dependence, b: Dependence) -> Dependence:
    """L + L stays a positive multiple of the logit plus a row constant."""
    if "c" in (a, b):
        return "c"
    return "L" if "L" in (a, b) else "r" if "r" in (a, b) else ""


def _flat(a: Dependence, b: Dependence) -> Dependence:
    return "c" if a in ("L", "c") or b in ("L", "c") else "r" if "r" in (a, b) else ""
