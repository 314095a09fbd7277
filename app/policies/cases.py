"""policies/tests/NAME.yaml: text -> cases with places. A case says what a policy is given and what must come of it:
a step's candidates by hand and its survivors, or a request to a whole deployment and its list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.core import HistoryIds, Level, TokenIds
from app.policies.diagnostics import Findings, Span
from app.policies.names import LEVELS
from app.policies.source import Broken, Items, Node, Scalar, Source, Table, compose
from app.policies.traffic import TrafficValues
from app.policies.values import Entry, Given

KIND = "tests"
FOLDER = "tests"
MAX_PARENTS = 64

Value = float | bool | str
"""Of a column: a number, a flag, or the label of a category."""
Codes = frozenset[int]

_CASE = ("policy", "load", "step", "width", "params", "seed", "columns", "parents", "request", "record", "expect")
_PARENT = ("score", "logits", "prefix", "trie", "seen", "exclude", "carry", "columns")
_REQUEST = ("history", "tokens", "k", "exclude", "ctx", "user", "seed")
_STATUS = ("ok", "underfilled", "no_candidates")


@dataclass(frozen=True, slots=True)
class Parent:
    """A live beam before the step, in its order among the parents.

    logits   by code; the model has no token for the others · trie: codes that the catalogue has below its prefix
    carry    the group, flag or Gumbel number that its operator gave it
    columns  by name: by code, or one value for all
    """

    span: Span
    logits: Mapping[int, float]
    trie: Codes
    score: float = 0.0
    prefix: tuple[int, ...] = ()
    seen: Codes = frozenset()
    exclude: Codes = frozenset()
    carry: float | None = None
    columns: Mapping[str, Mapping[int, Value] | Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepCase:
    """One step of a policy. survivors: (parent, code), best first · scores: theirs, to three digits."""

    name: str
    span: Span
    policy: Given[str]
    step: Given[int]
    parents: tuple[Parent, ...]
    survivors: Given[tuple[tuple[int, int], ...]]
    scores: Given[tuple[float, ...]] | None = None
    width: int | None = None
    params: Mapping[str, Given[float]] = field(default_factory=dict)
    seed: int = 0
    columns: Mapping[str, Value] = field(default_factory=dict)
    load: Level | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a case writes it."""

    context: HistoryIds | TokenIds
    k: int
    exclude: tuple[str, ...] = ()
    ctx: Mapping[str, str] = field(default_factory=dict)
    user: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RequestCase:
    """A request under a policy, on a whole deployment. asked None: the request `record`, FILE#ID, beside the test file.

    items: the whole list · first: how it starts · present, absent: in any place · least: at least so many items
    load: the level that it is asked at; None = `normal`, or the record's
    """

    name: str
    span: Span
    policy: Given[str]
    asked: Asked | None
    record: Given[str] | None
    items: Given[tuple[str, ...]] | None = None
    first: Given[tuple[str, ...]] | None = None
    present: Given[tuple[str, ...]] | None = None
    absent: Given[tuple[str, ...]] | None = None
    least: Given[int] | None = None
    status: Given[str] | None = None
    load: Level | None = None


Case = StepCase | RequestCase


def read_cases(source: Source, found: Findings) -> tuple[Case, ...]:
    """The cases of a file; what cannot be read is left out and reported."""
    root = compose(source, found)
    if root is None:
        return ()
    start = Span(source.file, 1, 1, 2)
    read = _Cases(found)
    entries = read.fields(root, "the file", ("widebeam", "kind", "about", "tests"))
    read.head(entries, KIND, start)
    read.require(entries, ("tests",), start)
    if "tests" not in entries:
        return ()
    cases = [read.case(name, entry) for name, entry in read.fields(entries["tests"][1], "tests", ()).items()]
    return tuple(case for case in cases if case is not None)


