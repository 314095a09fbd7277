"""What an artifact says that it must answer: canary.jsonl beside the files of a weights or vocab version.

    {"format": 1, "with": "<digest of the other artifact>", "policy"?: "widebeam: 1\n", "tolerance"?: 0.001}
    {"context": {"history": ["i1", "i2"]}, "k": 10, "items": [{"id": "i9", "score": -1.25}, ...]}
    ...

Where the version is prepared together with that other artifact, every request is served, and an answer that differs
refuses the version. With another one nothing can be compared (ids and legal prefixes are its own): that is logged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from app.config import read_small
from app.core import Context, History, HistoryIds, Ranked, Request, TokenIds
from app.errors import InvalidRequest, Rejected, WidebeamError, counted, let_go, unreadable
from app.policies.compile import compile_policy
from app.policies.plan import Plan
from app.policies.source import Source
from app.runtime.canary import Present
from app.runtime.columns import catalogue_of
from app.runtime.job import Batch, Job, Served, plan_rows
from app.runtime.snapshot import Snapshot
from app.vocab.manifest import Kind

FILE: Final = "canary.jsonl"
MAX_FILE: Final = 4 << 20
MAX_CASES: Final = 64
PLAIN: Final = "widebeam: 1\n"
TOLERANCE: Final = {"float32": 1e-3}
TOLERANCE_16_BIT: Final = 0.05
S = TypeVar("S", bound=Struct)
Score = Annotated[float, Meta(ge=-1e30, le=1e30)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]


class Head(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The first line. tolerance: of scores, absolute; default 0.001 in float32, 0.05 in 16 bit."""

    format: Literal[1]
    other: str = msgspec.field(name="with")
    policy: str = PLAIN
    tolerance: Annotated[float, Meta(gt=0, le=1e6)] | None = None


