"""What a plan does, step by step, and where each value came from: text for people, data for machines."""

from __future__ import annotations

from collections.abc import Mapping

from app.core import Contract
from app.policies.check_contract import Catalogue, planned, trie_prefixes
from app.policies.facts import facts_of
from app.policies.names import FINAL_PHASES, STEP_PHASES, Phase
from app.policies.plan import Plan, StepProgram
from app.policies.read import Widths
from app.policies.resolve import Policy, Resolved, content_text

_LOGITS = "from the logits, in one read of them on a GPU"
_GENERATED = "by its expressions inside the kernels on a GPU, from the logits; from computed ranks elsewhere"
_PRECUT = {
    "R": "R: the rank is constant in a row",
    "L": "L: the rank follows the logit",
    "M": "M: the rank keeps the order of a row",
    "E": "E: the rank rewrites each candidate",
}

_LOGIT = {"float32": 4}
_SURVIVOR = 20
"""Bytes: of a logit in another precision than 2, and of a survivor (parent, code, order, node, score)."""


def explain(policy: Policy, plan: Plan, contract: Contract, catalogue: Catalogue | None = None) -> dict[str, object]:
    """The plan as JSON-ready data: ids, widths, parameters, and for each step its shapes and phases with origins."""
    prefixes = trie_prefixes(policy, catalogue)
    rows = planned(plan.widths, contract.sizes, prefixes)
    steps = [
        {"step": shape.t, "rows": before, "codes": shape.codes, "width": plan.widths[shape.t - 1], "planned": after}
        | _step(phases, program, _bytes(contract, before, shape.codes, after))
        for shape, before, after, phases, program in zip(
            contract.steps, (1, *rows), rows, policy.steps, plan.structure.steps, strict=False
        )
    ]
    return {
        "policy": plan.policy,
        "policy_id": plan.policy_id,
        "structure_id": plan.structure.id,
        "plan_id": plan.plan_id,
        "contract": contract.id,
        "extends": list(policy.chain[1:]),
        "widths": {"value": list(plan.widths), "from": _place(policy.widths)},
        "load": {
            level: {
                "widths": list(one.widths),
                "planned": list(planned(one.widths, contract.sizes, prefixes)),
                "limit": one.limit,
                "from": _place(policy.load[level]),
            }
            for level, one in plan.levels.items()
        },
        "params": {
            one.name: {"value": one.value, "range": [one.low, one.high], "from": f"{one.span.file}:{one.span.line}"}
            for one in policy.params.values()
        },
        "columns": _columns(plan, contract, catalogue),
        "underfill": plan.underfill,
        "plugins": [
            {"name": one.name, "from": one.source, "version": one.version, "precut": one.precut} for one in plan.plugins
        ],
        "steps": steps,
        "final": {
            word: {
                "value": plan.limit if word == "limit" else content_text(policy.final[word].value),
                "from": _origin(policy.final[word]),
            }
            for word in FINAL_PHASES
            if word == "limit" or policy.final[word].value is not None
        },
    }


def _step(phases: Mapping[str, Resolved], program: StepProgram, moved: object) -> dict[str, object]:
    """What runs in one step, and the origin of each phase."""
    return {
        "candidates": "children of the trie" if program.children else "all codes",
        "precut": program.precut,
        "selection": "generated" if program.generated else "ranks" if program.legal is None else "logits",
        "cuts": program.cuts,
        "bytes": moved,
        "reads": sorted(program.uses),
        "phases": {
            word: {"value": content_text(phases[word].value), "from": _origin(phases[word])}
            for word in STEP_PHASES
            if phases[word].value is not None
        },
    }


