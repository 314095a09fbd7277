"""deployment.toml: the overlay that a person writes. Parsing is pure; nothing edits a Deployment later."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, inspect

from app.errors import BadDeployment, LeadsOut, counted

DEPLOYMENT: Final = "deployment.toml"
MAX_DEPLOYMENT: Final = 1 << 20
LOOKS: Final = 8
"""How often a file is opened anew that is replaced in that moment."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Precision = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
FieldName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}\Z")]
Bounded = Annotated[float, Meta(ge=-1e30, le=1e30)]


class SidConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an SID is written. sizes: codes of each step. The others are for token models (docs/models.md)."""

    sizes: tuple[Annotated[int, Meta(ge=1, le=2**24)], ...]
    token_base: tuple[Natural, ...] | None = None
    tokens: str | None = None
    prefix: tuple[Natural, ...] = ()


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a server must be able to hold. widths () means 512 after every step; `parse` fills it in."""

    widths: tuple[Positive, ...] = ()
    rows: Positive = 16384
    batch: Positive = 32
    context: Positive = 512
    k: Positive = 1000
    queue: Positive = 1024
    rollback: Natural = 1

    @property
    def widest(self) -> int:
        """Rows that a request has at any step, at most."""
        return max(self.widths, default=self.rows)


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The process: sockets, admin, state. Times in seconds, sizes in bytes.

    watch  "polling" = do not ask the operating system for events; every change is still found within seconds
    model_name     what clients of TensorFlow Serving's and the Open Inference Protocol's routes call the model
    strict  an edit of policies goes live as a whole or not at all: with an error in one file, none of them changes
    front_ends     processes that speak HTTP for this one, which then serves the model alone; 0 = this one does both
    explain_per_s  answers that may be explained in a second: each costs one request's engine time; 0 = none
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_port: Port = 8001
    admin_auth: Literal["token", "none"] = "token"
    admin_tokens: str | None = None
    policy_override: bool = False
    arm_override: bool = False
    strict: bool = False
    state_dir: str = "state"
    watch: Literal["events", "polling"] = "events"
    max_body: Positive = 8 * 2**20
    read_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    keep_alive_s: Annotated[float, Meta(gt=0, le=3600)] = 75.0
    drain_delay_s: Annotated[float, Meta(ge=0, le=600)] = 0.5
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    threads: Natural = 0
    front_ends: Annotated[int, Meta(ge=0, le=64)] = 0
    explain_per_s: Annotated[float, Meta(ge=0, le=1000)] = 2.0
    model_name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] = "widebeam"


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is written down. level: lowest level of the log itself.

    requests    share of requests that are recorded whole under state/requests/; 0 = none
    exposures   whether each request of an experiment leaves a line under state/exposures/
    units       how both name users: "hashed" (keyed by unit_salt; "" = a key made once, in state/unit_salt) or "plain"
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: Annotated[float, Meta(ge=0, le=1)] = 0.0
    exposures: bool = True
    units: Literal["hashed", "plain"] = "hashed"
    unit_salt: str = ""


