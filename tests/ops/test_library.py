"""Which way a registered operator is called."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.ops.library import eager, register

TOLD: list[str] = []


def through_torch(x):
    TOLD.append("operator")
    return x / 2


def directly(x):
    TOLD.append("host")
    return x / 2


HALVED = register("halved_in_a_test(Tensor x) -> Tensor", through_torch, torch.empty_like, directly)
QUARTERED = register("quartered_in_a_test(Tensor x) -> Tensor", through_torch, torch.empty_like)


def told(call, x):
    TOLD.clear()
    return call(x), list(TOLD)


def test_a_cpus_own_tensor_goes_past_the_dispatcher():
    x = torch.arange(4.0)
    out, way = told(HALVED, x)
    assert way == ["host"]
    assert torch.equal(out, x / 2)
    assert told(QUARTERED, x)[1] == ["operator"], "no other way on a CPU: the function itself"
    assert eager(x)
    with torch.inference_mode():
        assert told(HALVED, torch.ones(3))[1] == ["host"]


def test_what_traces_and_what_is_a_parameter_goes_to_the_operator(monkeypatch):
    assert told(HALVED, nn.Parameter(torch.ones(3), requires_grad=False))[1] == ["operator"]
    with FakeTensorMode() as mode:
        out, way = told(HALVED, mode.from_tensor(torch.ones(3)))
    assert way == []
    assert out.shape == (3,)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert told(HALVED, torch.ones(3))[1] == ["operator"]
