"""Fields of requests that a deployment declares while it serves."""

from __future__ import annotations

from tests import support
from tests.live_support import live_server

READS = 'widebeam: 1\nfinal:\n  mask: position > user.skip or ctx.device == "tv"\n'
DECLARED = "[request.user]\nskip = {default = 2}\n[request.ctx]\ndevice = ['tv']\n"


async def test_a_policy_goes_live_when_the_deployment_declares_what_it_reads(tmp_path):
    root = support.write_root(tmp_path / "root", policies={"reads": READS})
    file = root / "deployment.toml"
    async with live_server(root) as server:
        found = (await server.policies())["policies"]["reads"]
        assert found["state"] == "rejected"
        assert {one["code"] for one in found["errors"]} == {"T002"}
        before = await server.status()
        text = file.read_text()
        support.replace_text(file, text + DECLARED)
        status = await server.settles(lambda status: status["active"]["contract"] != before["active"]["contract"])
        await server.settles(lambda status: status["deployment"]["state"] == "in force")
        assert (await server.policies())["policies"]["reads"]["state"] == "live"
        assert status["active"]["weights"]["version"] == before["active"]["weights"]["version"]
        whole = (await server.recommend("i1", policy="reads", ctx={"device": "tv"}))["items"]
        assert (await server.recommend("i1", policy="reads"))["items"] == whole[2:]


async def test_a_declaration_that_contradicts_itself_is_refused_and_what_served_goes_on(tmp_path):
    root = support.write_root(tmp_path / "root", policies={"reads": READS})
    file = root / "deployment.toml"
    file.write_text(file.read_text() + DECLARED)
    async with live_server(root) as server:
        before = (await server.recommend("i1", policy="reads"))["items"]
        support.replace_text(file, file.read_text().replace("default = 2", "default = 2, low = 3"))
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        assert "outside 3 to inf" in status["deployment"]["reason"]["message"]
        assert (await server.recommend("i1", policy="reads"))["items"] == before
