"""A family that the project does not know, installed as a plug-in: contract, gate and server, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import support
from tests.engine import toy
from tests.served.process import serving

pytestmark = pytest.mark.slow

SIZES, WIDTH, ITEMS = (4, 5), 6, 12
DEPLOYMENT = f"""family = "toy"
device = "cpu"
[sid]
sizes = {list(SIZES)}
[limits]
widths = [20, 20]
rows = 256
batch = 4
context = 8
[server]
port = 0
admin_port = 0
admin_auth = "none"
drain_delay_s = 0.05
threads = 1
"""


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = [f"{kind}.{t}" for kind in ("codes", "heads") for t in range(len(SIZES))]
    return {name: torch.randn(SIZES[int(name[-1])], WIDTH, generator=generator) for name in names}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A deployment root, and the family in a package of its own: one module and its entry point."""
    package = tmp_path / "site"
    (package / "toy-1.0.dist-info").mkdir(parents=True)
    (package / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "toy-1.0.dist-info" / "entry_points.txt").write_text(
        "[widebeam.families]\ntoy = a_family_of_mine:Toy\nturned = a_family_of_mine:Turned\n"
    )
    (package / "a_family_of_mine.py").write_text(Path(toy.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", str(package))
    return made_root(tmp_path / "root")


def made_root(root):
    (root / "policies").mkdir(parents=True)
    (root / "policies" / "base.yaml").write_text(support.BASE)
    (root / "deployment.toml").write_text(DEPLOYMENT)
    support.write_weights(root, {"width": WIDTH, "comment": "read by nobody"}, tensors())
    items = [{"id": f"i{n}", "sid": sid} for n, sid in enumerate(support.random_sids(SIZES, ITEMS).tolist())]
    support.write_vocab(root, SIZES, items)
    return root


def widebeam(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "app", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def best(history, seed=0):
    """Every item's score under the toy model, in NumPy, best first."""
    weights = {name: tensor.double().numpy() for name, tensor in tensors(seed).items()}
    sids = support.random_sids(SIZES, ITEMS)
    context = sum(weights[f"codes.{t}"][sids[item, t]] for item in history for t in range(len(SIZES)))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum())

    scores = {}
    for item, (first, second) in enumerate(sids):
        x = context + weights["codes.0"][first] + 0.5 * context
        one = log_softmax(weights["heads.0"] @ context)[first]
        scores[f"i{item}"] = one + log_softmax(weights["heads.1"] @ x)[second]
    return sorted(scores.items(), key=lambda one: -one[1])


@pytest.mark.timeout(400)  # another process exports: seconds on an idle machine
def test_a_family_of_ones_own_gets_contract_gate_and_server(root):
    with serving(root) as server:  # without a contract: it is made before the server is ready
        server.until(lambda: server.client.get("/readyz").status_code == 200, "ready", timeout=240)
        found = server.items("i3", "i7", k=5)
        known = best([3, 7])[:5]
        assert [item for item, _ in found] == [item for item, _ in known]
        assert [score for _, score in found] == pytest.approx([score for _, score in known], abs=1e-4)
        [file] = (root / "contracts").iterdir()
        assert server.status()["active"]["contract"] == file.stem
        assert server.ask("i1").json()["versions"]["contract"] == file.stem
        # the gate, while it serves: a refit that cannot be one
        spoiled = {**tensors(1), "heads.1": torch.full((SIZES[1], WIDTH), float("nan"))}
        spoiled["codes.0"] = spoiled["codes.0"][:, 1:].contiguous()
        support.write_weights(root, {"width": WIDTH}, {**spoiled, "ghost": torch.zeros(1)}, "v2")
        server.until(lambda: rejected(server), "refused")
        assert rejected(server) == [
            ("unknown_tensors", "weights/v2/model.safetensors"),
            ("bad_shape", "weights/v2/model.safetensors: codes.0"),
        ]
        assert server.items("i3", "i7", k=5) == found
    contract = json.loads(file.read_text())
    assert contract["config"] == {"width": WIDTH}
    assert [one["exported"] for one in contract["functions"]] == [True, True, True]
    assert {"state": "vector", "source": "step 1", "target": "step 2"} in contract["links"]
    code, out, _ = widebeam("contract", "check", "--root", root, "--weights", "v2", "--json")
    report = json.loads(out)
    assert (code, report["contract"]) == (1, file.stem)
    assert {(one["code"], one["place"]) for one in report["findings"]} == {
        ("unknown_tensors", "weights/v2/model.safetensors"),
        ("bad_shape", "weights/v2/model.safetensors: codes.0"),
        ("not_finite", "weights/v2/model.safetensors: heads.1"),
    }
    before = file.stat().st_mtime_ns
    with serving(root) as server:  # with one: it is read, and nothing is exported
        server.ready()
        assert server.items("i3", "i7", k=5) == found
        assert not [line for line in server.lines if line.get("event") == "contract_stored"]
    assert file.stat().st_mtime_ns == before


def turned(seed):
    """The tensors as a checkpoint of `Turned` holds them."""
    return {name: x.t().contiguous() if name.startswith("heads") else x for name, x in tensors(seed).items()}


@pytest.mark.timeout(400)
def test_a_checkpoint_that_stores_matrices_the_other_way_round_is_served_and_refitted_live(root):
    file = root / "deployment.toml"
    file.write_text(file.read_text().replace('"toy"', '"turned"'))
    support.write_weights(root, {"width": WIDTH}, turned(5), "v2")  # v1 holds its heads as they are used
    code, out, _ = widebeam("contract", "check", "--root", root, "--weights", "v1", "--json")
    assert code == 1
    assert {(one["code"], one["place"]) for one in json.loads(out)["findings"] if one["severity"] == "error"} == {
        ("bad_shape", f"weights/v1/model.safetensors: heads.{t}") for t in range(len(SIZES))
    }
    with serving(root) as server:
        server.until(lambda: server.client.get("/readyz").status_code == 200, "ready", timeout=240)
        for version, seed in (("v2", 5), ("v3", 6), ("v4", 7)):  # more than there are slots that nobody has used yet
            if version != "v2":
                support.write_weights(root, {"width": WIDTH}, turned(seed), version)
            server.until(lambda name=version: server.status()["active"]["weights"]["version"] == name, version)
            found, known = server.items("i3", "i7", k=5), best([3, 7], seed)[:5]
            assert [item for item, _ in found] == [item for item, _ in known]
            assert [score for _, score in found] == pytest.approx([score for _, score in known], abs=1e-4)
    code, out, _ = widebeam("contract", "show", "--root", root, "--json")
    weights = {one["parameter"]: one for one in json.loads(out)["weights"]}
    assert weights["heads.1"] == {
        "parameter": "heads.1",
        "shape": [SIZES[1], WIDTH],
        "sources": [{"name": "heads.1", "shape": [WIDTH, SIZES[1]]}],
        "accepts": ["BF16", "F16", "F32"],
        "transform": [{"op": "transpose"}, {"op": "cast", "dtype": "float32"}],
    }


def rejected(server):
    """Code and place of every finding about weights v2, once it is refused."""
    found = [one for one in server.status()["artifacts"] if (one["kind"], one["version"]) == ("weights", "v2")]
    if not found or found[0]["state"] != "rejected":
        return []
    reason = found[0]["reason"]
    return [(one["code"], one["location"]) for one in (reason, *reason.get("others", ()))]
