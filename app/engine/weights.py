"""From a weights version on disk to an engine: everything is checked before anything serves.

A version is a directory with config.json, one or several *.safetensors (with model.safetensors.index.json where they
are several, optionally) and the tokenizer files of a token model. Nothing is unpickled, nothing stays mapped: every
tensor ends in memory of its own on the device, in the dtype of the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from app.config import Limits, Precision, SidConfig
from app.engine.engine import Engine
from app.engine.families.base import Family, ModelFiles
from app.engine.safetensors import DTYPES, Entry, read_header, read_tensor
from app.engine.tokens import read_json
from app.errors import Fault, Rejected

INDEX = "model.safetensors.index.json"
_LISTED = 8


class Target(NamedTuple):
    """Where a source tensor goes: rows of a parameter, taken from these rows of the source (None = all; -1 = zeros)."""

    parameter: Tensor
    first: int
    rows: Tensor | None


def load(
    directory: Path,
    family: type[Family],
    sid: SidConfig,
    limits: Limits,
    *,
    precision: Precision = "auto",
    device: torch.device,
) -> Engine:
    """Read, check and bind a weights version.

    Raises Rejected(code, message, location), location being "config.json: field", "model.safetensors: tensor",
    "deployment.toml: field" or a file: unreadable, truncated or malformed files; a configuration that the family does
    not take; tensors that are missing, left over, of another shape or dtype, or hold NaN or inf (after the cast, too).
    """
    dtype = resolve_precision(precision, device)
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    entries = read_entries(directory)
    shapes = {name: entry.shape for name, entry in entries.items()}
    module = family.build(ModelFiles(config, directory, shapes), sid, limits, dtype)
    _check_names(module, entries)
    _bind(module, entries, dtype, device)
    unread = tuple(name for name in module.ignored() if name in entries)
    return Engine(module, device=device, dtype=dtype, unread=unread)


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU and bfloat16 elsewhere. Raises Rejected("unsupported_precision")."""
    if precision == "fp8":
        raise Rejected("unsupported_precision", "no family computes in fp8 yet", location="deployment.toml: precision")
    if precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def read_entries(directory: Path) -> dict[str, Entry]:
    """Every tensor of a version by name, from the headers alone; the index, where there is one, must agree with them.

    Raises Rejected with the file.
    """
    try:
        files = sorted(directory.glob("*.safetensors"))
    except OSError as error:
        raise Rejected("unreadable", f"cannot be read: {error.strerror}", location=directory.name) from error
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


def _check_names(module: Family, entries: Mapping[str, Entry]) -> None:
    """Names, shapes and stored dtypes against `Family.weight_specs`."""
    specs = {spec.name: spec.shape for spec in module.weight_specs()}
    place = ", ".join(dict.fromkeys(entry.file.name for entry in entries.values()))
    missing = [name for name in specs if name not in entries]
    if missing:
        raise Rejected("missing_tensors", f"{len(missing)} missing: {_listed(missing)}", location=place)
    known = {*specs, *module.tied(), *module.ignored()}
    extra = [name for name in entries if name not in known]
    if extra:
        raise Rejected("unknown_tensors", f"{len(extra)} unknown to the model: {_listed(extra)}", location=place)
    for name, shape in specs.items():
        entry = entries[name]
        if entry.shape != shape:
            message = f"shape {list(entry.shape)}; config.json says {list(shape)}"
            raise Rejected("bad_shape", message, location=entry.location)
        if entry.dtype not in DTYPES:
            message = f"stored as {entry.dtype}; {', '.join(DTYPES)} can be served"
            raise Rejected("bad_dtype", message, location=entry.location)


def _listed(names: Iterable[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return ", ".join(shown[:_LISTED]) + (f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else "")


def _bind(module: Family, entries: Mapping[str, Entry], dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter its memory and fill it; each source is read once, whatever it goes into."""
    targets = _allocate(module, entries, dtype, device)
    copies = {source: name for name, source in module.tied().items() if name in entries}
    for source, places in targets.items():
        stored = _finite(read_tensor(entries[source]), entries[source], "holds")
        if source in copies and not torch.equal(stored, read_tensor(entries[copies[source]])):
            raise Rejected(
                "untied",
                f"differs from `{source}`, which config.json ties it to",
                location=entries[copies[source]].location,
            )
        cast = _finite(stored.to(dtype), entries[source], f"as {str(dtype).removeprefix('torch.')} holds")
        for target in places:
            part = cast if target.rows is None else _rows(cast, target.rows)
            target.parameter[target.first : target.first + len(part)].copy_(part)
    module.to(device)
    module.requires_grad_(requires_grad=False).eval()


def _allocate(
    module: Family, entries: Mapping[str, Entry], dtype: torch.dtype, device: torch.device
) -> dict[str, list[Target]]:
    bindings, targets = module.bindings(), defaultdict[str, list[Target]](list)
    for name, parameter in list(module.named_parameters()):
        if name not in bindings:
            raise Fault(f"{type(module).__name__}.bindings does not say how to make `{name}`")
        owner, _, leaf = name.rpartition(".")
        try:
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            raise Rejected("no_memory", f"no memory for `{name}` {list(parameter.shape)}: {error}") from error
        setattr(module.get_submodule(owner), leaf, nn.Parameter(memory, requires_grad=False))
        first, binding = 0, bindings[name]
        for source in binding.sources:
            size = len(binding.rows) if binding.rows is not None else entries[source].shape[0]
            targets[source].append(Target(memory, first, binding.rows))
            first += size
        if first != parameter.shape[0]:
            raise Fault(f"`{name}` has {parameter.shape[0]} rows, its sources {first}")
    return targets


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    picked = tensor[rows.clamp(min=0)]
    return picked.masked_fill_((rows < 0).view(-1, *[1] * (tensor.dim() - 1)), 0)


def _finite(tensor: Tensor, entry: Entry, verb: str) -> Tensor:
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise Rejected("not_finite", f"{verb} {bad} NaN or infinite values", location=entry.location)
    return tensor
