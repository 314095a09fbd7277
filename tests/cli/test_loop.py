import asyncio

import pytest

from app.cli.loop import run


async def _kind() -> str:
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop()).__module__


async def _fail() -> None:
    raise ValueError("from within")


def test_commands_run_on_uvloop_and_get_results_and_errors_back():
    assert run(_kind()).startswith("uvloop")
    with pytest.raises(ValueError, match="from within"):
        run(_fail())
