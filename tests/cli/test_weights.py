from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import Rejected
from app.vocab.manifest import verify
from tests import support


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory with two shards and what lies beside them."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    for shard, name in enumerate(["a", "b"], 1):
        save_file({name: np.ones((2, 3), np.float32)}, source / f"model-0000{shard}-of-00002.safetensors")
    table = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json"):
        (source / name).write_text("{}")
    (source / "sid_tokens.json").write_text("[[1, 2]]")
    (source / "README.md").write_text("left out")
    (source / "training_args.bin").write_bytes(pickle.dumps({}))
    (source / "runs").mkdir()
    return source


def publish(model: Path, *arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["weights", "publish", str(model), "--root", str(model.parent), *map(str, arguments)]
    )


def refusal(model: Path, *arguments: object) -> Rejected:
    result = publish(model, *arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, Rejected), result.output
    weights = model.parent / "weights"
    assert not weights.exists() or [path.name for path in weights.iterdir() if path.name != "v1"] == []
    return result.exception


def test_a_hugging_face_directory_becomes_a_version(model: Path) -> None:
    result = publish(model, "--requires-vocab", "v2", "--requires-vocab", "v3", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    directory = model.parent / "weights" / "v1"
    manifest = verify(directory, "weights")
    assert made["digest"] == manifest.digest
    assert manifest.requires == {"vocab": ["v2", "v3"]}
    assert sorted(manifest.files) == [
        "added_tokens.json", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "sid_tokens.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert made["left_out"] == ["README.md", "training_args.bin"]
    assert "left out: training_args.bin (a pickle: never copied)" in result.stderr
    for name in manifest.files:
        assert (directory / name).read_bytes() == (model / name).read_bytes()


def test_versions_count_up_and_are_never_overwritten(model: Path) -> None:
    assert publish(model).exit_code == 0
    second = publish(model)
    assert second.exit_code == 0
    assert second.stdout.startswith(f"{model.parent / 'weights' / 'v2'}: 9 files")
    result = publish(model, "--version", "v1")
    assert isinstance(result.exception, Rejected)
    assert result.exception.code == "version_exists"


def test_links_are_followed_and_copied_as_files(model: Path) -> None:
    blob = model.parent / "blob"
    (model / "config.json").rename(blob)
    (model / "config.json").symlink_to(blob)
    assert publish(model).exit_code == 0
    assert not (model.parent / "weights/v1/config.json").is_symlink()


def drop(*names: str) -> Callable[[Path], object]:
    def do(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return do


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def only_pickles(model: Path) -> None:
    drop(*SHARDS)(model)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def cut(model: Path) -> None:
    path = model / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "only pickles": (only_pickles, "pickle", "model"),
    "a pickle under another name": (
        lambda model: (model / SHARDS[0]).write_bytes(pickle.dumps({"a": [1.0] * 99})),
        "bad_safetensors",
        SHARDS[0],
    ),
    "a cut shard": (cut, "", SHARDS[1]),
    "an empty shard": (lambda model: (model / SHARDS[1]).write_bytes(b""), "truncated", SHARDS[1]),
    "no tensors": (drop(*SHARDS, "training_args.bin"), "no_weights", "model"),
    "no config": (drop("config.json"), "no_config", "model"),
    "a config that is no JSON": (lambda model: (model / "config.json").write_text("{"), "bad_json", "config.json"),
    "a config that is no object": (lambda model: (model / "config.json").write_text("[]"), "bad_json", "config.json"),
    "a shard of the index is missing": (drop(SHARDS[1]), "bad_index", "model.safetensors.index.json"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_directory_that_is_no_model_is_refused_and_leaves_nothing(name: str, model: Path) -> None:
    break_it, code, location = FAULTS[name]
    break_it(model)
    error = refusal(model)
    assert code in {"", error.code}
    assert (error.location or "").startswith(location)


@pytest.mark.parametrize("version", ["../v1", "/tmp/x", ".hidden", "a b", ""])
def test_a_version_cannot_leave_the_root(version: str, model: Path) -> None:
    assert refusal(model, "--version", version).code == "version_name"


def test_wrong_usage_is_2(model: Path) -> None:
    assert publish(model / "nothing").exit_code == 2
    assert publish(model, "--nonsense").exit_code == 2


def test_answers_are_recorded_and_a_server_takes_weights_that_still_give_them(tmp_path: Path) -> None:
    root = support.write_root(tmp_path / "root", (4, 5, 6))
    config = support.onerec_config((4, 5, 6))
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes(support.save(support.onerec_weights(config, 7)))
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        '{"context": {"history": ["i1", "i2"]}, "k": 5, "user_id": "u"}\n{"context": {"history": []}, "k": 10}\n'
    )
    arguments = ["weights", "publish", str(source), "--root", str(root), "--canary", str(requests)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (root / "weights" / "v2" / "canary.jsonl").read_text().splitlines()]
    assert lines[0] == {"format": 1, "with": verify(root / "vocab" / "v1", "vocab").digest}
    assert [(one["k"], len(one["items"])) for one in lines[1:]] == [(5, 5), (10, 10)]

    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text(requests.read_text())
    result = CliRunner().invoke(app, ["recommend", "--root", str(root), "--in", str(asked), "--out", str(answers)])
    assert result.exit_code == 0, answers.read_text()
    served = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {one["versions"]["weights"] for one in served} == {"v2"}
    for one, line in zip(served, lines[1:], strict=True):
        assert [item["id"] for item in one["items"]] == [item["id"] for item in line["items"]]
        scores = [item["score"] for item in one["items"]]
        assert scores == pytest.approx([item["score"] for item in line["items"]], abs=1e-5)

    requests.write_text('{"context": {"history": ["nobody"]}, "k": 1}\n')
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, Rejected)
    assert "'nobody' is not in the vocab" in str(result.exception)
    assert not (root / "weights" / "v3").exists()
