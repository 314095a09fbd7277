"""Content ids: of a resolved policy, of its structure, of the plan on a contract (policy-language 2.5 and 3.7).

Comments, spacing, file names and overrides that change nothing keep the id; a changed meaning of an operator, or of
the language, changes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from app.policies.expr import Field, Operation, number_text, walk
from app.policies.names import FINAL_PHASES, STEP_PHASES
from app.policies.read import Content
from app.policies.resolve import Policy, Resolved, content_text
from app.policies.values import LANGUAGE

COMPILER = 1
"""Raised when the same structure would be lowered to other arithmetic."""

Json = Mapping[str, object]


def resolved_data(policy: Policy) -> dict[str, object]:
    """The resolved policy as canonical JSON-ready data: everything that changes an answer, and nothing else."""
    used = sorted({one.op for settings in (*policy.steps, policy.final) for one in _operations(settings)})
    return {
        "widebeam": LANGUAGE,
        "operators": {name: policy.operators[name].tag for name in used},
        "params": {
            name: {"value": number_text(one.value), "range": [number_text(one.low), number_text(one.high)]}
            for name, one in sorted(policy.params.items())
        },
        "widths": [one.value for one in policy.widths.value] if policy.widths else None,
        **({"load": _load(policy)} if policy.load else {}),
        "underfill": policy.underfill,
        "steps": [{word: content_text(step[word].value) for word in STEP_PHASES} for step in policy.steps],
        "final": {word: content_text(policy.final[word].value) for word in FINAL_PHASES},
    }


def _load(policy: Policy) -> dict[str, object]:
    """Only there where a policy has levels: the others keep the ids that they had before there were any."""
    return {level: [one.value for one in given.value] for level, given in sorted(policy.load.items())}


def policy_id(resolved: Json) -> str:
    """12 hex digits."""
    return _digest("widebeam-policy/1", resolved)


def structure_id(resolved: Json, params: Sequence[str], precut: Sequence[str]) -> str:
    """The id of the steps with parameters and widths left open. params: the table that the steps read, in its order;
    precut: the class of each step."""
    parts = {"operators": resolved["operators"], "steps": resolved["steps"], "params": [*params], "precut": [*precut]}
    return _digest("widebeam-structure/1", parts)


def plan_id(structure: str, contract: str) -> str:
    """The id of a structure on a contract."""
    return _digest("widebeam-plan/1", {"structure": structure, "contract": contract, "compiler": COMPILER})


def params_in(values: Sequence[Content]) -> tuple[str, ...]:
    """Parameters that phases read, sorted: the order of a structure's parameter table."""
    found: set[str] = set()
    for value in values:
        operations = (value,) if isinstance(value, Operation) else value if isinstance(value, tuple) else ()
        nodes = [arg.value for one in operations for arg in one.args]
        if not operations and value is not None and not isinstance(value, str | int | tuple | Operation):
            nodes = [value]
        for node in nodes:
            found |= {part.name for part in walk(node) if isinstance(part, Field) and part.space == "param"}
    return tuple(sorted(found))


def _operations(settings: Mapping[str, Resolved]) -> list[Operation]:
    out: list[Operation] = []
    for resolved in settings.values():
        if isinstance(resolved.value, Operation):
            out.append(resolved.value)
        elif isinstance(resolved.value, tuple):
            out.extend(resolved.value)
    return out


def _digest(kind: str, data: Json) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()[:12]
