"""policies/traffic.yaml: the default policy, the unit, the holdout, the layers. Text -> draft with places; what the
draft means together with policies and experiments is `experiments.py`'s to say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from app.policies.assign import POINTS, SLOTS
from app.policies.diagnostics import Findings, Span
from app.policies.source import Items, Node, Scalar, Source, Table, compose
from app.policies.values import NAME, Entry, Given, Values

DEFAULT = "base"
FILE = "traffic.yaml"
UNITS = ("user_id", "device_id", "request_id")
MAX_LAYERS = 64

_UNIT = re.compile(r"ctx\.[A-Za-z_][A-Za-z0-9_]{0,62}|" + "|".join(UNITS))
_PERCENT = re.compile(r"(0|[1-9][0-9]{0,2})(\.[0-9]{1,4})?%")
_SALT = re.compile(r"[^\x00-\x20\x7f]{1,128}")


@dataclass(frozen=True, slots=True)
class LayerDraft:
    """A layer as written. params None = it chooses the policy."""

    name: Given[str]
    salt: Given[str]
    unit: Given[str]
    surfaces: tuple[str, ...]
    params: Mapping[str, Span] | None


@dataclass(frozen=True, slots=True)
class HoldoutDraft:
    """The holdout as written; `slots` of 10,000."""

    slots: int
    salt: Given[str]
    policy: Given[str]


@dataclass(frozen=True, slots=True)
class TrafficDraft:
    """traffic.yaml as written. default None: `base`, since the file names none that can be read."""

    start: Span
    unit: str = UNITS[0]
    default: Given[str] | None = None
    holdout: HoldoutDraft | None = None
    layers: Mapping[str, LayerDraft] = field(default_factory=dict)


def read_traffic(source: Source, found: Findings) -> TrafficDraft:
    """The draft of a file; what cannot be read is left out and reported."""
    start = Span(source.file, 1, 1, 2)
    root = compose(source, found)
    if root is None:
        return TrafficDraft(start)
    read = TrafficValues(found)
    entries = read.fields(
        root, "traffic", ("widebeam", "kind", "about", "owner", "default", "unit", "missing_unit", "holdout", "layers")
    )
    read.head(entries, "traffic", start)
    read.choice(entries.get("missing_unit"), ("default",))
    unit = read.unit(entries.get("unit"))
    return TrafficDraft(
        start=start,
        unit=unit.value if unit else UNITS[0],
        default=read.name(entries.get("default")),
        holdout=_holdout(read, entries.get("holdout")),
        layers=_layers(read, entries.get("layers"), unit.value if unit else UNITS[0]),
    )


def _holdout(read: TrafficValues, entry: Entry | None) -> HoldoutDraft | None:
    if entry is None:
        return None
    entries = read.fields(entry[1], "holdout", ("share", "salt", "policy"))
    read.require(entries, ("share", "salt", "policy"), entry)
    share, salt = read.percent(entries.get("share")), read.salt(entries.get("salt"))
    policy = read.name(entries.get("policy"))
    if share is None or salt is None or policy is None:
        return None
    if share.value % (POINTS // SLOTS):
        read.found.add("S011", share.span, "a holdout is cut at 0.01%", "write it with at most two decimals")
        return None
    return HoldoutDraft(share.value // (POINTS // SLOTS), salt, policy)


def _layers(read: TrafficValues, entry: Entry | None, unit: str) -> dict[str, LayerDraft]:
    layers: dict[str, LayerDraft] = {}
    if entry is None:
        return layers
    known = read.fields(entry[1], "layers", ())
    if len(known) > MAX_LAYERS:
        read.found.add("S012", entry[0].span, f"more than {MAX_LAYERS} layers")
    for name, (key, node) in list(known.items())[:MAX_LAYERS]:
        if not NAME.fullmatch(name):
            read.found.add("S011", key.span, f"`{name}` is no layer name", "names are a-z, 0-9 and _, a letter first")
            continue
        entries = read.fields(node, f"layer {name}", ("salt", "unit", "surfaces", "params"))
        read.require(entries, ("salt",), (key, node))
        salt = read.salt(entries.get("salt"))
        if salt is None:
            continue
        params = read.names(entries.get("params"))
        layers[name] = LayerDraft(
            name=Given(name, key.span),
            salt=salt,
            unit=read.unit(entries.get("unit")) or Given(unit, key.span),
            surfaces=tuple(read.names(entries.get("surfaces")) or ()),
            params=params if "params" in entries else None,
        )
    return layers


class TrafficValues(Values):
    """The values that traffic and experiments have beyond policies: shares, times, salts, units."""

    def head(self, entries: Mapping[str, Entry], kind: str, start: Span) -> None:
        """`widebeam: 1` and `kind: ...`."""
        self.version(entries.get("widebeam"), start)
        if "kind" not in entries:
            self.found.add("S009", start, "`kind` is missing", f"write `kind: {kind}`")
        self.choice(entries.get("kind"), (kind,))

    def require(self, entries: Mapping[str, Entry], words: tuple[str, ...], at: Entry | Span) -> None:
        """Report keys that are missing; `at` = the key that holds them, or where the file starts."""
        if isinstance(at, Span) or isinstance(at[1], Table):
            for word in words:
                if word not in entries:
                    place = at if isinstance(at, Span) else at[0].span
                    self.found.add("S009", place, f"`{word}` is missing")

    def percent(self, entry: Entry | None) -> Given[int] | None:
        """`12.5%` as millionths."""
        node = self.scalar(entry)
        if node is None:
            return None
        value = Decimal(node.text[:-1]) if _PERCENT.fullmatch(node.text) else None
        if value is None or value > 100:
            hint = "write 0% to 100% with at most four decimals, like `2.5%`"
            self.found.add("S011", node.span, f"`{node.text}` is no share", hint)
            return None
        return Given(int(value * (POINTS // 100)), node.span)

    def moment(self, entry: Entry | None) -> Given[float] | None:
        """`2026-11-01T00:00Z` as unix seconds."""
        node = self.scalar(entry)
        if node is None:
            return None
        try:
            when = datetime.fromisoformat(node.text)
        except ValueError:
            when = None
        if when is None or when.tzinfo is None:
            hint = "write it with its zone, like `2026-11-01T00:00Z`"
            self.found.add("S011", node.span, f"`{node.text}` is no moment in time", hint)
            return None
        return Given(when.astimezone(UTC).timestamp(), node.span)

    def salt(self, entry: Entry | None) -> Given[str] | None:
        """1 to 128 characters without spaces."""
        node = self.scalar(entry)
        if node is None:
            return None
        if not _SALT.fullmatch(node.text):
            self.found.add("S011", node.span, "a salt has 1 to 128 characters, none of them a space")
            return None
        return Given(node.text, node.span)

    def unit(self, entry: Entry | None) -> Given[str] | None:
        """The request field that is hashed."""
        node = self.scalar(entry)
        if node is None:
            return None
        if not _UNIT.fullmatch(node.text):
            hint = f"units: {', '.join(UNITS)}, ctx.NAME"
            self.found.add("S011", node.span, f"`{node.text}` is no unit", hint)
            return None
        return Given(node.text, node.span)

    def names(self, entry: Entry | None) -> dict[str, Span] | None:
        """A list of names, each once."""
        if entry is None:
            return None
        names: dict[str, Span] = {}
        for node in self.items(entry[1], entry[0].text):
            name = self.name((entry[0], node))
            if name is not None and name.value in names:
                self.found.add("S003", name.span, f"`{name.value}` is given twice in {entry[0].text}")
            elif name is not None:
                names[name.value] = name.span
        return names

    def scalar(self, entry: Entry | None) -> Scalar | None:
        """The text under a key; None where there is no key, or (reported) no text."""
        if entry is None:
            return None
        if not isinstance(entry[1], Scalar):
            self.refuse_form(entry[1], f"`{entry[0].text}` takes one value", "")
            return None
        return entry[1]

    def sequence(self, node: Node, where: str, size: int) -> tuple[Node, ...] | None:
        """A list of exactly `size` entries."""
        if isinstance(node, Items) and len(node.items) == size:
            return node.items
        self.refuse_form(node, f"`{where}` is a list of {size} values", "")
        return None
