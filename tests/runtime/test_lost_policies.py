"""A new vocab under which a policy that serves could not: what serves goes on serving."""

from __future__ import annotations

import pytest

from tests import support
from tests.live_support import live_server

HEAD = "widebeam: 1\n"
SIZES = (4, 4, 4)
SIDS = support.random_sids(SIZES, 30).tolist()
POLICIES = {
    "dramas": HEAD + 'final: {mask: item.genre == "drama"}\n',
    "recent": HEAD + "final: {mask: item.year > 2001}\n",
}
ATTRIBUTES = '[attributes]\nnewest = {of = "year", as = "max", default = 0}\n'


def catalogue(**attrs: object) -> list[dict]:
    given = [{"year": 2000 + at % 5, "genre": ("drama", "war")[at % 2]} | attrs for at in range(30)]
    return [
        {"id": f"i{at}", "sid": SIDS[at], "attrs": {k: v for k, v in one.items() if v is not None}}
        for at, one in enumerate(given)
    ]


def vocab(status: dict, version: str) -> dict:
    return next(one for one in status["artifacts"] if (one["kind"], one["version"]) == ("vocab", version))


@pytest.mark.slow
async def test_a_vocab_that_takes_away_what_a_live_policy_reads_is_refused_until_the_policy_no_longer_does(tmp_path):
    root = support.write_root(tmp_path / "root", SIZES, catalogue(), POLICIES, extra=ATTRIBUTES)
    async with live_server(root) as server:
        before = {name: (await server.recommend("i1", policy=name))["items"] for name in POLICIES}
        for version, attrs, policy, words in (
            ("v2", {"genre": "war"}, "dramas", "item.genre has no value `drama`"),
            ("v3", {"year": "2003"}, "recent", "a text is compared only with"),
        ):
            support.write_vocab(root, SIZES, catalogue(**attrs), version=version)
            status = await server.settles(lambda status, v=version: _is(status, v, "rejected"))
            reason = vocab(status, version)["reason"]
            if version == "v2":
                assert reason["code"] == "policy_lost"
                assert reason["message"].startswith(f"policy `{policy}` serves, and could not with it: {words}")
                assert reason["location"] == f"vocab/v2/policies/{policy}.yaml:2"
            else:  # `newest` is declared, so the vocab itself is short of it
                assert reason["code"] == "attribute_type"
            assert status["active"]["vocab"]["version"] == "v1"
            assert {name: status["policies"][name]["state"] for name in POLICIES} == dict.fromkeys(POLICIES, "live")
        for name, items in before.items():
            assert (await server.recommend("i1", policy=name))["items"] == items
        (root / "policies" / "dramas.yaml").write_text(HEAD + 'final: {mask: item.genre == "war"}\n')
        status = await server.settles(lambda status: status["active"]["vocab"]["version"] == "v2")
        assert status["policies"]["dramas"]["state"] == "live"
        assert (await server.recommend("i1", policy="dramas"))["items"]


async def test_a_policy_that_was_killed_keeps_no_vocab_away(tmp_path):
    root = support.write_root(tmp_path / "root", SIZES, catalogue(), POLICIES)
    async with live_server(root) as server:
        assert (await server.post("kill", {"kill": ["dramas"]})).status == 200
        support.write_vocab(root, SIZES, catalogue(genre="war"), version="v2")
        await server.settles(lambda status: status["active"]["vocab"]["version"] == "v2")


@pytest.mark.slow
async def test_a_deployment_that_the_default_policy_cannot_serve_under_is_taken_up_when_that_is_edited(tmp_path):
    late = HEAD + "steps: {all: {rank: score + 0.001 * attr.newest}}\n"
    root = support.write_root(tmp_path / "root", SIZES, catalogue(), {"base": late}, extra=ATTRIBUTES)
    file = root / "deployment.toml"
    async with live_server(root) as server:
        before = (await server.recommend("i1"))["items"]
        support.replace_text(file, file.read_text().replace("newest =", "oldest ="))
        status = await server.settles(lambda status: status["deployment"]["state"] == "rejected")
        reason = status["deployment"]["reason"]
        assert reason["code"] == "no_default_policy"
        assert (await server.recommend("i1"))["items"] == before
        (root / "policies" / "base.yaml").write_text(late.replace("newest", "oldest"))
        status = await server.settles(lambda status: status["deployment"]["state"] == "in force")
        assert status["policies"]["base"]["state"] == "live"
        assert (await server.recommend("i1"))["items"] == before


def _is(status: dict, version: str, state: str) -> bool:
    return any(one["version"] == version and one["state"] == state for one in status["artifacts"])