def explain_text(policy: Policy, plan: Plan, contract: Contract, catalogue: Catalogue | None = None) -> str:
    """The same for a terminal."""
    prefixes = trie_prefixes(policy, catalogue)
    rows = planned(plan.widths, contract.sizes, prefixes)
    chain = f" extends {' -> '.join(policy.chain[1:])}" if len(policy.chain) > 1 else ""
    out = [
        f"policy {plan.policy}{chain}",
        f"  id {plan.policy_id}  structure {plan.structure.id}  plan {plan.plan_id}  contract {contract.id}",
        f"  widths {list(plan.widths)} <- {_place(policy.widths)}",
    ]
    for level, one in plan.levels.items():
        after_each = list(planned(one.widths, contract.sizes, prefixes))
        out.append(
            f"  load {level}: widths {list(one.widths)}, planned {after_each}, limit {one.limit}"
            f" <- {_place(policy.load[level])}"
        )
    out += [
        f"  param {one.name} = {one.value:g} in {one.low:g}..{one.high:g} <- {one.span.file}:{one.span.line}"
        for one in policy.params.values()
    ]
    out += [
        f"  operator {one.signature} version {one.version}, precut class {one.precut} <- package {one.source}"
        for one in plan.plugins
    ]
    out += [f"  reads {key}, {text}" for key, text in _columns(plan, contract, catalogue).items()]
    for shape, before, after, phases, program in zip(
        contract.steps, (1, *rows), rows, policy.steps, plan.structure.steps, strict=False
    ):
        source = "children of the trie" if program.children else "all codes"
        out.append(
            f"step {shape.t}  rows={before} codes={shape.codes} width={plan.widths[shape.t - 1]} planned={after}"
        )
        out += _lines(phases, STEP_PHASES)
        out.append(f"  candidates   {source}; precut class {_PRECUT[program.precut]}")
        out.append(f"  selection    {_selection(program)}")
        out.append(f"  cut          {program.cuts}")
        size = _bytes(contract, before, shape.codes, after)
        ranks = f"at most {size['ranks']}{'' if program.legal is None else ', none from the logits'}"
        out.append(
            f"  bytes        logits {size['logits']}, ranks {ranks}, survivors {size['survivors']}; for one request"
        )
        if program.uses:
            out.append(f"  reads        {', '.join(sorted(program.uses))}")
    out.append("final")
    out += _lines({word: value for word, value in policy.final.items() if word != "limit"}, FINAL_PHASES)
    out.append(f"  limit        {plan.limit}  <- {_origin(policy.final['limit'])}")
    if plan.underfill == "error":
        out.append("  a list shorter than asked fails the request (underfill: error)")
    return "\n".join(out)


def _selection(program: StepProgram) -> str:
    """What the survivors are taken from."""
    if program.generated is not None:
        return _GENERATED
    return _LOGITS if program.legal is not None else f"from computed ranks: {program.unfit}"


def _bytes(contract: Contract, rows: int, codes: int, survivors: int) -> dict[str, int]:
    """What a step of one request reads and makes: logits in the contract's precision, fp32 ranks of all candidates (at
    most all codes), survivors."""
    logit = _LOGIT.get(contract.precision, 2)
    return {"logits": rows * codes * logit, "ranks": rows * codes * 4, "survivors": survivors * _SURVIVOR}


def _columns(plan: Plan, contract: Contract, catalogue: Catalogue | None) -> dict[str, str]:
    """What a plan reads of what the deployment declares, and what that is."""
    uses = set().union(*(step.uses for step in plan.structure.steps), plan.final.uses if plan.final else ())
    known = facts_of(contract, catalogue)
    return {key: known[key].text for key in sorted(uses | {plan.by}) if key in known}


def _lines(values: Mapping[str, Resolved], phases: Mapping[str, Phase]) -> list[str]:
    out = []
    for word in phases:
        if word in values and values[word].value is not None:
            value = content_text(values[word].value)
            text = "; ".join(value) if isinstance(value, list) else str(value)
            out.append(f"  {word:<12} {text}  <- {_origin(values[word])}")
    return out


def _origin(resolved: Resolved) -> str:
    if resolved.span is None:
        return "default"
    return f"{resolved.key} of {resolved.span.file}:{resolved.span.line}"


def _place(widths: Widths | None) -> str:
    return f"{widths.span.file}:{widths.span.line}" if widths else "contract"
