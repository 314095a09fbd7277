"""Item embeddings and ids from files, for `vocab build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from app.errors import Rejected, counted
from app.vocab.formats.npy import load_array, read_ids


def read_embeddings(path: Path, ids: Path | None, tensor: str | None) -> tuple[npt.NDArray[Any], list[str]]:
    """Embeddings [N, d] of an .npy or .safetensors file, and the items' ids (row numbers without an id file).

    tensor  which one, where a safetensors file holds several
    Raises Rejected with the file for anything else, and for another number of ids than rows.
    """
    points = _safetensors(path, tensor) if path.suffix == ".safetensors" else load_array(path)
    if points.ndim != 2 or points.dtype.kind not in "fiu":
        message = f"expected numbers [items, dim], got {points.dtype} {list(points.shape)}"
        raise Rejected("embeddings_shape", message, location=path.name)
    names = read_ids(ids) if ids else list(map(str, range(len(points))))
    if len(names) != len(points):
        raise Rejected(
            "ids_count",
            f"{counted(len(names), 'id')} for {counted(len(points), 'embedding')}",
            location=ids.name if ids else None,
        )
    return points, names


def _safetensors(path: Path, tensor: str | None) -> npt.NDArray[Any]:
    try:
        tensors = load_safetensors(path.read_bytes())
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        message = f"no safetensors file with types that NumPy has: {error}"
        raise Rejected("arrays_invalid", message, location=path.name) from error
    names = [tensor] if tensor is not None else list(tensors)
    if len(names) != 1 or names[0] not in tensors:
        asked = f"`{tensor}` is not there" if tensor is not None else "say which tensor"
        raise Rejected("tensor", f"{asked}; the file holds {', '.join(sorted(tensors)) or 'none'}", location=path.name)
    return np.asarray(tensors[names[0]])
