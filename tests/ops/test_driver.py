"""What launches and tensor maps give the CUDA driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.ops import driver


def test_a_launch_gives_every_argument_at_the_address_of_its_type(monkeypatch):
    """As a kernel reads them: `long long`, `float` and `int`, and a struct of 128 bytes, each from its own place."""
    found = []
    box = bytes(range(128))

    def launched(config, function, places, _):
        own = config._obj
        found.append((tuple(own.grid), tuple(own.block), own.memory, own.stream, own.attributes[0].id, own.count))
        found.append(function.value)
        kinds = (ctypes.c_longlong, ctypes.c_float, ctypes.c_char * 128, ctypes.c_int, ctypes.c_longlong)
        values = [kind.from_address(place) for kind, place in zip(kinds, places, strict=True)]
        found.append([bytes(one) if isinstance(one, ctypes.Array) else one.value for one in values])
        found.append(places[2] % 64)
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    given = (2**47 + 3, np.float32(-1.5), box, np.int32(-9), -1)
    for early in (True, False):
        driver.launch(7, 3, 128, 1024, 5, given, early=early)
        same = [7, [2**47 + 3, -1.5, box, -9, -1], 0]
        assert found == [((3, 1, 1), (128, 1, 1), 1024, 5, 6, int(early)), *same]
        found.clear()


def test_a_launch_that_the_driver_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 701))
    with pytest.raises(RuntimeError, match="701"):
        driver.launch(7, 1, 32, 0, 5, ())


@pytest.fixture
def encoded(monkeypatch):
    """What the driver is asked to encode; it writes how often."""
    asked = []

    def encode(at, kind, rank, address, shape, strides, box, step, *how):
        asked.append((kind, rank, address.value, *(tuple(one) for one in (shape, strides, box, step)), how))
        assert at.value % 64 == 0
        ctypes.memset(at.value, len(asked), 128)
        return 1 if shape[0] == 8 else 0

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    driver._tensor_map.cache_clear()
    yield asked
    driver._tensor_map.cache_clear()


def test_a_tensor_map_is_made_once_of_an_address_a_shape_and_strides(encoded):
    whole = torch.zeros(40, 256, dtype=torch.bfloat16)
    part = whole[:, 64:192]
    first = driver.tensor_map(part, 128, 64)
    assert encoded == [(9, 2, whole.data_ptr() + 128, (128, 40), (512,), (64, 128), (1, 1), (0, 3, 3, 0))]
    assert driver.tensor_map(part, 128, 64) == first == b"\1" * 128
    assert driver.tensor_map(part[1:], 128, 64) == b"\2" * 128  # another address
    assert driver.tensor_map(whole.view(torch.float16), 128, 64) == b"\3" * 128
    assert encoded[2][0] == 6


def test_a_tensor_map_that_the_driver_refuses_is_an_error(encoded):
    with pytest.raises(RuntimeError, match="error 1 for 3 rows of 8, 16 bytes apart"):
        driver.tensor_map(torch.zeros(3, 8, dtype=torch.bfloat16), 128, 64)
