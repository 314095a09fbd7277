"""The JSON Schema of a policy file, from the language's own tables: completion and hover text in editors."""

from __future__ import annotations

from collections.abc import Mapping

from app.policies.builtin import BUILT_IN
from app.policies.facts import Facts
from app.policies.names import FINAL_PHASES, NORMALIZE, OWN_LEVELS, SPACES, STEP_PHASES, Phase
from app.policies.operators import Operators
from app.policies.read import MAX_LINES, MAX_PARAMS
from app.policies.values import LANGUAGE

Schema = dict[str, object]


def schema(operators: Operators = BUILT_IN, facts: Facts | None = None) -> Schema:
    """Keys, forms and ranges; expressions are strings to it. facts: what a deployment declares, for the hover text."""
    declared = facts or {}
    text: Schema = {"type": "string"}
    step = {"type": "object", "additionalProperties": False, "properties": _phases(STEP_PHASES, operators, declared)}
    widths: Schema = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
    own: Schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["widths"],
        "properties": {"widths": widths},
    }
    level: Schema = {"anyOf": [own, {"const": "none"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Widebeam selection policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["widebeam"],
        "properties": {
            "widebeam": {"const": LANGUAGE, "description": "version of the language"},
            "about": {**text, "description": "what the policy is for"},
            "owner": {**text, "description": "who answers for it"},
            "extends": {**text, "description": "the policy that this one overrides, phase by phase"},
            "abstract": {"type": "boolean", "description": "only to be extended, never served"},
            "params": {
                "type": "object",
                "maxProperties": MAX_PARAMS,
                "description": "numbers that can change without a new structure",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "value": {"type": "number"},
                        "range": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                        "about": text,
                    },
                },
            },
            "widths": {**widths, "description": "survivors after each step; the contract's where it is not given"},
            "load": {
                "type": "object",
                "additionalProperties": False,
                "properties": dict.fromkeys(OWN_LEVELS, level),
                "description": "widths while the server is busy or quiet; `none` takes back what is inherited",
            },
            "underfill": {"enum": ["allow", "error"], "description": "whether a list shorter than asked is an answer"},
            "steps": {
                "type": "object",
                "additionalProperties": False,
                "patternProperties": {"^(all|first|last|[1-9][0-9]?)$": step},
                "description": "phases by step; a number wins over first and last, these over all",
            },
            "final": {
                "description": "what becomes of the survivors of the last step: items, and their list",
                "type": "object",
                "additionalProperties": False,
                "properties": _phases(FINAL_PHASES, operators, declared, "final."),
            },
        },
    }


def _phases(phases: Mapping[str, Phase], operators: Operators, facts: Facts, scope: str = "") -> Schema:
    def readable(phase: Phase) -> str:
        spaces = SPACES.get(scope + phase.name) or ({"item"} if scope else {"attr", "boosted"})
        names = [f"{key} ({one.text})" for key, one in sorted(facts.items()) if one.space in spaces]
        takes = phase.form in ("number", "condition", "field") or phase.name in ("quota", "expand")
        return f". Declared: {'; '.join(names)}" if takes and names else ""

    return {one.name: _phase(one, operators, readable(one)) for one in phases.values() if one.available}


def _phase(phase: Phase, known: Operators, declared: str) -> Schema:
    about = phase.about + (f" (default: {phase.default})" if phase.default else "")
    operators = "; ".join(f"{one.signature}: {one.about}" for one in known.of(phase.name))
    description = (f"{about}. {operators}" if operators else about) + declared
    if phase.form == "choice":
        return {"enum": list(NORMALIZE), "description": description}
    if phase.form == "count":
        return {"type": "integer", "minimum": 1, "description": description}
    if phase.form == "operations":
        lines = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_LINES[phase.name]}
        return {"anyOf": [lines, {"const": "none"}], "description": description}
    return {"type": "string", "description": description}
