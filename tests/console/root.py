"""A deployment with something of everything that the console shows."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.runtime.test_cutover import weights, world

WRITE, READ = "w-token", "r-token"
SCRIPT = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
TRAFFIC = "widebeam: 1\nkind: traffic\ndefault: base\nlayers:\n  ranking: {salt: ranking/1}\n"
EXPERIMENT = """\
widebeam: 1
kind: experiment
layer: ranking
slots: [0, 10000]
salt: width/1
arms:
  control: {weight: 70, policy: base}
  narrow:  {weight: 30, policy: narrow}
"""


def make(tmp_path: Path) -> Path:
    """weights/v1, vocab/v1, two policies, an experiment, and tokens."""
    root = world(tmp_path)
    toml = root / "deployment.toml"
    text = toml.read_text().replace('admin_auth = "none"', 'admin_auth = "token"\nadmin_tokens = "admin.tokens"')
    toml.write_text(text)
    (root / "admin.tokens").write_text(f"read {READ}\nwrite {WRITE}\n")
    (root / "policies" / "traffic.yaml").write_text(TRAFFIC)
    (root / "policies" / "experiments").mkdir()
    (root / "policies" / "experiments" / "width.yaml").write_text(EXPERIMENT)
    return root


def publish(root: Path, version: str, seed: int) -> None:
    """Good weights."""
    weights(root, version, seed)


def publish_bad(root: Path, version: str) -> None:
    """Weights with a NaN in them."""
    name, good = next(iter(weights_of(root).items()))
    weights(root, version, 7, **{name: torch.full_like(good, float("nan"))})


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    """The tensors of v1."""
    from safetensors.torch import load_file

    return load_file(root / "weights" / "v1" / "model.safetensors")


def break_policy(root: Path) -> None:
    """An edit with a mistake, and with text that would be a script in a page."""
    file = root / "policies" / "narrow.yaml"
    file.write_text(f"widebeam: 1\nwidths: [3, 3, 3]\nrank: logpp + 1  # {SCRIPT}\n")
