"""The data that every room speaks. Nothing here computes.

Letters: R requests, W beams of a request, N rows of the flat batch, C_t codes of step t, K survivors, L steps,
t = 1..L. A *row* is one live partial SID. Rows of a request are contiguous; their physical order inside the request
is free, since `order` carries the ranking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from app.config import NO_FIELDS, Limits, RequestFields

if TYPE_CHECKING:  # processes without an engine speak these types, too
    from torch import Tensor, dtype

Array = npt.NDArray[np.generic]


# ---- what a client asks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HistoryIds:
    """The user's items in time order, as item ids; the pinned vocab turns them into SIDs."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt for token models, as the model's own tokenizer gives it."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Feature tensors by contract name: fp32 arrays [positions, dim]."""

    tensors: Mapping[str, npt.NDArray[np.float32]]


Level = Literal["quiet", "normal", "busy"]
"""How busy a server is. A policy's own widths are those of `normal`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One recommendation request as the runtime takes it (the wire form is `api.wire`).

    received    monotonic seconds when the body's last byte was there
    deadline    monotonic seconds, or None
    user, ctx   numbers and strings that policies may read
    arms        experiment -> arm that a tester wants, where the deployment allows it
    explain     None, or the ids of items that the answer's explanation says more about
    load        the load level that it is served at, where that is given: for requests that are asked again
    """

    request_id: str
    context: HistoryIds | TokenIds | Embeddings
    k: int
    user_id: str | None = None
    policy: str | None = None
    exclude: tuple[str, ...] = ()
    ctx: Mapping[str, str] = field(default_factory=dict)
    user: Mapping[str, float] = field(default_factory=dict)
    received: float = 0.0
    deadline: float | None = None
    seed: int | None = None
    arms: Mapping[str, str] = field(default_factory=dict)
    explain: tuple[str, ...] | None = None
    load: Level | None = None


# ---- what the engine is given and gives ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """A context for `Family.prepare`: the SIDs of the user's items, oldest first. codes [items, L] int32."""

    codes: npt.NDArray[np.int32]


Context = History | TokenIds | Embeddings
Inputs = Mapping[str, Array]
"""One request's model inputs by name: arrays [positions, *shape of its InputSpec]."""


class Ragged(NamedTuple):
    """One input of all requests of a batch, laid end to end.

    values  [T, *shape]
    start   [R + 1] int32; request r owns values[start[r]:start[r + 1]]
    counts  how many those are, on the host: nobody waits for them; () where only the device knows
    """

    values: Tensor
    start: Tensor
    counts: tuple[int, ...] = ()


Contexts = Mapping[str, Ragged]
Arena = Mapping[str, "Tensor"]
"""The state of one batch by name, allocated once from `StateSpec`s; addresses never change while the contract lives.

scope "request":  [limits.batch, *shape]          row r belongs to request r of the batch
scope "row":      [L - 1, limits.rows, *shape]    slot (t, n) is written by step t for its row n, and by nobody later;
                                                  step L writes none, since nothing reads it
"""


class Rows(NamedTuple):
    """The rows of one decode step, flat over its requests (N planned rows; tombstones included).

    codes      [N] int32       the code chosen at step t - 1; 0 at step 1 (the BOS row) and for tombstones
    request    [N] int32       which request of the batch; non-decreasing
    row_start  [R + 1] int32   rows row_start[r]:row_start[r + 1] belong to request r
    ancestry   [N, t - 1] int32  column j - 1: the slot of step j that is the row's; h_t(b, j) of OneLA 3.3
    compact    True where ancestry is the identity (RecoGEM 3.2's compaction has moved the state): engines may then
               read slots 0..N-1 directly
    full       whether some policy of the batch normalises over everything the model can emit; where False, the
               engine may leave `log_norm` out
    """

    codes: Tensor
    request: Tensor
    row_start: Tensor
    ancestry: Tensor
    compact: bool
    full: bool


class StepOutput(NamedTuple):
    """What a decode step says about its rows.

    logits    [N, C_t] float, any float dtype; -inf where a code has no token
    log_norm  [N] float32: log-sum-exp over everything the model can emit at this step; None where that is just the
              step's codes (then the selection computes it), or where `Rows.full` is False
    heads     named extras, [N] or [N, C_t] float32, as the contract declares
    """

    logits: Tensor
    log_norm: Tensor | None
    heads: Mapping[str, Tensor]


class Survivors(NamedTuple):
    """What selection keeps of one step: the planned rows of the next, flat over all requests.

    parent   [N'] int32    row of this step; -1 = tombstone
    code     [N'] int32    -1 = tombstone
    order    [N'] int32    place in T0 inside the request (rank descending, then parent's order * C + code ascending)
    score    [N'] float32  nats, carried; -inf = tombstone
    node     [N'] int32    trie node of the new prefix; -1 where it is no prefix of the catalogue, and for tombstones
    n_valid  [R] int32
    """

    parent: Tensor
    code: Tensor
    order: Tensor
    score: Tensor
    node: Tensor
    n_valid: Tensor


# ---- the contract --------------------------------------------------------------------------------------------------


