"""Operators against the deployment and against each other: K, W findings of each step and of the list.

Runs only on a policy without errors, so everything here has its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from app.core import Contract, Level
from app.policies.builtin import BUILT_IN
from app.policies.check_contract import planned, trie_prefixes, widths_by_level
from app.policies.check_types import bind, bounds, constant
from app.policies.diagnostics import Findings, Span
from app.policies.expr import Binary, Expr, Field, Index, Name, Operation, show, walk
from app.policies.facts import Catalogue, Facts, facts_of
from app.policies.groups import Group, group_of
from app.policies.lower_step import NOISE, argument, expression, operations
from app.policies.resolve import Policy, Resolved

BOOST = 50.0
"""Nats: a boost beyond it outruns any likelihood (W005)."""


def check_operators(policy: Policy, contract: Contract, catalogue: Catalogue | None, found: Findings) -> None:
    """K005-K016, W002, W005 and W007."""
    _Checker(policy, contract, catalogue, found).run()


class _Checker:
    def __init__(self, policy: Policy, contract: Contract, catalogue: Catalogue | None, found: Findings) -> None:
        self.policy, self.contract, self.found = policy, contract, found
        self.facts: Facts = facts_of(contract, catalogue)
        self.prefixes = trie_prefixes(policy, catalogue)
        self.by_level = widths_by_level(policy, contract)
        self.look_at("normal")
        self.idle: dict[Span, list[bool]] = {}
        self.said: set[tuple[str, Span]] = set()

    def look_at(self, level: Level) -> None:
        """Check with the widths of a load level from now on. under: how findings name it."""
        self.widths, self.under = self.by_level[level], "" if level == "normal" else f" under load {level}"
        self.rows = planned(self.widths, self.contract.sizes, self.prefixes)

    def run(self) -> None:
        for level in self.by_level:
            self.look_at(level)
            for t in range(1, len(self.contract.steps) + 1):
                if not self.defined(t):
                    continue
                self.mask(t)
                self.select(t)
                self.quota(t)
                self.normal(t)
                self.effect(t)
            self.final()
        self.everywhere()
        for span, idle in self.idle.items():
            if all(idle):
                self.add("W002", span, "this has no effect", "remove it, or change its argument")

    # ---- one step --------------------------------------------------------------------------------------------------

    def add(self, code: str, span: Span, message: str, hint: str = "") -> None:
        """One finding a place: what is wrong at step 1 need not be said again for step 2."""
        if (code, span) not in self.said:
            self.said.add((code, span))
            self.found.add(code, span, message, hint)

    def defined(self, t: int) -> bool:
        """K007: whether a step has all that it reads."""
        known = True
        for node in self.nodes(t):
            for part in walk(node):
                if isinstance(part, Index) and not 1 <= part.index <= t:
                    self.later(part.span, f"`{show(part)}`", part.index, t)
                    known = False
                if isinstance(part, Field) and part.space in ("attr", "prior", "blocked", "boosted"):
                    column = self.facts[f"{part.space}.{part.name}"]
                    if column.first > t:
                        self.later(part.span, f"`{column.key}`", column.first, t)
                        known = False
        return known

    def later(self, span: Span, what: str, first: int, t: int) -> None:
        possible = 1 <= first <= len(self.contract.steps)
        hint = f"defined from step {first}" if possible else f"the deployment has steps 1 to {len(self.contract.steps)}"
        self.add("K007", span, f"{what} is not defined at step {t}", hint)

    def mask(self, t: int) -> None:
        """K016: a mask asks whether there is an item below, and nothing else (policy-language V23)."""
        node = expression(self.policy.steps[t - 1]["mask"])
        for part in walk(node) if node is not None else ():
            if isinstance(part, Field) and part.space == "attr":
                made = self.facts[f"attr.{part.name}"].aggregate
                if made not in ("", "any"):
                    hint = 'declare an attribute with as = "any" and read that'
                    self.add("K016", part.span, f"`{show(part)}` in a mask is made by `{made}`", hint)

    def nodes(self, t: int) -> Iterator[Expr]:
        for resolved in self.policy.steps[t - 1].values():
            node = expression(resolved)
            if node is not None and resolved.span is not None:
                yield node
            for one in operations(resolved):
                yield from (arg.value for arg in one.args)

    def select(self, t: int) -> None:
        step = self.policy.steps[t - 1]
        [select] = operations(step["select"])
        if select.op == "diverse":
            groups = int(argument(select, "groups"))
            width = self.widths[t - 1]
            if width % groups:
                span = _argument_span(select, "groups")
                hint = f"use a divisor of {list(self.widths)}"
                self.add("K005", span, f"{groups} groups do not divide width {width} of step {t}{self.under}", hint)
        if select.op == "stochastic":
            rank = step["rank"]
            if step["normalize"].value != "valid":
                hint = "write `normalize: valid`; otherwise the sample has another distribution"
                self.add("K011", select.name_span, f"`stochastic` at step {t} needs `normalize: valid`", hint)
            if rank.span is not None and show_of(rank) != "score":
                hint = "its own noise orders the candidates; change `score` or `logits`"
                self.add("K012", rank.span, f"`rank` is given together with `stochastic` at step {t}", hint)
        for word in ("quota", "prune"):
            if select.op != "top" and operations(step[word]) and not (word == "prune" and select.op == "diverse"):
                span = operations(step[word])[0].name_span
                message = f"`{word}` does not go together with `{select.op}` at step {t}"
                self.add("K014", span, message, f"write `{word}: none` for that step, or select by `top()`")

    def quota(self, t: int) -> None:
        given = operations(self.policy.steps[t - 1]["quota"])
        groups = [(one, group_of(_group_node(one), t, self.contract.sizes, self.facts)) for one in given]
        caps = [(one, group) for one, group in groups if one.op == "cap"]
        for at, (one, group) in enumerate(caps):
            for _, other in caps[:at]:
                if not (group.inside(other) or other.inside(group)):
                    message = f"caps of `{group.text}` and `{other.text}` cross at step {t}"
                    self.add(
                        "K009", one.name_span, message, "caps must lie inside each other, as `parent` in `token[1]`"
                    )
            self.fills(t, one, group)
        self.floors(t, groups)

    def fills(self, t: int, one: Operation, group: Group) -> None:
        """K006 and the caps of W002."""
        most, rows = int(argument(one, "max")), (1, *self.rows)[t - 1]
        alone = group.depth == t  # each candidate is a group
        self.note(one, alone or most >= self.widths[t - 1])
        if not group.many:
            return
        values = rows if group.row else min(group.values or rows, rows) if group.nested else group.values
        target = self.rows[t - 1]
        if values is not None and not alone and most * values < target:
            held = f"{values} groups of at most {most} hold fewer than the {target} survivors"
            message = f"{held} of step {t}{self.under}"
            self.add("K006", _argument_span(one, "max"), message, "a larger cap, or a smaller width")

    def floors(self, t: int, groups: list[tuple[Operation, Group]]) -> None:
        floors = [(one, group, int(argument(one, "min"))) for one, group in groups if one.op == "floor"]
        caps = [(group, int(argument(one, "max"))) for one, group in groups if one.op == "cap"]
        total = 0
        for one, group, least in floors:
            self.note(one, least == 0)
            total += least * (group.values or 1)
            for cap, most in caps:
                if cap.text == group.text and least > most:
                    message = f"the floor {least} of `{group.text}` is above its cap {most}"
                    self.add("K008", _argument_span(one, "min"), message, "")
                elif group.many and not cap.inside(group):
                    message = f"the cap of `{cap.text}` crosses the floors of `{group.text}` at step {t}"
                    self.add("K009", one.name_span, message, "the cap's groups must lie inside the floor's")
        if total > self.widths[t - 1]:
            message = f"floors of {total} are above the width {self.widths[t - 1]} of step {t}{self.under}"
            self.add("K008", floors[-1][0].name_span, message, "")

    def normal(self, t: int) -> None:
        logits, normalize = self.policy.steps[t - 1]["logits"], self.policy.steps[t - 1]["normalize"]
        if (
            self.contract.log_norm
            and show_of(logits) != "logit"
            and normalize.value == "full"
            and logits.span is not None
        ):
            message = f"`normalize: full` with changed logits at step {t}"
            hint = "the sum over the model's whole vocabulary is that of the raw logits; use `step` or `valid`"
            self.add("K015", logits.span, message, hint)

    # ---- effect ----------------------------------------------------------------------------------------------------

    def effect(self, t: int) -> None:
        step = self.policy.steps[t - 1]
        codes = self.contract.sizes[t - 1]
        for one in operations(step["keep"]):
            if one.op not in BUILT_IN.known:
                continue  # what another package's argument means, only that package knows
            value = constant(one.args[0].value) if one.args else None
            least = {"top_k": codes, "top_p": 1.0, "typical": 1.0}.get(one.op)
            self.note(one, value is not None and (value >= least if least is not None else value == 0))
        [select] = operations(step["select"])
        self.typical(t, select)
        if select.op == "diverse":
            penalty = bind(BUILT_IN["diverse"], select)[0]["penalty"].value
            self.note(select, constant(penalty) == 0)
        if select.op == "explore":
            self.note(select, math.floor(argument(select, "share") * self.widths[t - 1]) == 0)
        for word in ("logits", "score", "rank"):
            node = expression(step[word])
            if node is not None and step[word].span is not None:
                self.expression(node)

    def typical(self, t: int, select: Operation) -> None:
        """W007: it may drop the best codes, which is what a sample wants (policy-language V12)."""
        step = self.policy.steps[t - 1]
        rank = expression(step["rank"])
        noisy = rank is not None and any(isinstance(one, Name) and one.name in NOISE for one in walk(rank))
        for one in operations(step["keep"]):
            if one.op == "typical" and argument(one, "mass") != 1 and select.op == "top" and not noisy:
                hint = "take a sample with `select: stochastic()`, or cut the tail with `top_p`"
                self.add("W007", one.span, f"`typical` may drop the best codes, and nothing at step {t} samples", hint)

    def expression(self, node: Expr) -> None:
        for part in walk(node):
            if not isinstance(part, Binary):
                continue
            neutral = {"+": 0.0, "-": 0.0, "*": 1.0, "/": 1.0, "**": 1.0}[part.op]
            left = constant(part.left) if part.op in ("+", "*") else None
            if neutral in (constant(part.right), left):
                self.add("W002", part.span, f"`{show(part)}` changes nothing", "remove it")
            if part.op == "*":
                self.boost(part)

    def boost(self, part: Binary) -> None:
        """W005: a declared column with a known range, times a weight."""
        for column, weight in ((part.left, part.right), (part.right, part.left)):
            if isinstance(column, Field) and column.space != "param":
                fact = self.facts[f"{column.space}.{column.name}"]
                low, high = bounds(weight, self.policy.params)
                reach = max(abs(low), abs(high)) * (fact.high - fact.low)
                if BOOST < reach < math.inf:
                    message = f"`{show(part)}` can move a rank by {reach:g} nats"
                    self.add("W005", part.span, message, f"above {BOOST:g} nats it outruns any likelihood")

    def note(self, one: Operation, idle: bool) -> None:
        self.idle.setdefault(one.span, []).append(idle)

    # ---- the whole policy ------------------------------------------------------------------------------------------

    def everywhere(self) -> None:
        """K014: selections that hand a number on must stand at every step."""
        selects = [operations(step["select"])[0] for step in self.policy.steps]
        for t, select in enumerate(selects, 1):
            if select.op not in ("diverse", "stochastic"):
                continue
            for other_t, other in enumerate(selects, 1):
                if other.op != select.op:
                    message = f"`{select.op}` stands at step {t} and not at step {other_t}"
                    self.add("K014", select.name_span, message, "its beams carry a number from the first step on")
                    break
                if other.op == "diverse" and argument(other, "groups") != argument(select, "groups"):
                    message = f"steps {min(t, other_t)} and {max(t, other_t)} have different numbers of groups"
                    self.add("K014", _argument_span(select, "groups"), message, "")
                    break

    def final(self) -> None:
        quota, rerank = operations(self.policy.final["quota"]), operations(self.policy.final["rerank"])
        limit = self.policy.final["limit"].value
        most = limit if isinstance(limit, int) else self.widths[-1]
        floors = [one for one in quota if one.op == "floor"]
        if floors and rerank:
            message = "floors of the list do not go together with `rerank`"
            self.add("K014", floors[0].name_span, message, "the rerank would choose among them again")
        for one in floors:
            for cap in quota:
                if cap.op == "cap" and show(_group_node(cap)) == show(_group_node(one)):
                    least, top = int(argument(one, "min")), int(argument(cap, "max"))
                    if least > top:
                        message = f"the floor {least} of `{show(_group_node(one))}` is above its cap {top}"
                        self.add("K008", _argument_span(one, "min"), message, "")
        if sum(int(argument(one, "min")) for one in floors) > most:
            self.add("K008", floors[-1].name_span, f"floors of the list are above its limit {most}{self.under}", "")


def show_of(resolved: Resolved) -> str:
    """The canonical text of an expression phase."""
    node = expression(resolved)
    return show(node) if node is not None else ""


def _group_node(operation: Operation) -> Expr:
    return bind(BUILT_IN[operation.op], operation)[0]["group"].value


def _argument_span(operation: Operation, name: str) -> Span:
    bound = bind(BUILT_IN[operation.op], operation)[0]
    return bound[name].value.span if name in bound else operation.name_span
