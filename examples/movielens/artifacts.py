"""Files: a trained seed, the catalogue in the plain form, a deployment root, the demo's users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from app.engine.families import onerec_config
from app.engine.families.onerec_config import OneRecConfig
from app.engine.families.onerec_reference import OneRecReference
from examples.movielens.data import Split

Ints = npt.NDArray[np.int64]

DEPLOYMENT = """\
# The demo: MovieLens ml-latest-small, a small OneRec-V2 model trained by examples/movielens.
family = "onerec"

[sid]
sizes = [{sizes}]

[limits]
widths = [512, 512, 512]
rows = 16384
batch = 32
context = {context}
k = 500

[server]
admin_auth = "none"       # on loopback only
policy_override = true    # the demo's requests may name a policy

[attributes]              # what policies may read of a prefix, from the films below it
fresh = {{of = "year", as = "share", least = 2010}}
any_fresh = {{of = "year", as = "any", least = 2010}}
category = {{of = "genre", as = "same"}}
cold = {{of = "ratings", as = "any", most = 5}}

[priors]
popularity = {{of = "ratings"}}

[lists]
old = {{of = "year", most = 1949}}

[request.user]            # what policies may read of a request: numbers with a default for those that bring none ...
age_days = {{default = 365, low = 0, high = 36500}}

[request.ctx]             # ... and texts, with the values that they are compared with
device = ["phone", "tv", "web"]
"""


def save_model(model: OneRecReference, directory: Path) -> None:
    """config.json and model.safetensors, float16."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = msgspec.json.format(msgspec.json.encode(model.config), indent=2)
    (directory / "config.json").write_bytes(config + b"\n")


def load_config(directory: Path) -> OneRecConfig:
    """config.json of what `save_model` wrote."""
    return onerec_config.parse(json.loads((directory / "config.json").read_text()))


def write_catalogue(split: Split, sids: npt.NDArray[np.int32], file: Path) -> None:
    """The films as JSON lines for `widebeam vocab import --format jsonl`: id, SID, title, year, genres, first genre,
    and ratings in the training part."""
    ratings = np.bincount(np.concatenate(split.train), minlength=len(split.films)).tolist()
    with file.open("wb") as out:
        for film, sid, count in zip(split.films, sids.tolist(), ratings, strict=True):
            attrs: dict[str, str | int] = {"title": film.title, "ratings": count}
            if film.year is not None:
                attrs["year"] = film.year
            if film.genres:
                attrs |= {"genre": film.genres[0], "genres": "|".join(film.genres)}
            out.write(msgspec.json.encode({"id": film.id, "sid": sid, "attrs": attrs}) + b"\n")


def write_deployment(config: OneRecConfig, file: Path) -> None:
    """deployment.toml for a trained model."""
    sizes = ", ".join(str(size) for size in config.sizes)
    file.write_text(DEPLOYMENT.format(sizes=sizes, context=config.positions))


def write_users(split: Split, chosen: Sequence[int], file: Path) -> None:
    """The demo's users: their films in time order, as ids and as titles, and the one that came after them."""
    people = []
    for user in chosen:
        *watched, held_out = (split.films[item] for item in split.sequences[user])
        people.append(
            {
                "id": str(split.users[user]),
                "history": [film.id for film in watched],
                "held_out": held_out.id,
                "watched": [film.title for film in watched],
                "held_out_title": held_out.title,
            }
        )
    file.write_bytes(msgspec.json.format(msgspec.json.encode(people), indent=1) + b"\n")
