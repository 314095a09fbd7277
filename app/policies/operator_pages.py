"""What people read about operators, from their declarations: `widebeam policy help`, docs/policies/operators.md."""

from __future__ import annotations

from app.policies.names import FINAL_PHASES, STEP_PHASES
from app.policies.operators import OPEN, Arg, Operator, Operators

_CLASS = {
    "M": "M: who stays is a head of each row, and the best K of the row know it",
    "M*": "M*: who stays is a head of each row, and the whole row is needed to know it",
    "E": "E: needs the whole row before any cut",
}
_HEAD = """\
# Operators

What may stand under each phase, from the operators' own declarations. `widebeam policy help NAME` prints the same, and
that of operators which other packages have installed; [adding.md](../adding.md#an-operator-of-your-own) says how a
package adds one. Numbers marked with `param` may be a parameter, `param.x`, whose range lies in theirs.
"""


def describe(operator: Operator) -> str:
    """One operator for a terminal."""
    whose = f"of {operator.source}" if operator.source else "of Widebeam"
    lines = [f"{operator.signature}   (under `{operator.phase}`, {whose}, version {operator.version})", operator.about]
    lines += [f"  {arg.name}: {_range(arg)}" for arg in operator.args if arg.open]
    if operator.phase in OPEN and operator.available:
        lines.append(f"  precut class {_CLASS[operator.precut]}")
    if not operator.available:
        lines.append("  not available in this version")
    return "\n".join(lines)


def overview(operators: Operators, only: str | None = None) -> str:
    """Every operator by phase, a line each, and what cannot be used; or those of one phase, nothing where it takes
    none."""
    lines = []
    for phase in _phases():
        for one in operators.of(phase) if only in {None, phase} else ():
            whose = f"  [{one.source}]" if one.source else ""
            lines.append(f"{phase:<8} {one.signature:<36} {one.about}{whose}")
    if only is not None:
        return "\n".join(lines)
    lines += [f"{'-':<8} {name:<36} cannot be used: {why}" for name, why in sorted(operators.broken.items())]
    return "\n".join(lines)


def reference(operators: Operators) -> str:
    """The page of the documentation."""
    parts = [_HEAD]
    for phase, about in _phases().items():
        listed = [one for one in operators if one.phase == phase]
        if listed:
            parts.append(f"## {phase}\n\nThis phase {about}.\n")
            parts += [_section(one) for one in listed]
    return "\n".join(parts)


def _section(operator: Operator) -> str:
    text = f"### `{operator.signature}`\n\n{operator.about[0].upper()}{operator.about[1:]}.\n"
    if not operator.available:
        return f"{text}\nNot available in this version.\n"
    rows = [f"| `{arg.name}` | {_range(arg)} |" for arg in operator.args if arg.open]
    if rows:
        text += "\n| argument | what it takes |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    if operator.phase in OPEN:
        text += f"\nPrecut class {_CLASS[operator.precut]}.\n"
    return text


def _phases() -> dict[str, str]:
    """Phases that take operators, and what they are for; `quota` of a step also stands in `final`."""
    both = {**FINAL_PHASES, **STEP_PHASES}
    takes = [one for one in (*STEP_PHASES, *FINAL_PHASES) if both[one].form in ("operation", "operations")]
    return {name: both[name].about for name in takes}


def _range(arg: Arg) -> str:
    if arg.form == "group":
        return 'a group: `parent`, `token[i]`, `prefix[i]`, `attr.x`, `item.x`, or one of these `== "value"`'
    if arg.form == "field":
        return "a number that items have, `item.x`; may be left out"
    if arg.form == "word":
        return f"`{arg.default}`"
    kind = "a whole number" if arg.form == "int" else "a number or a `param`" if arg.param else "a number"
    default = "" if arg.default is None else f"; {float(arg.default):g} where it is not given"
    return f"{kind} from {_number(arg.low)} to {_number(arg.high)}{default}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:g}"
