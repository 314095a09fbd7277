"""`widebeam weights`: model weights into a deployment root."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from app.cli.deployment import read_deployment
from app.cli.groups import group
from app.cli.output import JsonFlag, print_json, progress, say
from app.cli.vocab import Root, Version, made_by, new_version
from app.engine.weights import read_entries
from app.errors import Rejected, counted
from app.runtime.expectations import FILE as CANARY
from app.runtime.expectations import read_asked
from app.runtime.recording import recorded
from app.vocab.manifest import Kind
from app.vocab.publish import Draft, Published, commit, draft

app = group("Publish model weights into a deployment root.")

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Never read and never copied: loading a pickle runs whatever code it holds."""
BESIDE = frozenset(
    {
        "added_tokens.json", CANARY, "chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
        "model.safetensors.index.json", "sentencepiece.bpe.model", "sid_tokens.json", "special_tokens_map.json",
        "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    }
)  # fmt: skip
"""What is copied along with the *.safetensors files."""


@app.callback()
def weights() -> None:
    """Publish model weights into a deployment root."""


@app.command()
def publish(
    src: Annotated[Path, typer.Argument(metavar="SRC", exists=True, file_okay=False, help="A Hugging Face directory")],
    root: Root = Path(),
    version: Version = None,
    requires_vocab: Annotated[
        list[str] | None, typer.Option(help="Vocab version or digest that these weights go with; may be repeated")
    ] = None,
    canary: Annotated[
        Path | None, typer.Option(help="Requests, one JSON object a line; what they answer now must be answered later")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copy a model's config.json, *.safetensors and tokenizer files into ROOT as a new weights version.

    The version appears complete or not at all. Exit 1 when the directory holds no such model. With --canary the answers
    to up to 64 requests go along as canary.jsonl, and no server takes the version that answers them otherwise.
    """
    name = new_version(root, "weights", version)
    files, left = chosen(src)
    requires: Mapping[Kind, list[str]] = {"vocab": requires_vocab} if requires_vocab else {}
    with draft(root, "weights") as made:
        for file in progress(files, "copying", len(files)):
            if canary is None or file.name != CANARY:
                made.copy(file, file.name)
        check(made)
        if canary is not None:
            asked = read_asked(_bytes(canary))
            made.write(CANARY, [recorded(root, read_deployment(root), made.directory, requires_vocab or [], asked)])
        published = commit(made, "weights", name, made_by(), requires)
    _report(published, made, left, as_json)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Rejected("file_unreadable", f"cannot be read: {error.strerror}", location=str(file)) from error


def chosen(src: Path) -> tuple[list[Path], list[Path]]:
    """The files of a Hugging Face directory that make a version, and those that are left out.

    Raises Rejected where the weights are not in safetensors files, or config.json is missing.
    """
    present = sorted(path for path in src.iterdir() if path.is_file())
    tensors = [path for path in present if path.suffix == ".safetensors"]
    pickles = [path.name for path in present if path.suffix in PICKLES]
    if not tensors and pickles:
        message = f"the weights are pickles ({', '.join(pickles)}), and loading a pickle runs code: save as safetensors"
        raise Rejected("pickle", message, location=src.name)
    if not tensors:
        raise Rejected("no_weights", "holds no *.safetensors file", location=src.name)
    if src / "config.json" not in present:
        raise Rejected("no_config", "holds no config.json", location=src.name)
    files = [path for path in present if path in tensors or path.name in BESIDE]
    return files, [path for path in present if path not in files]


def check(made: Draft) -> None:
    """Raise Rejected where what was copied cannot be a model: config.json, the tensors' headers, the index."""
    try:
        config = json.loads((made.directory / "config.json").read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Rejected("bad_json", f"is no JSON: {error}", location="config.json") from error
    if not isinstance(config, dict):
        raise Rejected("bad_json", "is no JSON object", location="config.json")
    read_entries(made.directory)


def _report(published: Published, made: Draft, left: list[Path], as_json: bool) -> None:
    size = sum(entry.size for entry in made.files.values())
    for path in left:
        reason = " (a pickle: never copied)" if path.suffix in PICKLES else ""
        say(f"left out: {path.name}{reason}")
    if as_json:
        print_json(
            {
                "kind": "weights",
                "version": published.version,
                "digest": published.digest,
                "directory": str(published.directory),
                "files": made.files,
                "left_out": [path.name for path in left],
            }
        )
    else:
        count = counted(len(made.files), "file")
        typer.echo(f"{published.directory}: {count}, {size / 1e6:.1f} MB, digest {published.digest[:12]}")
