"""The oracle must be there: a missing one is a failure, never a skip."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def transformers_is_installed():
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("the oracle tests need transformers: install the package with its extra `oracles`")
