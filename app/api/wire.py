"""The bodies of POST /v1/recommend: what a client may send, what it gets, and how both meet `core`.

The structs are the documentation: the OpenAPI document is made from them. Fields that are absent are UNSET, never null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Struct, UnsetType

from app import core
from app.config import Limits
from app.errors import Fault, InvalidRequest

MAX_IDS: Final = 10_000
MAX_ID_BYTES: Final = 512
MAX_FACTS: Final = 256
MAX_WHY: Final = 100
MAX_DEADLINE_MS: Final = 86_400_000

ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES, description="1 to 512 bytes of UTF-8")]
ItemIds = Annotated[tuple[ItemId, ...], Meta(max_length=MAX_IDS)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Key = Annotated[str, Meta(min_length=1, max_length=128)]
Fact = Annotated[str, Meta(max_length=4096)]
T = TypeVar("T")


class Embedding(Struct, frozen=True, forbid_unknown_fields=True):
    """A feature tensor; msgpack only. `data` holds shape's elements in row-major order, little-endian, all finite."""

    dtype: Literal["f32", "f16", "bf16"]
    shape: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=4)]
    data: bytes


class Context(Struct, frozen=True, forbid_unknown_fields=True):
    """What the request tells about the user: exactly one of the three."""

    history: Annotated[ItemIds, Meta(description="Item ids in time order, oldest first")] | UnsetType = UNSET
    tokens: (
        Annotated[tuple[Token, ...], Meta(description="A prompt, as the model's tokenizer gives it")] | UnsetType
    ) = UNSET
    embeddings: (
        Annotated[dict[Name, Embedding], Meta(max_length=64, description="Feature tensors by name; msgpack only")]
        | UnsetType
    ) = UNSET


class Why(Struct, frozen=True, forbid_unknown_fields=True):
    """Which items to explain."""

    why: Annotated[tuple[ItemId, ...], Meta(max_length=MAX_WHY, description="Ids of items")]


class Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request for recommendations."""

    context: Context
    k: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | UnsetType = UNSET
    user_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES)] | UnsetType = UNSET
    policy: Annotated[Name, Meta(description="Only where the deployment allows it")] | UnsetType = UNSET
    exclude: Annotated[ItemIds, Meta(description="Never recommended, whatever the policy says")] | UnsetType = UNSET
    ctx: (
        Annotated[dict[Key, Fact], Meta(max_length=MAX_FACTS, description="Texts that policies may read")] | UnsetType
    ) = UNSET
    user: (
        Annotated[dict[Key, float], Meta(max_length=MAX_FACTS, description="Numbers that policies may read")]
        | UnsetType
    ) = UNSET
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType = UNSET
    explain: (
        Annotated[bool | Why, Meta(description="How the answer came about; a bounded number a second")] | UnsetType
    ) = UNSET


def body_type(limits: Limits) -> type[Body]:
    """The body of a deployment, for the OpenAPI document: `k` is bounded by `limits.k`. Requests are decoded without
    it: the limit may change while the server runs, and admission knows what it is."""
    k = Annotated[int, Meta(ge=1, le=limits.k, description="How many items; never changes the search")]
    made = msgspec.defstruct(
        "RecommendRequest", [("k", k)], bases=(Body,), frozen=True, forbid_unknown_fields=True, kw_only=True
    )
    assert issubclass(made, Body)
    return made


def to_request(
    body: Body,
    *,
    request_id: str,
    received: float,
    deadline: float | None,
    override: bool,
    arms: Mapping[str, str] | None = None,
) -> core.Request:
    """A decoded body as the runtime takes it.

    received, deadline  monotonic seconds; override = whether this deployment lets requests name their policy;
    arms = arms by experiment that a tester asks for.
    Raises InvalidRequest with the field's path for what types cannot say.
    """
    if body.policy is not UNSET and not override:
        raise InvalidRequest("this deployment does not let requests choose a policy", path="$.policy")
    if body.user_id is not UNSET:
        _check_bytes((body.user_id,), "$.user_id")
    exclude = _given(body.exclude) or ()
    user = _given(body.user) or {}
    _check_bytes(exclude, "$.exclude[{}]")
    for name, value in user.items():
        if not math.isfinite(value):
            raise InvalidRequest("expected a finite number", path=f"$.user.{name}")
    return core.Request(
        request_id=request_id,
        context=_context(body.context),
        k=body.k,
        user_id=_given(body.user_id),
        policy=_given(body.policy),
        exclude=exclude,
        ctx=_given(body.ctx) or {},
        user=user,
        received=received,
        deadline=deadline,
        seed=_given(body.seed),
        arms=arms or {},
        explain=_explain(body.explain),
    )


def _explain(asked: bool | Why | UnsetType) -> tuple[str, ...] | None:
    if isinstance(asked, Why):
        _check_bytes(asked.why, "$.explain.why[{}]")
        return asked.why
    return () if asked is True else None


def _given(value: T | UnsetType) -> T | None:
    return None if value is UNSET else value


def _context(context: Context) -> core.HistoryIds | core.TokenIds | core.Embeddings:
    given = (context.history is not UNSET) + (context.tokens is not UNSET) + (context.embeddings is not UNSET)
    if given != 1:
        raise InvalidRequest(
            f"expected exactly one of `history`, `tokens`, `embeddings`, got {given}", path="$.context"
        )
    if context.history is not UNSET:
        _check_bytes(context.history, "$.context.history[{}]")
        return core.HistoryIds(context.history)
    if context.tokens is not UNSET:
        return core.TokenIds(context.tokens)
    assert context.embeddings is not UNSET
    tensors = {name: _tensor(value, f"$.context.embeddings.{name}") for name, value in context.embeddings.items()}
    return core.Embeddings(tensors)


def _check_bytes(ids: Sequence[str], path: str) -> None:
    if all(map(str.isascii, ids)):  # then the decoder's limit of characters is the limit of bytes
        return
    for place, text in enumerate(ids):
        if len(text.encode()) > MAX_ID_BYTES:
            raise InvalidRequest(f"expected at most {MAX_ID_BYTES} bytes of UTF-8", path=path.format(place))


def _tensor(value: Embedding, path: str) -> npt.NDArray[np.float32]:
    width = 4 if value.dtype == "f32" else 2
    expected = math.prod(value.shape) * width
    if len(value.data) != expected:
        raise InvalidRequest(
            f"shape {list(value.shape)} of {value.dtype} needs {expected} bytes, got {len(value.data)}",
            path=f"{path}.data",
        )
    array = _floats(value).reshape(value.shape)
    if not np.isfinite(array).all():
        raise InvalidRequest("expected finite numbers only", path=f"{path}.data")
    return array


def _floats(value: Embedding) -> npt.NDArray[np.float32]:
    if value.dtype == "bf16":  # a bf16 is the upper half of an fp32
        halves = np.frombuffer(value.data, dtype="<u2").astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)
    return np.frombuffer(value.data, dtype="<f4" if value.dtype == "f32" else "<f2").astype(np.float32)


# ---- what comes back -----------------------------------------------------------------------------------------------


class Item(Struct, frozen=True):
    """One recommended item; `score` is the policy's final score, always finite."""

    id: str
    score: float
    sid: tuple[int, ...]


class Versions(Struct, frozen=True):
    """Everything that made the answer."""

    snapshot: str
    weights: str
    vocab: str
    policy: str
    policy_id: str
    contract: str


class Exposure(Struct, frozen=True):
    """One experiment's decision for this request."""

    layer: str
    name: str
    arm: str
    reason: str
    coverage: float | UnsetType = UNSET


class Unknown(Struct, frozen=True):
    """How many ids of the request the pinned vocab does not know; they were skipped."""

    history: int
    exclude: int


class Timings(Struct, frozen=True):
    """Milliseconds; `total` from the request's last byte at the server until the answer is made."""

    queue: float
    context: float
    decode: float
    total: float


class BatchInfo(Struct, frozen=True):
    """What the request was served with: requests, and rows of the widest step."""

    requests: int
    rows: int


class StepExplained(Struct, frozen=True, tag_field="kind", tag="step"):
    """What one step did: `candidates` (every code under every parent) = the sum of `removed` by phase + `kept`.
    `best` and `cut` are the highest and the lowest rank among the survivors."""

    step: int
    parents: int
    candidates: int
    legal: int
    removed: Mapping[str, int]
    kept: int
    planned: int
    best: float | UnsetType
    cut: float | UnsetType


