"""From a weights version on disk to an engine: everything is checked before anything serves.

A version is a directory with config.json, one or several *.safetensors (with model.safetensors.index.json where they
are several, optionally) and the tokenizer files of a token model. Nothing is unpickled, nothing stays mapped: every
file is read once, hashed and looked at on the way, and every tensor ends in a weight slot on the device, in the dtype
of the engine. A load that fails leaves a slot with garbage in it, which nobody has a reference to.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from app.config import Limits, Precision, SidConfig
from app.engine.engine import Engine
from app.engine.families.base import Family, ModelFiles
from app.engine.fp8 import carrier, install, quantised
from app.engine.placing import Target, clear, place
from app.engine.safetensors import DTYPES, Entry, Reader, read_header
from app.engine.slots import Bound, Layout, Slot, Slots
from app.engine.tokens import read_json
from app.errors import Fault, Rejected, counted, unreadable
from app.ops.fp8 import FP8, unfit

INDEX = "model.safetensors.index.json"
_LISTED = 8


class Opened(NamedTuple):
    """A version whose config, headers, names and shapes have been looked at: nothing is read of its tensors yet.

    module     the family, without memory for its parameters, or that of a free slot
    made_from  what that was made from, None where nobody can say · bound: of the free slot
    """

    files: ModelFiles
    entries: Mapping[str, Entry]
    module: Family
    made_from: object = None
    bound: Bound | None = None


def open_version(
    directory: Path,
    family: type[Family],
    sid: SidConfig,
    limits: Limits,
    wanted: torch.dtype,
    *,
    slots: Slots | None = None,
    beside: frozenset[tuple[str, str]] | None = None,
    between: Callable[[], None] = lambda: None,
    room: Callable[[], None] = lambda: None,
) -> Opened:
    """Look at a weights version. Raises Rejected as `load`, all findings about names and shapes together.

    wanted  of `resolve_precision` · between: as in `load`
    room    called before a module is made: raises where there is no memory for it
    beside  digests of every file but the tensors, by name. With them, a free slot of `slots` whose module was made from
            the same is used again with it, and `load` is to have the same slots
    """
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    entries = read_entries(directory)
    files = ModelFiles(config, directory, {name: entry.shape for name, entry in entries.items()})
    between()
    tensors = tuple((entry.name, entry.dtype, entry.shape) for entry in entries.values())
    made_from = None if beside is None else (family, sid, limits, wanted, beside, tensors)
    bound = slots.bound(made_from) if slots is not None and beside is not None else None
    if bound is not None:
        return Opened(files, entries, bound.module, made_from, bound)
    room()
    module = family.build(files, sid, limits, carrier(wanted))
    between()
    if found := tuple(name_findings(module, entries)):
        raise Rejected.together(found)
    return Opened(files, entries, module, made_from)


def load(
    directory: Path,
    family: type[Family],
    sid: SidConfig,
    limits: Limits,
    *,
    precision: Precision = "auto",
    device: torch.device,
    slots: Slots | None = None,
    sha256: Mapping[str, str] | None = None,
    opened: Opened | None = None,
    between: Callable[[], None] = lambda: None,
    checked: Callable[[], None] = lambda: None,
) -> Engine:
    """Read, check and bind a weights version.

    slots   the memory that it may use; None: memory of its own
    sha256  digests (hex) of the *.safetensors files by name, compared while they are read; None: nobody asks
    opened  of `open_version` for the same arguments, where that has been done; its module becomes the engine's
    between called between pieces of work
    checked called when all has been read, and raises where it was not what it should have been: a module that was made
            of something else is not used again

    Raises Rejected(code, message, location), location being "config.json: field", "model.safetensors: tensor",
    "deployment.toml: field" or a file: unreadable, truncated or malformed files, other digests; a configuration that
    the family does not take; tensors that are missing, left over, of another shape or dtype, or hold NaN or inf (after
    the cast, too); no free slot, no memory.
    """
    wanted = resolve_precision(precision, device)
    dtype, reason = carrier(wanted), unfit(device) if wanted == FP8 else None
    if reason is not None:
        raise Rejected("unsupported_precision", reason, location="deployment.toml: precision")
    opened = opened or open_version(directory, family, sid, limits, wanted, between=between)
    entries, module, bound = opened.entries, opened.module, opened.bound
    slot = (slots or Slots()).take(bound.layout if bound is not None else layout(module, wanted, device), bound)
    try:
        if bound is None:
            bound = Bound(opened.made_from, slot.layout, module, _targets(module, entries, slot, between))
        _fill(bound, entries, slot, dtype, sha256, between)
        checked()
    except BaseException:
        slot.release()  # whoever keeps the exception keeps no memory
        raise
    slot.keep(bound)
    unread = tuple(name for name in module.ignored() if name in entries)
    return Engine(module, device=device, dtype=dtype, unread=unread, slot=slot)


def layout(module: Family, wanted: torch.dtype, device: torch.device) -> Layout:
    """The memory of a family's parameters. wanted: of `resolve_precision`. Raises Rejected("unsupported_precision")."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return Layout(shapes, carrier(wanted), device, frozenset(quantised(module, wanted)))


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU and bfloat16 elsewhere. "fp8" is the dtype of projections; `fp8.carrier` says what
    goes with it."""
    if precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"fp8": FP8, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def read_entries(directory: Path) -> dict[str, Entry]:
    """Every tensor of a version by name, from the headers alone; the index, where there is one, must agree with them.

    Raises Rejected with the file.
    """
    try:
        files = sorted(directory.glob("*.safetensors"))
    except OSError as error:
        raise unreadable(error, "unreadable", directory.name) from error
    if not files:
        message = "holds no *.safetensors file (pickled weights are never read)"
        raise Rejected("no_weights", message, location=directory.name)
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise Rejected("duplicate_tensor", f"also in {entries[name].file.name}", location=entry.location)
            entries[name] = entry
    if (directory / INDEX).exists():
        _check_index(read_json(directory / INDEX), entries)
    return entries


def _check_index(index: object, entries: Mapping[str, Entry]) -> None:
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise Rejected("bad_index", "has no weight_map of tensor names to files", location=INDEX)
    for name, file in table.items():
        if name not in entries:
            raise Rejected("bad_index", f"`{name}` is in no safetensors file here ({file} is named)", location=INDEX)
        if entries[name].file.name != file:
            message = f"`{name}` is in {entries[name].file.name}, not in {file}"
            raise Rejected("bad_index", message, location=INDEX)
    for name, entry in entries.items():
        if name not in table:
            raise Rejected("bad_index", "the index does not name this tensor", location=entry.location)


def name_findings(module: Family, entries: Mapping[str, Entry]) -> Iterator[Rejected]:
    """Names, shapes and stored dtypes against `Family.weight_specs`: everything that is wrong with them."""
    specs = {spec.name: spec.shape for spec in module.weight_specs()}
    place = ", ".join(dict.fromkeys(entry.file.name for entry in entries.values()))
    missing = [name for name in specs if name not in entries]
    if missing:
        yield Rejected("missing_tensors", f"{len(missing)} missing: {_listed(missing)}", location=place)
    known = {*specs, *module.tied(), *module.ignored()}
    extra = [name for name in entries if name not in known]
    if extra:
        yield Rejected("unknown_tensors", f"{len(extra)} unknown to the model: {_listed(extra)}", location=place)
    for name, shape in specs.items():
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.shape != shape:
            message = f"shape {list(entry.shape)}; config.json says {list(shape)}"
            yield Rejected("bad_shape", message, location=entry.location)
        if entry.dtype not in DTYPES:
            message = f"stored as {entry.dtype}; {', '.join(DTYPES)} can be served"
            yield Rejected("bad_dtype", message, location=entry.location)


def _listed(names: Iterable[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown[:_LISTED]) + (f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else "")


def _fill(
    bound: Bound,
    entries: Mapping[str, Entry],
    slot: Slot,
    dtype: torch.dtype,
    sha256: Mapping[str, str] | None,
    between: Callable[[], None],
) -> None:
    """Fill the parameters' memory from the files, each read once from front to back."""
    tied = {name: source for name, source in bound.module.tied().items() if name in entries}
    bytes_of: dict[str, str] = {}
    with _copying(slot):
        for file in dict.fromkeys(entry.file for entry in entries.values()):
            with Reader(file, between) as reader:
                if any(entries.get(name) != entry for name, entry in reader.entries.items()):
                    raise Rejected("changed_on_disk", "has changed while it was being read", location=file.name)
                for name, entry in reader.entries.items():
                    between()
                    compared = hashlib.sha256() if name in tied or name in tied.values() else None
                    own = bound.targets.get(name, ())
                    _read(reader, entry, own, dtype, compared, checked=bool(own))
                    if compared is not None:
                        bytes_of[name] = compared.hexdigest()
                if sha256 is not None and sha256.get(file.name) != reader.sha256():
                    raise Rejected("file_digest", "is not what the manifest says", location=file.name)
    for name, source in tied.items():
        if (entries[name].dtype, bytes_of[name]) != (entries[source].dtype, bytes_of[source]):
            message = f"differs from `{source}`, which config.json ties it to"
            raise Rejected("untied", message, location=entries[name].location)


