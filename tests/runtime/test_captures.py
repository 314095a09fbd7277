"""What a running server captures, and when: the graphs of a weight slot, once, whatever else changes."""

from __future__ import annotations

from functools import partial

from app.runtime import runtime
from app.runtime.steps import StepLoop
from tests import support
from tests.engine.replayed import Replays
from tests.live_support import live_server
from tests.runtime.test_cutover import SIZES, Truth, items, serving, weights, world

WIDER = "widebeam: 1\nwidths: [4, {0}, {0}]\n"


async def test_new_vocabs_and_edited_policies_capture_nothing_and_a_new_weight_slot_does(tmp_path, monkeypatch):
    recorder = Replays()
    monkeypatch.setattr(runtime, "StepLoop", partial(StepLoop, recorder=lambda _: recorder))
    root = world(tmp_path)
    async with live_server(root) as server:

        async def captured(found):
            """How many graphs there are once `narrow` finds so many; none of them was made on a request's way."""

            async def look(_):
                return len((await server.recommend("i1", "i2", k=10, policy="narrow"))["items"]) == found

            await server.sees(look)
            Truth(root).check(await server.recommend("i1", "i2", k=10, policy="narrow"), ("i1", "i2"))
            read = partial(server.service.metrics.registry.get_sample_value, "widebeam_compiles_total")
            assert (read({"where": "request"}), read({"where": "background"})) == (0, recorder.recorded)
            return recorder.recorded

        each = await captured(3)
        assert each > 0
        support.write_vocab(root, SIZES, items("b"), version="v2")
        await server.settles(serving("v1", "v2"))
        assert await captured(3) == each
        support.replace_text(root / "policies" / "narrow.yaml", WIDER.format(5))
        assert await captured(5) == each
        support.write_vocab(root, SIZES, items("c"), version="v3")
        support.replace_text(root / "policies" / "narrow.yaml", WIDER.format(7))
        await server.settles(serving("v1", "v3"))
        assert await captured(7) == each
        weights(root, "v2", 1)
        await server.settles(serving("v2", "v3"))
        assert await captured(7) == 2 * each
