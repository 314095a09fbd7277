"""What the kernel takes is decided on any machine; tests/gpu runs it."""

import pytest
import torch

from app.ops.gdn import Records, fused_replay, launch, unfit


def operands(dtype=torch.bfloat16, k=128, v=128, hv=4, record=torch.float16, key=None):
    window = torch.zeros(3, 2 * 2 * k + hv * v, dtype=dtype)
    records = Records(
        torch.zeros(2, 3, hv),
        torch.zeros(2, 3, hv, v, dtype=record),
        torch.zeros(2, 3, 2, k, dtype=key or dtype),
        torch.zeros(2, 3, 2),
    )
    return window, torch.zeros(1, hv, k, v), records


def test_a_cpu_is_refused_with_the_reason():
    window, s_ctx, records = operands()
    assert unfit(window, s_ctx, records, key_heads=2, ancestors=1) == "cpu is no NVIDIA GPU of compute capability 8.0"
    gates = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="cpu is no NVIDIA GPU"):
        fused_replay(
            window, gates, gates, s_ctx, records, key_heads=2, row_start=torch.tensor([0, 3]),
            ancestry=torch.zeros(3, 0), into=None,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "ancestors", "reason"),
    [
        ({"dtype": torch.float32}, 1, "window: torch.float32"),
        ({"k": 64}, 1, "K 64"),
        ({"v": 96}, 1, "V 96"),
        ({"hv": 3}, 1, "3 value heads over 2 key heads"),
        ({"record": torch.float32}, 1, "s_ctx and records"),
        ({"key": torch.float16}, 1, "s_ctx and records"),
        ({}, 9, "ancestry: 9 ancestors; at most 8"),
        ({}, 8, None),
        ({"k": 256, "v": 512, "hv": 8, "dtype": torch.float16}, 0, None),
    ],
)
def test_a_shape_that_the_kernel_does_not_take_is_told(how, ancestors, reason, monkeypatch):
    monkeypatch.setattr(launch.cuda, "unfit", lambda _: None)
    found = unfit(*operands(**how), key_heads=2, ancestors=ancestors)
    assert found is None if reason is None else reason in found