class InputSpec(NamedTuple):
    """One named context input. shape is that of a position; at most `positions` of them a request."""

    name: str
    shape: tuple[int, ...]
    dtype: dtype
    positions: int


class StateSpec(NamedTuple):
    """One carried tensor; `shape` is that of one request or one row slot (see `Arena`). first: of a row slot's first
    dim, where that begins which later steps read; what lies before it is of use to the step that wrote it, and to
    nobody later."""

    name: str
    shape: tuple[int, ...]
    dtype: dtype
    scope: Literal["request", "row"]
    first: int = 0


class HeadSpec(NamedTuple):
    """An extra output of a step that policies may read as `head.<name>`; scope "row" is [N], "code" is [N, C_t]."""

    name: str
    scope: Literal["row", "code"]


class WeightSpec(NamedTuple):
    """One tensor that a weights artifact must hold."""

    name: str
    shape: tuple[int, ...]


class StepShape(NamedTuple):
    """Step t: `codes` C_t, and the widest beam that a policy may ask for after it."""

    t: int
    codes: int
    width: int


@dataclass(frozen=True, slots=True)
class Contract:
    """The description of a deployment that artifacts and policies are checked against (RecoGEM 3.1).

    `id` is made from everything else here: two deployments with one id can exchange artifacts.
    `config` is the canonical JSON of the model's own configuration values; `request` is what policies may read of one.
    """

    id: str
    family: str
    steps: tuple[StepShape, ...]
    limits: Limits
    precision: str
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    heads: tuple[HeadSpec, ...]
    weights: tuple[WeightSpec, ...]
    log_norm: bool
    config: str
    request: RequestFields = NO_FIELDS

    @property
    def sizes(self) -> tuple[int, ...]:
        """C_1..C_L."""
        return tuple(step.codes for step in self.steps)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widest beam after each step."""
        return tuple(step.width for step in self.steps)


# ---- what comes back -----------------------------------------------------------------------------------------------


class Versions(NamedTuple):
    """Everything that made an answer, as `versions` of the answer shows it."""

    snapshot: str
    weights: str
    vocab: str
    policy: str
    policy_id: str
    contract: str


class Item(NamedTuple):
    """One recommended item; `score` is finite."""

    id: str
    score: float
    sid: tuple[int, ...]


class Exposure(NamedTuple):
    """One experiment's decision for one request."""

    layer: str
    name: str
    arm: str
    reason: str
    coverage: float | None = None


class Timings(NamedTuple):
    """Milliseconds: waiting in the queue, context stage, all steps and the final list; in all, from when the request
    was received until its answer is made."""

    queue: float
    context: float
    decode: float
    total: float


class ExplainedStep(NamedTuple):
    """What one step did with a request's candidates: candidates = the sum of `removed` + kept.

    parents     live beams that entered · candidates: every code under each of them
    legal       what trie, model, `exclude` and mask left
    removed     candidates that each phase took away, in the phases' order; phases that took none are not in it
    kept        survivors, of `planned` at most
    best, cut   the highest and the lowest rank among the survivors; None for none
    """

    step: int
    parents: int
    candidates: int
    legal: int
    removed: Mapping[str, int]
    kept: int
    planned: int
    best: float | None
    cut: float | None


class ExplainedItem(NamedTuple):
    """What became of one item.

    result  listed | unknown (not in the catalogue) | taken_down | excluded | masked | cut | final
    step    where it left · phase: what took it away there
    rank    its own, at that step (final: its score) · cut: that of the last that stayed
    place   its place, from 1, in the list or among the step's candidates · kept: how many places there were
    rule    of `final`: what the policy says there, `cap(item.author, max=2)`; place: among those whom the phase met
    """

    id: str
    result: Literal["listed", "unknown", "taken_down", "excluded", "masked", "cut", "final"]
    step: int | None = None
    phase: str | None = None
    rank: float | None = None
    cut: float | None = None
    place: int | None = None
    kept: int | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How an answer came about, from a second run of its request alone. mismatch: how that run differs from the answer,
    None where it gives the same items in the same order."""

    steps: tuple[ExplainedStep, ...]
    items: tuple[ExplainedItem, ...]
    mismatch: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request, before it is encoded. `unknown_*` count ids that the pinned vocab does not know;
    `batch_*` say what it was served with (requests, and rows of the widest step). level: how busy the server was at
    its admission; load: the same where the policy has load levels, else None."""

    request_id: str
    items: tuple[Item, ...]
    status: Literal["ok", "underfilled", "no_candidates"]
    reason: str | None
    versions: Versions
    experiments: tuple[Exposure, ...]
    seed: int
    load: str | None
    unknown_history: int
    unknown_exclude: int
    timings: Timings
    batch_requests: int
    batch_rows: int
    explanation: Explanation | None = None
    level: Level = "normal"


@dataclass(frozen=True, slots=True)
class Ranked:
    """The ranked list of one request: items [k'] int64 (item numbers of the pinned vocab), scores [k'] float32
    (finite, best first), sids [k', L] int32; bad: items that NaN or +inf in the policy's `final` cost."""

    items: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    sids: npt.NDArray[np.int32]
    bad: int = 0
