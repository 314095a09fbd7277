"""Parts of the Gated DeltaNet bench that need no GPU; the paths themselves are in tests/gpu/test_gdn.py."""

import json

import pytest
import torch

from bench import gdn
from bench._gdn_model import CONFIG, InTorch, Setting, decode, make_batch, swap
from bench._gdn_paths import counted, unmarked
from bench.gdn_accuracy import GEOMETRIES, Geometry

MIB = 2**20
SMALL = CONFIG | {
    "vocab_size": 2000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("calls", "state", "written", "times"), [(2, 36.3, 32.3, 56.5), (6, 101, 96.8, 20.3)])
def test_counted_bytes_are_the_papers(calls, state, written, times):
    """But for the length of every key, which ours keeps beside it: 4 bytes of 520."""
    own, full = (counted(path, GEOMETRIES[0], 4, 4 * 512, calls) for path in ("onela", "full"))
    assert own.state / MIB == pytest.approx(state, rel=8e-3)
    assert own.written / MIB == pytest.approx(written, rel=9e-3)
    assert full.state / own.state == pytest.approx(times, rel=8e-3)
    assert full.written / own.written == pytest.approx(127, rel=9e-3)


def test_rings_are_read_and_written_when_they_move():
    one, three = (counted("replayssm", Geometry(1, 1, 8, 8), 1, 10, calls) for calls in (1, 3))
    record = 2 * (8 + 8) + 4
    assert one.moved == 0
    assert three.moved == 2 * (1 + 2) * 10 * record


def test_only_shapes_that_both_ran_are_in_the_median():
    shape = {"R": 4, "W": 128, "hk": 4, "hv": 4, "k": 128, "v": 128, "T": [2, 3], "floor_ms": [0.1, 0.1]}
    table = [
        shape | {"onela_ms": [1.0, 2.0], "full_ms": [10.0, 40.0], "replayssm_ms": None},
        shape | {"onela_ms": [1.0, 1.0], "full_ms": None, "replayssm_ms": None},
    ]
    found = gdn.summary(table)
    assert found["full"]["ran"] == 2
    assert found["full"]["median"] == 15.0
    assert found["replayssm"]["ran"] == 0
    assert found["replayssm"]["median"] is None


def test_a_run_of_one_part_keeps_the_others(tmp_path):
    out = tmp_path / "gdn"
    assert gdn.before(out) == {}
    gdn.save({"about": {"device": "x"}, "model": []}, out)
    gdn.save(gdn.before(out) | {"about": {"device": "y"}, "traffic": []}, out)
    assert json.loads(out.with_suffix(".json").read_text()) == {"about": {"device": "y"}, "model": [], "traffic": []}
    assert "on y" in out.with_suffix(".md").read_text()


def test_a_swapped_path_computes_and_goes_away_again():
    batch = make_batch(Setting(2, 5, 12), torch.device("cpu"), SMALL, 4, 50)
    expected = decode(batch, unmarked)
    back = swap(batch, InTorch)
    assert all("_replayed" in vars(block) for block in batch.family.blocks if hasattr(block, "qkvz"))
    for a, b in zip(decode(batch, unmarked), expected, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
    back()
    assert not any("_replayed" in vars(block) for block in batch.family.blocks)