class _Cases(TrafficValues):
    """The values of a test file."""

    def case(self, name: str, entry: Entry) -> Case | None:
        before = len(self.found.errors)
        given = self.fields(entry[1], "a test", _CASE)
        self.require(given, ("policy", "expect"), entry)
        forms = [word for word in ("parents", "request", "record") if word in given]
        if len(forms) != 1 and isinstance(entry[1], Table):
            message = "a test gives exactly one of `parents`, `request` and `record`"
            self.found.add("S009" if not forms else "S007", entry[0].span, message)
        policy = self.name(given.get("policy"))
        if policy is None or len(forms) != 1 or "expect" not in given:
            return None
        made = (
            self.step_case(name, entry, given, policy)
            if forms == ["parents"]
            else self.request_case(name, entry, given, policy)
        )
        return None if len(self.found.errors) > before else made

    # ---- one step ----------------------------------------------------------------------------------------------

    def step_case(self, name: str, entry: Entry, given: dict[str, Entry], policy: Given[str]) -> Case | None:
        self.require(given, ("step",), entry)
        step = self.integer(given["step"][1], "step", 1, 16) if "step" in given else None
        width = self.integer(given["width"][1], "width", 1) if "width" in given else None
        seed = self.integer(given["seed"][1], "seed", 0, 2**53 - 1) if "seed" in given else None
        nodes = self.items(given["parents"][1], "parents")
        if len(nodes) > MAX_PARENTS:
            self.found.add("S012", given["parents"][0].span, f"more than {MAX_PARENTS} parents")
        parents = [self.parent(node) for node in nodes[:MAX_PARENTS]]
        expect = self.fields(given["expect"][1], "expect", ("survivors", "scores"))
        self.require(expect, ("survivors",), given["expect"])
        survivors = self.survivors(expect.get("survivors"))
        if step is None or survivors is None or None in parents:
            return None
        return StepCase(
            name=name,
            span=entry[0].span,
            policy=policy,
            step=step,
            parents=tuple(one for one in parents if one is not None),
            survivors=survivors,
            scores=self.numbers(expect.get("scores")),
            width=width.value if width else None,
            params=self.by_name(given.get("params")),
            seed=seed.value if seed else 0,
            columns={key: self.value(node) for key, node in self.columns(given.get("columns")).items()},
            load=self.level(given.get("load")),
        )

    def parent(self, node: Node) -> Parent | None:
        given = self.fields(node, "a parent", _PARENT)
        if not isinstance(node, Table):
            return None
        logits = self.logits(given.get("logits"))
        if logits is None:
            self.require(given, ("logits",), node.span)
            return None
        carry = self.decimal(given["carry"][1], "carry") if "carry" in given else None
        score = self.decimal(given["score"][1], "score") if "score" in given else None
        columns: dict[str, Mapping[int, Value] | Value] = {}
        for key, inner in self.columns(given.get("columns")).items():
            columns[key] = self.by_code(inner, key) if isinstance(inner, Table) else self.value(inner)
        return Parent(
            span=node.span,
            logits=logits,
            trie=self.codes(given.get("trie")) if "trie" in given else frozenset(logits),
            score=score.value if score else 0.0,
            prefix=tuple(self.code_list(given.get("prefix"))),
            seen=self.codes(given.get("seen")),
            exclude=self.codes(given.get("exclude")),
            carry=carry.value if carry else None,
            columns=columns,
        )

    def logits(self, entry: Entry | None) -> dict[int, float] | None:
        """By code, or a list from code 0 on."""
        if entry is None:
            return None
        if isinstance(entry[1], Items):
            numbers = [self.decimal(one, "logits") for one in entry[1].items]
            return {code: one.value for code, one in enumerate(numbers) if one is not None}
        given = {code: self.decimal(node, "logits") for code, node in self.keyed(entry[1], "logits").items()}
        return {code: one.value for code, one in given.items() if one is not None}

    def by_code(self, node: Node, where: str) -> dict[int, Value]:
        return {code: self.value(inner) for code, inner in self.keyed(node, where).items()}

    def keyed(self, node: Node, where: str) -> dict[int, Node]:
        """A mapping whose keys are codes."""
        out: dict[int, Node] = {}
        for key, (scalar, inner) in self.fields(node, where, ()).items():
            code = self.integer(scalar, where) if re.fullmatch("[0-9]+", key) else None
            if code is None and not re.fullmatch("[0-9]+", key):
                self.found.add("S011", scalar.span, f"`{key}` is no code", "codes are whole numbers from 0")
            if code is not None:
                out[code.value] = inner
        return out

    def columns(self, entry: Entry | None) -> dict[str, Node]:
        return {} if entry is None else {key: one[1] for key, one in self.fields(entry[1], "columns", ()).items()}

    def value(self, node: Node) -> Value:
        """A number where it can be one, `true`, `false`, or a text."""
        if not isinstance(node, Scalar):
            self.refuse_form(node, "a column's value is a number, a flag or a text", "")
            return 0.0
        if node.style == "plain" and node.text in ("true", "false"):
            return node.text == "true"
        if node.style == "plain" and re.fullmatch(r"-?[0-9.]+(?:[eE][+-]?[0-9]+)?", node.text):
            number = self.decimal(node, "a column's value")
            return number.value if number else 0.0
        return node.text

    def codes(self, entry: Entry | None) -> Codes:
        return frozenset(self.code_list(entry))

    def code_list(self, entry: Entry | None) -> list[int]:
        if entry is None or (isinstance(entry[1], Scalar) and entry[1].text == "none"):
            return []
        given = [self.integer(one, entry[0].text) for one in self.items(entry[1], entry[0].text)]
        return [one.value for one in given if one is not None]

    def survivors(self, entry: Entry | None) -> Given[tuple[tuple[int, int], ...]] | None:
        """Pairs [parent, code], or `none`."""
        if entry is None:
            return None
        if isinstance(entry[1], Scalar) and entry[1].text == "none":
            return Given((), entry[1].span)
        pairs: list[tuple[int, int]] = []
        nodes = self.items(entry[1], "survivors")
        for node in nodes:
            parts = self.sequence(node, "a survivor, [parent, code],", 2)
            numbers = [self.integer(one, "survivors") for one in parts or ()]
            if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
                pairs.append((numbers[0].value, numbers[1].value))
        return Given(tuple(pairs), entry[1].span) if len(pairs) == len(nodes) else None

    def numbers(self, entry: Entry | None) -> Given[tuple[float, ...]] | None:
        if entry is None:
            return None
        given = [self.decimal(one, entry[0].text) for one in self.items(entry[1], entry[0].text)]
        return Given(tuple(one.value for one in given if one is not None), entry[1].span)

    def by_name(self, entry: Entry | None) -> dict[str, Given[float]]:
        if entry is None:
            return {}
        given = {key: self.decimal(one[1], key) for key, one in self.fields(entry[1], entry[0].text, ()).items()}
        return {key: one for key, one in given.items() if one is not None}

    # ---- a request ---------------------------------------------------------------------------------------------

    def request_case(self, name: str, entry: Entry, given: dict[str, Entry], policy: Given[str]) -> Case | None:
        for word in ("step", "width", "params", "seed", "columns"):
            if word in given:
                self.found.add("S007", given[word][0].span, f"`{word}` belongs to tests of one step, with `parents`")
        expect = self.fields(given["expect"][1], "expect", ("items", "first", "present", "absent", "least", "status"))
        record = self.scalar(given.get("record"))
        if record is not None and "#" not in record.text:
            self.found.add("S011", record.span, f"`{record.text}` names no request", "write FILE#REQUEST_ID")
        return RequestCase(
            name=name,
            span=entry[0].span,
            policy=policy,
            asked=self.asked(given["request"]) if "request" in given else None,
            record=Given(record.text, record.span) if record else None,
            items=self.ids(expect.get("items")),
            first=self.ids(expect.get("first")),
            present=self.ids(expect.get("present")),
            absent=self.ids(expect.get("absent")),
            least=self.integer(expect["least"][1], "least", 1) if "least" in expect else None,
            status=self.choice(expect.get("status"), _STATUS),
            load=self.level(given.get("load")),
        )

    def level(self, entry: Entry | None) -> Level | None:
        """The load level that a test is about."""
        given = self.choice(entry, LEVELS)
        return next((one for one in LEVELS if given is not None and one == given.value), None)

    def asked(self, entry: Entry) -> Asked | None:
        given = self.fields(entry[1], "a request", _REQUEST)
        self.require(given, ("k",), entry)
        k = self.integer(given["k"][1], "k", 1) if "k" in given else None
        tokens = (
            [self.integer(one, "tokens") for one in self.items(given["tokens"][1], "tokens")]
            if "tokens" in given
            else []
        )
        if ("tokens" in given) == ("history" in given) and isinstance(entry[1], Table):
            self.found.add("S009", entry[0].span, "a request gives `history` or `tokens`")
        history = self.ids(given.get("history"))
        exclude = self.ids(given.get("exclude"))
        seed = self.integer(given["seed"][1], "seed", 0, 2**53 - 1) if "seed" in given else None
        ctx = (
            {key: self.text(one) for key, one in self.fields(given["ctx"][1], "ctx", ()).items()}
            if "ctx" in given
            else {}
        )
        if k is None:
            return None
        return Asked(
            context=TokenIds(tuple(one.value for one in tokens if one is not None))
            if "tokens" in given
            else HistoryIds(history.value if history else ()),
            k=k.value,
            exclude=exclude.value if exclude else (),
            ctx=ctx,
            user={key: one.value for key, one in self.by_name(given.get("user")).items()},
            seed=seed.value if seed else None,
        )

    def ids(self, entry: Entry | None) -> Given[tuple[str, ...]] | None:
        """A list of item ids, or `none`. An id is its text as it stands: 007 and 7 are two items."""
        if entry is None:
            return None
        if isinstance(entry[1], Scalar) and entry[1].text == "none" and entry[1].style == "plain":
            return Given((), entry[1].span)
        ids: list[str] = []
        for node in self.items(entry[1], entry[0].text):
            if isinstance(node, Scalar):
                ids.append(node.text)
            elif not isinstance(node, Broken):
                self.refuse_form(node, f"`{entry[0].text}` is a list of item ids", "")
        return Given(tuple(ids), entry[1].span)
