"""What holds for every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import said, support

# The same examples every time: a test holds or it does not. Others are looked for with
# `pytest --hypothesis-profile search`. No deadline: how fast a machine is is no property of the code.
settings.register_profile(
    "widebeam", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("search", settings.get_profile("widebeam"), derandomize=False)
settings.load_profile("widebeam")


FIRST = ("served", "runtime", "api", "policies", "cli")
"""Folders whose files take longest: begun first, so that no worker is left alone with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which workers take them; tests of a file stay as they are."""

    def place(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[:2][-1]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=place)


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


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """What a test draws does not depend on the tests that ran before it in the same process."""
    torch.manual_seed(0)


def pytest_runtest_setup() -> None:
    """Logs of servers that ended before are no business of the next test."""
    said.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A failure comes with what its servers have said."""
    report = yield
    if report.failed:
        report.sections += said.sections()
    return report