class Given(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A context: exactly one of both."""

    history: tuple[Text, ...] | UnsetType = UNSET
    tokens: tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...] | UnsetType = UNSET


class Wanted(Struct, frozen=True, forbid_unknown_fields=True):
    """One item of an answer."""

    id: Text
    score: Score


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """A request and its answer, best first."""

    context: Given
    k: Annotated[int, Meta(ge=1, le=10_000)]
    items: tuple[Wanted, ...]


class Asked(Struct, frozen=True):
    """A request to record; whatever else a request body says is not looked at."""

    context: Given
    k: Annotated[int, Meta(ge=1, le=10_000)]


class Canary(NamedTuple):
    """The expectations that a version brings."""

    kind: Kind
    version: str
    head: Head
    cases: tuple[Case, ...]

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot holds the other artifact that it was recorded with."""
        other = snapshot.vocab_ref if self.kind == "weights" else snapshot.weights
        return other.digest == self.head.other


Serve = Callable[[Batch], Awaitable[Sequence[Served]]]


def read_canary(directory: Path, kind: Kind) -> Canary | None:
    """What a version expects; None where it expects nothing. Raises Rejected("canary_invalid") with the line."""
    try:
        data = read_small(directory / FILE, MAX_FILE + 1, directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(error, "file_unreadable", FILE) from error
    lines = data.splitlines()
    if len(data) > MAX_FILE or not 2 <= len(lines) <= MAX_CASES + 1:
        raise Rejected("canary_invalid", f"a head, 1 to {MAX_CASES} requests, {MAX_FILE} bytes at most", location=FILE)
    head = _decoded(lines[0], 1, Head)
    return Canary(kind, directory.name, head, tuple(_decoded(line, n, Case) for n, line in enumerate(lines[1:], 2)))


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes requests of contexts on one snapshot, under a plan that no policy file says."""

    snapshot: Snapshot
    plan: Plan

    @classmethod
    def under(cls, snapshot: Snapshot, policy: str) -> Requests:
        """Compile a policy's text for a snapshot. Raises Rejected("canary_invalid")."""
        catalogue = catalogue_of(snapshot.vocab, snapshot.side)
        sources = {"canary": Source(FILE, policy.encode())}
        plan, findings = compile_policy("canary", sources, snapshot.contract, catalogue)
        if plan is None:
            why = "; ".join(finding.message for finding in findings.errors) or "it is abstract"
            raise Rejected("canary_invalid", f"its policy cannot serve: {why}", location=f"{FILE}: line 1")
        return cls(snapshot, plan)

    def job(self, context: Given, k: int, line: int) -> Job:
        """One request. Raises Rejected("canary_invalid") for a context that the model does not take."""
        snapshot = self.snapshot
        try:
            inputs = snapshot.engine.prepare(self._context(context))
        except InvalidRequest as error:
            raise Rejected("canary_invalid", error.message, location=f"{FILE}: line {line}") from error
        request = Request("canary", HistoryIds(()), k=k)
        planned = plan_rows(self.plan, snapshot.contract, snapshot.trie.prefixes)
        return Job(request, Present(), snapshot, self.plan, inputs, planned, None, None, 0.0)

    def _context(self, given: Given) -> Context:
        if (given.history is UNSET) == (given.tokens is UNSET):
            raise InvalidRequest("exactly one of `history` and `tokens` is needed", path="$.context")
        if given.tokens is not UNSET:
            return TokenIds(given.tokens)
        assert given.history is not UNSET
        items = self.snapshot.vocab.find(given.history)
        if items.min(initial=0) < 0:
            unknown = given.history[int(np.argmin(items))]
            raise InvalidRequest(f"item {unknown!r} is not in the vocab", path="$.context.history")
        return History(self.snapshot.vocab.sids(items))


async def differs(canary: Canary, requests: Requests, serve: Serve) -> Rejected | None:
    """Serve every request, one at a time, and compare; the first difference with its line. Raises Rejected where a
    request cannot be served."""
    head, snapshot = canary.head, requests.snapshot
    tolerance = head.tolerance or TOLERANCE.get(snapshot.contract.precision, TOLERANCE_16_BIT)
    for line, case in enumerate(canary.cases, 2):
        found = _answer(snapshot, await serve(Batch((requests.job(case.context, case.k, line),))), line)
        problem = difference(case.items, found, tolerance)
        if problem is not None:
            return Rejected("canary_differs", problem, location=f"{FILE}: line {line}")
    return None


async def record(requests: Requests, asked: Sequence[Asked], other: str, serve: Serve) -> bytes:
    """The text of canary.jsonl for what a snapshot answers now. Raises Rejected where it does not answer."""
    lines = [msgspec.json.encode(Head(format=1, other=other))]
    for line, one in enumerate(asked, 2):
        found = _answer(requests.snapshot, await serve(Batch((requests.job(one.context, one.k, line),))), line)
        lines.append(msgspec.json.encode(Case(one.context, one.k, found)))
    return b"\n".join(lines) + b"\n"


def read_asked(data: bytes) -> tuple[Asked, ...]:
    """Request bodies to record, one JSON object a line. Raises Rejected with the line."""
    lines = [line for line in data.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MAX_CASES:
        raise Rejected("canary_invalid", f"{counted(len(lines), 'request')}; 1 to {MAX_CASES} are possible")
    return tuple(_decoded(line, n, Asked) for n, line in enumerate(lines, 1))


def difference(wanted: Sequence[Wanted], found: Sequence[Wanted], tolerance: float) -> str | None:
    """What tells an answer from the recorded one, in a sentence; None where they are equal up to near-ties.

    Scores agree place by place, and so does the score of every item that both have; an item that only one of them has
    lies at the cut.
    """
    if len(wanted) != len(found):
        return f"{counted(len(found), 'item')}, {len(wanted)} are recorded"
    for place, (one, other) in enumerate(zip(wanted, found, strict=True), 1):
        if abs(one.score - other.score) > tolerance:
            said = f"{other.id!r} with score {other.score:.6g}; {one.id!r} with {one.score:.6g} is recorded"
            return f"place {place} is {said} (tolerance {tolerance:g})"
    scores = {one.id: one.score for one in found}
    cut = min((one.score for one in found), default=0.0)
    for one in wanted:
        score = scores.get(one.id)
        if score is None and one.score > cut + tolerance:
            return f"item {one.id!r} is missing; it is recorded with score {one.score:.6g}"
        if score is not None and abs(score - one.score) > tolerance:
            return f"item {one.id!r} has score {score:.6g}; {one.score:.6g} is recorded (tolerance {tolerance:g})"
    return None


def _answer(snapshot: Snapshot, served: Sequence[Served], line: int) -> tuple[Wanted, ...]:
    (end,) = served
    if isinstance(end.result, WidebeamError):
        let_go(end.result)
        raise Rejected("canary_failed", end.result.message, location=f"{FILE}: line {line}")
    ranked: Ranked = end.result
    ids = snapshot.vocab.ids(ranked.items)
    return tuple(Wanted(item, score) for item, score in zip(ids, ranked.scores.tolist(), strict=True))


def _decoded(line: bytes, number: int, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected("canary_invalid", str(error), location=f"{FILE}: line {number}") from error
