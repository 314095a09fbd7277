"""What each word of the language is, for `widebeam policy help WORD`: keys, phases, names, functions, choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from app.policies.names import EVERYWHERE, FINAL_PHASES, FUNCTIONS, NAMES, SPACES, STEP_PHASES, Phase
from app.policies.schema import schema

POLICY: Final = {
    "value": "of a parameter: its number, until an experiment or a policy that extends this one gives another",
    "range": "of a parameter: [lowest, highest], both included",
    "all": "under `steps`: every step that `first`, `last` or a number says nothing about",
    "first": "under `steps`: step 1",
    "last": "under `steps`: the last step of the deployment",
    "none": "takes back what is inherited: no mask, no list, the default; under `normalize`: raw logits",
    "full": "`normalize`: over everything that the model can emit at the step; the default",
    "valid": "`normalize`: over the codes that mask and exclude set leave",
    "allow": "`underfill`: answer with what there is; the default",
    "error": "`underfill`: a list shorter than asked fails the request",
    "busy": "under `load`: widths while the server is busy ([load] of deployment.toml says when)",
    "quiet": "under `load`: widths while the server is quiet",
    "normal": "the load level of a policy's own widths",
    "and": "both conditions hold",
    "or": "one of the conditions holds, or both",
    "not": "the condition does not hold",
    "in": 'the text is one of a list: ctx.country in ["BR", "MX"]',
    "token": "as a group, token[i]: all candidates whose i-th code is the same",
    "prefix": "as a group, prefix[i]: all candidates whose first i codes are the same",
}
NAMED: Final = {
    "logit": "what the model says of the code, before anything else",
    "logp": "log-probability of the code in nats, normalised as `normalize` says",
    "prob": "probability of the code: exp(logp)",
    "parent": "score that the beam has carried here; as a group: all candidates of one beam",
    "score": "the candidate's own `score`; in `final`: that of the search",
    "step": "number of the step, from 1; under `normalize`: over the codes of the step",
    "vocab": "how many codes the step has",
    "width": "K: how many survivors the request keeps after this step",
    "trie": "prefix and code lead to an item of the catalogue",
    "seen": "every item below prefix and code is in the request's history or exclude list; in `final`: the item is",
    "sibling": "the candidate's place among those of its beam by score, from 1",
    "gumbel": "Gumbel noise that belongs to the request's seed, the prefix and the code",
    "uniform": "noise from 0 to 1 that belongs to the request's seed, the prefix and the code",
    "position": "the item's place in the search's order, from 1",
}
FIELDS: Final = {
    "param": "param.x: a parameter of this policy, declared under `params`",
    "user": "user.x: a number that the request brings, declared under [request.user] of deployment.toml",
    "ctx": "ctx.x: a text that the request brings, declared under [request.ctx]",
    "head": "head.x: an extra output of the model",
    "attr": "attr.x: a number, flag or text made from the items below a prefix, declared under [attributes]",
    "prior": "prior.x: log of a prefix's share of some weight, declared under [priors]",
    "blocked": "blocked.x: every item below the prefix is on list x, declared under [lists]",
    "boosted": "boosted.x: some item below the prefix is on list x, declared under [lists]",
    "item": "item.x: an attribute of the item, in `final`",
}
TRAFFIC: Final = {
    "kind": "what a file is: `traffic`, `experiment` or `tests`; a policy has none",
    "default": "the policy of everybody who is in no arm; `base` where it is not given",
    "unit": "what is hashed: user_id, device_id, request_id or ctx.NAME",
    "missing_unit": "what a request without a unit gets: `default`, the only value",
    "holdout": "users who take part in nothing: `share`, `salt`, `policy`",
    "share": "of the holdout: percent of all units",
    "layers": "independent ways to share users out, by name",
    "surfaces": "of a layer: only requests with one of these as ctx.surface",
}
EXPERIMENT: Final = {
    "layer": "the layer that an experiment takes slots of",
    "slots": "[from, to) of the layer's 10,000 slots: which units are in",
    "state": "running, draft, paused or stopped",
    "running": "`state`: units get their arms; the default",
    "draft": "`state`: nobody but testers",
    "paused": "`state`: everybody gets the default, the slots stay taken",
    "stopped": "`state`: over; its slots are free a day after `stopped_at`",
    "stopped_at": "when it was stopped",
    "salt": "text that shares units out; never used twice",
    "where": "a condition on ctx and user: who is eligible",
    "arms": "by name: `weight`, `policy`, `params`; one is called `control`",
    "weight": "of an arm: percent, 100 over all arms",
    "policy": "the policy of an arm, of the holdout or of a test",
    "ramp": "lines of `from` and `coverage`; the last whose moment has passed counts",
    "from": "of a ramp's line: the moment, with its zone",
    "coverage": "of a ramp's line: percent of each arm that is in",
    "stop_if": "alerts: `metric`, `above`, `for`",
    "metric": "of an alert: `underfill_rate` or `p99_ms`",
    "underfill_rate": "`metric`: the share of lists that are shorter than asked",
    "p99_ms": "`metric`: the 99th percentile of latency, in milliseconds",
    "above": "of an alert: the number that is too much",
    "for": "of an alert: how long it must last, 30s to 24h",
    "allow_reassign": "true lets a running experiment change who gets what, with a warning",
}
TESTS: Final = {
    "tests": "what must hold, by name",
    "parents": "the live beams before the step: `score`, `logits`, `prefix`, `trie`, `seen`, `exclude`, `columns`",
    "request": "what is asked, on the whole deployment: `history` or `tokens`, `k`",
    "record": "FILE#REQUEST_ID: a recorded request instead",
    "seed": "of what is drawn by chance",
    "columns": "values of what the policy reads of candidates or of the request",
    "carry": "of a parent: the number that its operator handed on",
    "exclude": "codes, or items, that the request excludes",
    "history": "the user's items, oldest first",
    "tokens": "a prompt of a token model",
    "k": "how many items are asked for",
    "expect": "what must come",
    "survivors": "of a step: [parent, code], best first",
    "scores": "of a step: what the survivors carry on, to three digits",
    "items": "the whole list",
    "present": "items that are somewhere in the list",
    "absent": "items that are not",
    "least": "at least so many items",
    "status": "ok, underfilled or no_candidates",
    "ok": "`status`: as many items as asked",
    "underfilled": "`status`: fewer",
    "no_candidates": "`status`: none",
}


def meanings(word: str) -> list[str]:
    """Everything that a word is, a line each; none for a word that the language does not have."""
    return list(_meanings(word))


def words() -> frozenset[str]:
    """Every word that has a meaning here."""
    tables: tuple[Mapping[str, object], ...] = (
        _keys(), STEP_PHASES, FINAL_PHASES, NAMED, FIELDS, FUNCTIONS, POLICY, TRAFFIC, EXPERIMENT, TESTS,
    )  # fmt: skip
    return frozenset(word for table in tables for word in table)


def _meanings(word: str) -> Iterator[str]:
    if word in _keys():
        yield f"key of a policy: {_keys()[word]}"
    if word in STEP_PHASES:
        yield f"phase of a step: {_phase(STEP_PHASES[word])}"
    if word in FINAL_PHASES:
        yield f"phase of `final`: {_phase(FINAL_PHASES[word])}"
    if word in NAMED:
        form = next((names[word].form for names in NAMES.values() if word in names), "number")
        yield f"{form} in {_places(word)}: {NAMED[word]}"
    if word in FIELDS:
        places = _listed([phase for phase, spaces in SPACES.items() if word in spaces])
        yield f"fields {'everywhere' if word in EVERYWHERE else f'in {places}'}: {FIELDS[word]}"
    if word in FUNCTIONS:
        yield f"function {_signature(word)}: {FUNCTIONS[word].about}"
    for kind, table in (("policies", POLICY), ("traffic.yaml", TRAFFIC), ("experiments", EXPERIMENT), ("tests", TESTS)):
        if word in table:
            yield f"in {kind}: {table[word]}"


def _keys() -> dict[str, str]:
    """The keys of a policy file, as the schema describes them."""
    properties = schema()["properties"]
    assert isinstance(properties, dict), "made there"
    return {key: str(one["description"]) for key, one in properties.items()}


def _phase(phase: Phase) -> str:
    default = f" (default: {phase.default})" if phase.default else ""
    return f"{phase.about}{default}; takes {_TAKES[phase.form]}"


_TAKES: Final = {
    "number": "a number",
    "condition": "a condition",
    "operation": "an operator",
    "operations": "a list of operators",
    "choice": "full, step, valid or none",
    "field": "a field of items",
    "count": "a whole number",
}


def _places(word: str) -> str:
    return _listed([phase for phase, names in NAMES.items() if word in names])


def _listed(phases: list[str]) -> str:
    return ", ".join(f"`{phase.replace('.', ': ')}`" for phase in phases)


def _signature(name: str) -> str:
    arguments = {"clip": "x, lo, hi", "where": "condition, a, b", "min": "x, y, ..", "max": "x, y, .."}
    return f"{name}({arguments.get(name, 'x')})"
