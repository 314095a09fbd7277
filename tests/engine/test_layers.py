import torch

from app.engine import layers


def test_rms_norm_equals_its_definition():
    x, weight = torch.randn(5, 3, 8), torch.randn(3, 8)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-6).double(), expected, atol=1e-6, rtol=1e-6)


def test_rotary_positions_rotate_each_pair_by_its_angle():
    table = layers.rotary_table(50, 8, 10000.0, factor=2.0)
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 49])
    out = layers.rotate(x, table[positions])
    for i in range(4):
        angle = positions.double() / 2.0 * 10000.0 ** (-2 * i / 8)
        pair = torch.complex(x[..., i].double(), x[..., i + 4].double())
        turned = pair * torch.polar(torch.ones(3, dtype=torch.float64), angle).unsqueeze(1)
        torch.testing.assert_close(out[..., i].double(), turned.real, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[..., i + 4].double(), turned.imag, atol=1e-5, rtol=1e-5)


def test_swiglu_equals_its_definition():
    x, gate, up, down = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 6)
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(layers.swiglu(x, torch.cat([gate, up]), down), expected, atol=1e-5, rtol=1e-4)


def test_picked_logits_and_the_norm_over_the_vocabulary_are_made_in_blocks(monkeypatch):
    hidden, head, tokens = torch.randn(300, 8), torch.randn(70, 8), torch.tensor([3, 69, 0, 3])
    every = hidden.double() @ head.double().T
    for elements, rows in ((1, 1), (700, 7), (1 << 20, 128)):
        monkeypatch.setattr(layers, "LOGITS", elements)
        monkeypatch.setattr(layers, "ROWS", rows)
        logits, norm = layers.pick_and_norm(hidden, head, tokens)
        torch.testing.assert_close(logits.double(), every[:, tokens], atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(norm.double(), torch.logsumexp(every, 1), atol=1e-5, rtol=1e-6)
    logits, norm = layers.pick_and_norm(hidden[:0], head, tokens)
    assert (logits.shape, norm.shape) == ((0, 4), (0,))


def test_rows_that_lie_apart_or_not_are_kept_in_slots():
    whole, slots = torch.randn(5, 6, 4), torch.zeros(7, 2, 4)
    for rows in (whole[:, 2:4], whole[:, :2].contiguous(), whole[:0, :2]):
        slots.fill_(7)
        layers.keep(slots, rows)
        assert torch.equal(slots[: len(rows)], rows)
        assert bool((slots[len(rows) :] == 7).all())