def _targets(
    module: Family, entries: Mapping[str, Entry], slot: Slot, between: Callable[[], None]
) -> dict[str, list[Target]]:
    """Make the slot's memory the module's parameters; by source tensor, where its rows go."""
    bindings, targets = module.bindings(), defaultdict[str, list[Target]](list)
    for name, parameter in list(module.named_parameters()):
        if name not in bindings:
            raise Fault(f"{type(module).__name__}.bindings does not say how to make `{name}`")
        owner, _, leaf = name.rpartition(".")
        memory, scale = slot.tensors[name], slot.tensors.get(f"{name}.scale")
        install(module.get_submodule(owner), leaf, memory, scale)
        first, binding = 0, bindings[name]
        if binding.transpose and parameter.dim() != 2:
            raise Fault(f"`{name}` is no matrix: its sources cannot be transposed")
        plain = binding.rows is None and scale is None and not binding.transpose
        for source, times in _runs(binding.sources, together=plain):
            own = entries[source].shape[1 if binding.transpose else 0]
            if times > 1:
                several = memory.narrow(0, first, times * own).view(times, own, *memory.shape[1:]).transpose(0, 1)
                targets[source].append(Target(several, 0, None, times=times))
            else:
                targets[source].append(Target(memory, first, binding.rows, scale, binding.transpose))
            first += times * (own if binding.rows is None else len(binding.rows))
        if first != parameter.shape[0]:
            raise Fault(f"`{name}` has {parameter.shape[0]} rows, its sources {first}")
        between()
    with _copying(slot):
        module.to(slot.device)  # the family's constants
    module.requires_grad_(requires_grad=False).eval()
    return targets


