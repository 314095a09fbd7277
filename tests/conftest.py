"""What holds for every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests import support


@pytest.fixture(scope="session", autouse=True)
def contracts_without_exports() -> Iterator[None]:
    """An export takes seconds, and most roots of tests want another: their contracts say that nothing was exported.
    Tests of contracts undo this, and so does whatever starts another process on a root without a contract."""
    with support.without_exports():
        yield


@pytest.fixture
def no_collections() -> Iterator[None]:
    """What refers to itself in a ring stays: garbage is not collected while the test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
