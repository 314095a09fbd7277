"""What a front end's process and the engine's process say to each other; `translate` makes the rooms' own types of it.

Each front end has one socket to the engine. A message is one msgpack array that begins with its kind (`channel` frames
it). All times are monotonic seconds: both processes read CLOCK_MONOTONIC of one host, so they need no translation.
`number`: of a request or fetch, chosen by the front end, never used twice while it is open.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from app.config import Deployment
from app.core import Level, Outcome

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Headers = tuple[tuple[bytes, bytes], ...]


class Tensor(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array as it lies in memory, row-major."""

    dtype: Literal["<f4"]
    shape: tuple[Size, ...]
    data: bytearray


# ---- to the engine -------------------------------------------------------------------------------------------------


class Accepting(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The front end takes connections."""


class Admit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """A `core.Request`; one of its three contexts is there."""

    number: Number
    request_id: str
    history: tuple[str, ...] | None
    tokens: tuple[int, ...] | None
    embeddings: dict[str, Tensor] | None
    k: int
    user_id: str | None
    policy: str | None
    exclude: tuple[str, ...]
    ctx: dict[str, str]
    user: dict[str, float]
    received: float
    deadline: float | None
    seed: int | None
    arms: dict[str, str]
    explain: tuple[str, ...] | None
    load: Level | None


class Cancel(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Nobody waits for this request any more: its client has left, or its time is up."""

    number: Number


class Fetch(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """An HTTP request without its body for another route than the recommendations', as ASGI has it."""

    number: Number
    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers


class Requests(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests of one outcome under one policy (None: none was bound), and how many seconds each took."""

    outcome: str
    policy: str | None
    seconds: tuple[float, ...]


class Done(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """What the front end has counted since it said so last. shed: refusals by code · lags: its event loop's, seconds"""

    requests: tuple[Requests, ...]
    shed: dict[str, Size]
    lags: tuple[float, ...]


# ---- to the front end ----------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The first message: the deployment as the engine's process has read it. A front end reads no file."""

    deployment: Deployment
    leaving: bool


class Answer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The answer to a request."""

    number: Number
    outcome: Outcome


class Failed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The error that a request ended with. kind: its class in `app.errors`"""

    number: Number
    kind: str
    code: str
    message: str
    path: str | None
    retry_after_s: int | None


class Fetched(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The HTTP response to a fetch."""

    number: Number
    status: int
    headers: Headers
    body: bytes


class Leaving(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """The server is on its way out: from now on every answer ends its connection."""


class End(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Stop accepting, give what runs so many seconds, end."""

    timeout_s: float


ToEngine = Accepting | Admit | Cancel | Fetch | Done
ToFrontEnd = Hello | Answer | Failed | Fetched | Leaving | End