def _runs(sources: Sequence[str], *, together: bool) -> Iterator[tuple[str, int]]:
    """Sources in their order, and how often each is named in a row; once, unless these are taken together. A norm of
    every head is one source some twenty times."""
    for source, same in groupby(sources):
        times = len(tuple(same))
        yield from [(source, times)] if together else [(source, 1)] * times


@contextmanager
def _copying(slot: Slot) -> Iterator[None]:
    """Where there is a GPU, copies go through a stream of their own: the batches that run do not wait for them."""
    if slot.device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(slot.device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _read(
    reader: Reader,
    entry: Entry,
    targets: Sequence[Target],
    dtype: torch.dtype,
    compared: hashlib._Hash | None,
    *,
    checked: bool,
) -> None:
    """One tensor's rows to wherever they go. Raises Rejected for NaN and infinities, before and after the cast, where
    they are `checked`: what the family leaves alone need not be finite."""
    bad, overflown, rows = 0, 0, entry.shape[0] if entry.shape else 1
    stored = DTYPES.get(entry.dtype) if checked else None
    if stored is None:
        rows = entry.size  # by bytes: who only goes past it does not care for its rows, and one of them may be all
    later = [target for target in targets if target.whole]
    whole = torch.empty(entry.shape if later else 0, dtype=stored)
    alone = len(targets) < 2 and not any(one.transpose or one.times > 1 for one in targets)  # then a copy casts it, too
    clear(targets)
    for first, data in reader.read(entry, rows):
        if compared is not None:
            compared.update(data.data)
        if stored is None:
            continue
        count = min(rows - first, len(data) // max(entry.size // max(rows, 1), 1))
        piece = torch.from_numpy(data).view(stored).view(count, *entry.shape[1:])
        if not _finite(piece, dtype):
            bad += _not_finite(piece)
            overflown += 0 if stored == dtype else _not_finite(piece.to(dtype))
        if later:
            whole[first : first + count] = piece
        ready: dict[torch.dtype, Tensor] = {}
        for target in targets:
            if not target.whole:
                kind = dtype if target.scale is None else piece.dtype
                if kind not in ready:
                    ready[kind] = _on_its_way(piece, kind, target.parameter.device, alone=alone)
                place(target, first, ready[kind])
    for target in later:
        place(target._replace(transpose=False), 0, whole.t())
    for count, verb in ((bad, "holds"), (overflown, f"as {str(dtype).removeprefix('torch.')} holds")):
        if count:
            raise Rejected("not_finite", f"{verb} {counted(count, 'NaN or infinite value')}", location=entry.location)


def _on_its_way(piece: Tensor, dtype: torch.dtype, device: torch.device, *, alone: bool) -> Tensor:
    """A piece in the dtype that its targets want. A GPU reads it from pinned memory: while memory that is not pinned is
    copied, no other thread can launch anything. alone: it goes to one place as it is, and is cast on the way there."""
    if device.type != "cuda":
        return piece if alone else piece.to(dtype)
    pinned = torch.empty(piece.shape, dtype=dtype, pin_memory=True).copy_(piece)
    return pinned if alone else pinned.to(device, non_blocking=True)


def value_findings(module: Family, entries: Mapping[str, Entry], dtype: torch.dtype) -> Iterator[Rejected]:
    """NaN and infinities in every tensor that the family reads, before and after the cast. Reads every file once.

    Raises Rejected where a file cannot be read to its end.
    """
    wanted = {spec.name for spec in module.weight_specs()}
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with Reader(file) as reader:
            for name, entry in reader.entries.items():
                try:
                    _read(reader, entry, (), dtype, None, checked=name in wanted)
                except Rejected as error:
                    if error.code != "not_finite":
                        raise
                    yield error


def _finite(piece: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite in a dtype, for certain: the least and the greatest are (a NaN is both), and
    rounding keeps the order. One pass, in a twentieth of the time that a look at each value takes."""
    if not piece.numel():
        return True
    low, high = map(float, torch.aminmax(piece))
    most = torch.finfo(dtype).max
    return -most <= low and high <= most


def _not_finite(piece: Tensor) -> int:
    return piece.numel() - int(torch.isfinite(piece).sum())