class ItemExplained(Struct, frozen=True, tag_field="kind", tag="item"):
    """What became of an item of `why`: where it left, by which phase, with its rank and place beside the cut."""

    id: str
    result: Literal["listed", "unknown", "taken_down", "excluded", "masked", "cut", "final"]
    step: int | UnsetType
    phase: str | UnsetType
    rank: float | UnsetType
    cut: float | UnsetType
    place: int | UnsetType
    kept: int | UnsetType
    rule: str | UnsetType = UNSET


class Mismatch(Struct, frozen=True, tag_field="kind", tag="explain_mismatch"):
    """The run that explains gave other items than the answer."""

    message: str


Explained = StepExplained | ItemExplained | Mismatch


class Answer(Struct, frozen=True, kw_only=True):
    """Recommendations, best first."""

    request_id: str
    items: list[Item]
    status: Literal["ok", "underfilled", "no_candidates"]
    reason: str | UnsetType = UNSET
    versions: Versions
    experiments: list[Exposure]
    seed: int
    load: str | UnsetType = UNSET
    unknown: Unknown | UnsetType = UNSET
    timings_ms: Timings
    batch: BatchInfo
    explain: list[Explained] | UnsetType = UNSET


def to_answer(outcome: core.Outcome) -> Answer:
    """The wire form of an outcome. Raises Fault for a score that is not finite: JSON would say null in its place."""
    if not all(math.isfinite(item.score) for item in outcome.items):
        bad = next(item for item in outcome.items if not math.isfinite(item.score))
        raise Fault(f"the score of item {bad.id!r} is {bad.score}")
    unknown = outcome.unknown_history or outcome.unknown_exclude
    return Answer(
        request_id=outcome.request_id,
        items=[Item(*item) for item in outcome.items],
        status=outcome.status,
        reason=UNSET if outcome.reason is None else outcome.reason,
        versions=Versions(*outcome.versions),
        experiments=[_exposure(exposure) for exposure in outcome.experiments],
        seed=outcome.seed,
        load=UNSET if outcome.load is None else outcome.load,
        unknown=Unknown(outcome.unknown_history, outcome.unknown_exclude) if unknown else UNSET,
        timings_ms=Timings(*outcome.timings),
        batch=BatchInfo(outcome.batch_requests, outcome.batch_rows),
        explain=UNSET if outcome.explanation is None else _explained(outcome.explanation),
    )


def _explained(told: core.Explanation) -> list[Explained]:
    """Steps, then items, then what does not fit."""
    out: list[Explained] = [StepExplained(*one[:-2], _or_unset(one.best), _or_unset(one.cut)) for one in told.steps]
    out += [_item_explained(one) for one in told.items]
    return out if told.mismatch is None else [*out, Mismatch(told.mismatch)]


def _item_explained(one: core.ExplainedItem) -> ItemExplained:
    return ItemExplained(
        one.id,
        one.result,
        step=_or_unset(one.step),
        phase=_or_unset(one.phase),
        rank=_or_unset(one.rank),
        cut=_or_unset(one.cut),
        place=_or_unset(one.place),
        kept=_or_unset(one.kept),
        rule=_or_unset(one.rule),
    )


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def _exposure(seen: core.Exposure) -> Exposure:
    coverage = UNSET if seen.coverage is None else seen.coverage
    return Exposure(seen.layer, seen.name, seen.arm, seen.reason, coverage)


class ErrorDetail(Struct, frozen=True):
    """`code` is stable, `message` is for people, `path` is the place in the request where there is one."""

    code: str
    message: str
    retryable: bool
    path: str | UnsetType = UNSET


class ErrorBody(Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def error_body(code: str, message: str, retryable: bool, path: str | None) -> ErrorBody:
    """An error body; path None leaves the field out."""
    return ErrorBody(ErrorDetail(code, message, retryable, UNSET if path is None else path))


class Ready(Struct, frozen=True):
    """Readiness; `reasons` say why not, as stable codes with details."""

    ready: bool
    reasons: Sequence[str] = ()


class Live(Struct, frozen=True):
    """The process answers."""

    live: bool