class Items(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which items of the catalogue have something, by their attribute `of`.

    is_          texts: one of these labels; without it any text
    least, most  numbers: in this range, both ends included; without both, anything but 0
    An item without the attribute never has it.
    """

    of: str
    is_: str | tuple[str, ...] | None = msgspec.field(name="is", default=None)
    least: Bounded | None = None
    most: Bounded | None = None


class Attribute(Items, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What policies read as attr.NAME of a prefix, made from the items below it.

    as_      numbers: max, min, mean, sum · share (of the items that `Items` describes), any (whether there is one) ·
             same: the text that all items below have, unknown where they differ or one has none
    default  the number of an item that has none
    from_    the first step at which policies may read it
    """

    as_: Literal["max", "min", "mean", "sum", "share", "any", "same"] = msgspec.field(name="as")
    default: Bounded | None = None
    from_: Positive = msgspec.field(name="from", default=1)


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """prior.NAME of a prefix in nats: log of its share of the weight `of` all items, or of those below its parent."""

    of: str
    per: Literal["prefix", "edge"] = "prefix"


class UserField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A number that requests bring under `user`. default: of requests that bring none; None = a policy that reads it
    cannot serve them · low, high: what it may be, where that is known."""

    default: Bounded | None = None
    low: Bounded | None = None
    high: Bounded | None = None


class RequestFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What policies may read of a request. ctx: the texts that a field may be compared with; () = any."""

    user: dict[FieldName, UserField] = {}
    ctx: dict[FieldName, tuple[str, ...]] = {}


NO_FIELDS = RequestFields()
"""A deployment whose policies read nothing of its requests."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the server is `busy` and when it is `quiet` (runtime/load.py).

    busy, quiet  mean backlog from which it is busy, and below which it may be quiet, in full batches that wait
    window_s     over how long the mean is taken · hold_s: how long half a threshold must hold before a level goes down
    """

    busy: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    quiet: Annotated[float, Meta(gt=0, le=1e6)] = 0.1
    window_s: Annotated[float, Meta(gt=0, le=600)] = 1.0
    hold_s: Annotated[float, Meta(ge=1, le=600)] = 30.0


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model is laid out over devices. Reserved: tensor parallelism over one device is all there is."""

    tp: Literal[1] = 1


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parsed deployment.toml. `family` is checked against the installed families by the composition root."""

    family: str
    sid: SidConfig
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = "auto"
    limits: Limits = Limits()
    parallel: Parallel = Parallel()
    server: Server = Server()
    log: Log = Log()
    attributes: dict[FieldName, Attribute] = {}
    priors: dict[FieldName, Prior] = {}
    lists: dict[FieldName, Items] = {}
    request: RequestFields = NO_FIELDS
    load: Load = Load()


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path that is written as one below a folder is none, links followed. What it leads to need not be."""
    return _inside(path, folder) is None


def _inside(path: Path, folder: Path) -> Path | None:
    """Where in a folder a path leads to; no link is in that."""
    try:
        found = path.resolve()
        return found if found.is_relative_to(folder.resolve()) else None
    except (OSError, RuntimeError):  # a link that leads to itself
        return None


def open_inside(file: Path, folder: Path | None) -> int:
    """A descriptor for reading, which never waits for a writer. Links may lead anywhere inside the folder and nowhere
    else; None: anywhere. Raises OSError, LeadsOut of those before anything is opened; a link that is made or pointed
    elsewhere at that moment may open another file: that is closed, unread."""
    how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    if folder is None:
        return os.open(file, how)
    for _ in range(LOOKS):
        inside = _inside(file, folder)
        if inside is None:
            raise LeadsOut
        descriptor = os.open(file, how)
        if _lies_at(descriptor, inside):
            return descriptor
        os.close(descriptor)
    raise OSError(errno.ESTALE, "is replaced all the time")


def _lies_at(descriptor: int, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(place))
    except OSError:  # it was there a moment ago
        return False


def read_small(file: Path, most: int, folder: Path | None = None) -> bytes:
    """At most `most` bytes of a regular file, -1 = all; folder: of `open_inside`. Raises OSError; anything else than a
    regular file (a FIFO would make its reader wait for ever) is one."""
    descriptor = open_inside(file, folder)
    try:  # `fdopen` of a folder raises, and would leave it open
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(most)
    finally:
        os.close(descriptor)


class Unread(NamedTuple):
    """Why there are no bytes of deployment.toml."""

    code: str
    message: str

    def error(self) -> BadDeployment:
        """To raise."""
        found = BadDeployment(self.message, file=DEPLOYMENT)
        found.code = self.code
        return found


def read_overlay(root: Path) -> bytes | Unread:
    """The bytes of ROOT/deployment.toml, whole, or why there are none: the same for a start as for an edit."""
    try:
        data = read_small(root / DEPLOYMENT, MAX_DEPLOYMENT + 1, root)
    except LeadsOut as error:
        return Unread("path_escape", str(error.strerror))
    except OSError as error:
        return Unread("bad_deployment", f"cannot be read: {error.strerror or error}")
    return data if len(data) <= MAX_DEPLOYMENT else Unread("bad_deployment", f"has more than {MAX_DEPLOYMENT} bytes")


def decode(data: bytes | Unread) -> str:
    """Its text. Raises BadDeployment."""
    if isinstance(data, Unread):
        raise data.error()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadDeployment("is not UTF-8", file=DEPLOYMENT) from error


def read_json(data: bytes) -> object:
    """JSON in UTF-8, in which no object says a key twice: of two, every reader takes another. Raises ValueError,
    RecursionError."""
    value: object = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    return value


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key `{twice[:128]}` is there twice")
    return found


def parse(text: str, file: str = DEPLOYMENT) -> Deployment:
    """Read a deployment overlay.

    Raises BadDeployment with file and line for TOML errors, unknown keys, wrong types and values that contradict each
    other. `limits.policy_override` is accepted as another place for `server.policy_override`.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise BadDeployment(str(error), file=file, line=int(line[1]) if line else 0) from error
    except (ValueError, RecursionError) as error:  # numbers and nesting beyond what Python reads
        raise BadDeployment(str(error) or "is nested too deeply", file=file) from error
    tree = _move_override(tree, text, file)
    try:
        deployment = msgspec.convert(tree, Deployment)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        place = _named(tree, path.rstrip("`") or "$", str(error))
        said = _helped(message, place)
        raise BadDeployment(
            f"{said} ({place})" if place != "$" else said, file=file, line=locate(text, place, message)
        ) from error
    return _checked(deployment, text, file)


def _helped(message: str, place: str) -> str:
    """What msgspec says of an unknown key or a value that is none of those, with the ones that there are."""
    unknown, wrong = re.search(r"unknown field `(.+)`", message), re.search(r"Invalid enum value (.+)", message)
    if unknown:
        here = _keys(_type_at(place))
        near = get_close_matches(unknown[1], here, n=1, cutoff=0.7)
        tables = {one.encode_name: _keys(one.type) for one in _type_at("$").fields}
        others = [f"`{unknown[1]}` under [{name}]" for name, keys in tables.items() if unknown[1] in keys]
        ends = [f"did you mean {one}?" for one in (*others, *(f"`{one}`" for one in near))]
        return f"unknown key `{unknown[1]}`; {(*ends, 'known: ' + _listed(here))[0]}"
    if wrong:
        values = [str(value) for value in getattr(_type_at(place), "values", ())]
        near = get_close_matches(wrong[1].strip("'"), values, n=1, cutoff=0.7)
        return f"{wrong[1]} is none of {_listed(values)}" + (f"; did you mean `{near[0]}`?" if near else "")
    return message


def _type_at(place: str) -> Any:
    """What may stand at a path such as `$.attributes.fresh.as`, as `msgspec.inspect` describes it."""
    found: Any = inspect.type_info(Deployment)
    for name in re.findall(r"[^.\[\]]+", place)[1:]:
        if isinstance(found, inspect.DictType):
            found = found.value_type
        elif isinstance(found, inspect.StructType):
            found = next(one.type for one in found.fields if one.encode_name == name)
        else:
            break
    return found


def _keys(of: object) -> list[str]:
    return [one.encode_name for one in of.fields] if isinstance(of, inspect.StructType) else []


def _listed(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _named(tree: dict[str, object], place: str, error: str) -> str:
    """The path of a fault with the name of the entry in it, which msgspec leaves out: `$.request.user[...].low` of an
    entry, "key` in `$.lists" of a name itself."""
    above, inside, rest = place.removeprefix("key` in `").partition("[...]")
    tables, entries = above.split(".")[1:], tree
    for table in tables:
        found = entries.get(table)
        entries = found if isinstance(found, dict) else {}
    if not inside and above == place:
        return place
    for name, entry in entries.items():
        try:
            msgspec.convert(_alone(tree, tables, {name: entry}), Deployment)
        except msgspec.ValidationError as own:
            if str(own) == error:
                return f"{above}.{name}{rest}"
    return above if above != place else place


def _alone(tree: dict[str, object], tables: list[str], entries: dict[str, object]) -> dict[str, object]:
    """The tree with other entries in one of its tables."""
    if not tables:
        return entries
    inner = tree[tables[0]]
    assert isinstance(inner, dict), "walked before"
    return {**tree, tables[0]: _alone(inner, tables[1:], entries)}


def _move_override(tree: dict[str, object], text: str, file: str) -> dict[str, object]:
    limits, server = tree.get("limits"), tree.get("server", {})
    if not (isinstance(limits, dict) and isinstance(server, dict) and "policy_override" in limits):
        return tree
    if "policy_override" in server:
        line = locate(text, "$.limits.policy_override")
        raise BadDeployment("`policy_override` is given under both [limits] and [server]", file=file, line=line)
    rest = {key: value for key, value in limits.items() if key != "policy_override"}
    return {**tree, "limits": rest, "server": {**server, "policy_override": limits["policy_override"]}}


def _checked(deployment: Deployment, text: str, file: str) -> Deployment:
    def bad(message: str, path: str) -> BadDeployment:
        return BadDeployment(message, file=file, line=locate(text, path))

    sid, limits = deployment.sid, deployment.limits
    steps = len(sid.sizes)
    if not 1 <= steps <= 16:
        raise bad(f"`sizes` has {counted(steps, 'step')}; 1 to 16 are possible", "$.sid.sizes")
    if sid.token_base is not None and sid.tokens is not None:
        raise bad("give `token_base` or `tokens`, not both", "$.sid.tokens")
    if sid.token_base is not None and len(sid.token_base) != steps:
        raise bad(
            f"`token_base` has {counted(len(sid.token_base), 'entry', 'entries')} for {counted(steps, 'step')}",
            "$.sid.token_base",
        )
    if limits.widths and len(limits.widths) != steps:
        raise bad(
            f"`widths` has {counted(len(limits.widths), 'entry', 'entries')} for {counted(steps, 'step')}",
            "$.limits.widths",
        )
    widths = limits.widths or (512,) * steps
    if max(widths) > limits.rows:
        raise bad(
            f"width {max(widths)} is above `rows` {limits.rows}",
            "$.limits.rows" if not limits.widths else "$.limits.widths",
        )
    for name, field in deployment.request.user.items():
        place = f"$.request.user.{name}"
        if problem := _field_problem(field):
            raise bad(f"user field `{name}` {problem}", place)
    if not deployment.load.quiet < deployment.load.busy:
        raise bad(f"`quiet` {deployment.load.quiet:g} is not below `busy` {deployment.load.busy:g}", "$.load.quiet")
    for table, columns in (("attributes", deployment.attributes), ("lists", deployment.lists)):
        for name, column in columns.items():
            problem = _misdeclared(column, steps)
            if problem:
                raise bad(f"`{table}.{name}`: {problem}", f"$.{table}.{name}")
    return msgspec.structs.replace(deployment, limits=msgspec.structs.replace(limits, widths=widths))


def _misdeclared(declared: Items, steps: int) -> str | None:
    """What is wrong with a column by itself; whether the catalogue has what it needs shows when a vocab is loaded."""
    least = -math.inf if declared.least is None else declared.least
    most = math.inf if declared.most is None else declared.most
    bounded = (least, most) != (-math.inf, math.inf)
    if declared.is_ is not None and bounded:
        return "`is` is for texts, `least` and `most` are for numbers"
    if least > most:
        return f"no number lies between {least:g} and {most:g}"
    if not isinstance(declared, Attribute):
        return None
    if (declared.is_ is not None or bounded) and declared.as_ not in ("share", "any"):
        return f"`is`, `least` and `most` say what `share` and `any` count; `as` is `{declared.as_}`"
    if declared.default is not None and declared.as_ not in ("max", "min", "mean", "sum"):
        return f"`default` is for max, min, mean and sum; `as` is `{declared.as_}`"
    return f"`from` is step {declared.from_} of {steps}" if declared.from_ > steps else None


def _field_problem(field: UserField) -> str | None:
    """What contradicts itself in a declaration. TOML has nan and inf."""
    low = -math.inf if field.low is None else field.low
    high = math.inf if field.high is None else field.high
    if any(value is not None and not math.isfinite(value) for value in (field.default, field.low, field.high)):
        return "has a value that is no finite number"
    if low > high:
        return f"has `low` {low:g} above `high` {high:g}"
    if field.default is not None and not low <= field.default <= high:
        return f"has the default {field.default:g} outside {low:g} to {high:g}"
    return None


def locate(text: str, path: str, message: str = "") -> int:
    """The line (1-based; 0 = not found) of a msgspec path such as `$.sid.sizes[1]` in TOML text.

    An unknown field is named in the message, not in the path, so the message is searched for it.
    """
    unknown = re.search(r"unknown field `([^`]+)`", message)
    keys = re.findall(r"\.([A-Za-z0-9_-]+)", path) + ([unknown[1]] if unknown else [])
    wanted, section, line_of_section = ".".join(keys), "", 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        if header:
            section = header[1]
            if section == wanted:
                return number
            if keys and section == ".".join(keys[:-1]):
                line_of_section = number
            continue
        key = re.match(r"\s*([A-Za-z0-9_.\"-]+)\s*=", line)
        full = ".".join(filter(None, [section, key[1].strip('"')])) if key else ""
        if key and wanted == full:
            return number
        if full and wanted.startswith(f"{full}."):  # inside an inline table
            line_of_section = number
    return line_of_section
