"""Another contract on a running server under load: every answer is that of the one contract that it names."""

from __future__ import annotations

import shutil

from app.cli.compose import read_deployment
from app.runtime.loader import load_contract
from tests import support
from tests.live_support import live_server
from tests.runtime.test_cutover import SIZES, Contracted, Load, Truth, in_force, nobody_failed, serving, world


class OfTwoPrecisions(Contracted):
    """Scores of 8 bits of mantissa round otherwise in every batch, but not to those of 24: an answer has the scores of
    its own contract, and not those of the other."""

    def check(self, answer, history):
        named, found = answer["versions"], sorted(item["score"] for item in answer["items"])
        off = {}
        for contract, truth in self.truths.items():
            _, scores = truth.of(named["weights"], named["vocab"], named["policy"], history)
            off[contract] = max(abs(a - b) for a, b in zip(found, sorted(scores), strict=True))
        exact, coarse = self.truths
        if named["contract"] == exact:
            assert off[exact] < 1e-4, (named, off)
        else:
            assert named["contract"] == coarse
            assert off[exact] > 1e-3, (named, off)
            assert off[coarse] < 0.3, (named, off)
        return named["contract"], named["weights"], named["vocab"]


async def test_the_precision_changes_live_and_back_and_every_answer_is_that_of_one_contract(tmp_path):
    root = world(tmp_path)
    text = (root / "deployment.toml").read_text()
    other = shutil.copytree(root, tmp_path / "other")
    (other / "deployment.toml").write_text(f'precision = "bfloat16"\n{text}')
    truth = OfTwoPrecisions(root, other)
    exact, coarse = truth.truths
    async with live_server(root) as server:
        load = Load(server, truth, clients=3, policies=("base",))
        await load.begun()
        for given, contract in ((other / "deployment.toml").read_text(), coarse), (text, exact):
            support.replace_text(root / "deployment.toml", given)
            status = await server.settles(lambda status, c=contract: status["active"]["contract"] == c)
            assert serving("v1", "v1")(status)
            await load.sees(lambda c=contract: all(order[-1][0] == c for order in load.of_client))
            await load.more(10)
            await server.settles(in_force)
        await load.end()
        assert load.of_client == 3 * [[(contract, "v1", "v1") for contract in (exact, coarse, exact)]]
        await nobody_failed(server)


async def test_weights_of_another_config_cut_over_live_and_every_answer_is_that_of_its_weights(tmp_path):
    root = world(tmp_path)
    first = load_contract(root, read_deployment(root)).id
    config = {**support.onerec_config(SIZES), "layers": 1, "ffn": 40}
    refit = support.onerec_weights(config, 3)
    other = shutil.copytree(root, tmp_path / "other")
    support.write_weights(other, config, refit, "v2")
    second = load_contract(other, read_deployment(other)).id
    async with live_server(root) as server:
        truth, named = Truth(other), set()

        class Named:
            """Which contract came with which weights."""

            def check(self, answer, history):
                named.add((answer["versions"]["contract"], answer["versions"]["weights"]))
                return truth.check(answer, history)

        load = Load(server, Named(), clients=3)
        await load.begun()
        support.write_weights(root, config, refit, "v2")
        status = await server.settles(serving("v2", "v1"))
        assert status["active"]["contract"] == second != first
        await load.sees(lambda: all(order[-1] == ("v2", "v1") for order in load.of_client))
        await load.more(10)
        old = status["history"][0]["to"]
        assert (await server.post(f"snapshots/{old}:rollback")).status == 200  # also to its contract
        assert serving("v1", "v1")(await server.status())
        await load.sees(lambda: all(order[-1] == ("v1", "v1") for order in load.of_client))
        await load.end()
        assert load.of_client == 3 * [[("v1", "v1"), ("v2", "v1"), ("v1", "v1")]]
        assert named == {(first, "v1"), (second, "v2")}
        await nobody_failed(server)
