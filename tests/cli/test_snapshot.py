"""`widebeam snapshot` against a running server."""

from __future__ import annotations

import asyncio
import json

from typer.testing import CliRunner

from app.cli.main import app
from tests.api.support import served
from tests.live_support import live_server
from tests.runtime.test_cutover import serving, weights, world


async def cli(server, *args):
    """Run a command in a thread, as another process would run beside the server."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["snapshot", *args, "--admin", server.admin])


async def test_list_promote_rollback_pin_and_unpin(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        await server.settles(serving("v2"))
        listed = await cli(server, "list", "--json")
        assert listed.exit_code == 0, listed.output
        shown = json.loads(listed.output)["snapshots"]
        assert [(one["state"], one["weights"]["version"]) for one in shown] == [("active", "v2"), ("ready", "v1")]
        assert (await cli(server, "rollback")).exit_code == 0
        await server.settles(serving("v1"))
        table = (await cli(server, "list")).output
        assert "asked for by state/pin.json: weights v1, vocab v1" in table
        assert (await cli(server, "promote", "--weights", "v2", "--wait", "20")).exit_code == 0
        await server.settles(serving("v2"))
        pinned = await cli(server, "pin", "--json")
        assert json.loads(pinned.output)["pin"] == {"weights": "v2", "vocab": "v1"}
        said = "nothing is pinned: weights v2, vocab v1 serve (the newest versions)\n"
        assert (await cli(server, "unpin")).output == said
        refused = await cli(server, "promote", "--weights", "v9")
        assert (refused.exit_code, "v9" in str(refused.exception)) == (1, True)
        assert (await cli(server, "promote", "nope")).exit_code == 1
        assert (await cli(server, "promote")).exit_code == 2


async def test_a_second_rollback_without_an_id_is_refused_and_names_what_there_is(tmp_path):
    root = world(tmp_path)
    async with live_server(root) as server:
        weights(root, "v2", 1)
        bad = (await server.settles(serving("v2")))["active"]["snapshot"]
        assert (await cli(server, "rollback")).exit_code == 0  # one person
        for _ in range(2):  # and others
            refused = await cli(server, "rollback")
            assert refused.exit_code == 1
            assert "a rollback stands already (weights v1, vocab v1), and nothing was changed" in str(refused.exception)
            assert f"  {bad}  ready: weights v2, vocab v1, served last from 20" in str(refused.exception)
            assert f"widebeam snapshot unpin --admin {server.admin}" in str(refused.exception)
            assert serving("v1")(await server.status())
        assert (await cli(server, "rollback", bad)).exit_code == 0  # on purpose
        await server.settles(serving("v2"))
        assert (await cli(server, "promote", "--weights", "v1")).exit_code == 0
        assert (await cli(server, "rollback")).exit_code == 0  # a promotion can be taken back
        assert serving("v2")(await server.status())
        (root / "release.json").write_text('{"weights": "v1"}')
        said = (await cli(server, "unpin")).output  # it may serve by the time that somebody looks
        assert said.replace("will ", "") == "nothing is pinned: weights v1, vocab v1 serve (release.json)\n"
        await server.settles(serving("v1"))
        assert (await cli(server, "pin")).exit_code == 0
        assert "a pin stands" in str((await cli(server, "rollback")).exception)


async def test_a_wrong_token_and_the_wrong_port_are_said(tmp_path, monkeypatch):
    monkeypatch.delenv("WIDEBEAM_ADMIN_TOKEN", raising=False)
    (tmp_path / "admin.tokens").write_text("read r\n")
    async with served(root=tmp_path, admin_tokens="admin.tokens") as server:

        async def said(url):
            found = await asyncio.to_thread(CliRunner().invoke, app, ["snapshot", "list", "--admin", url])
            assert found.exit_code == 1
            return str(found.exception)

        assert (await said(server.addresses.admin)).endswith("; WIDEBEAM_ADMIN_TOKEN is not set")
        monkeypatch.setenv("WIDEBEAM_ADMIN_TOKEN", "wrong")
        assert (await said(server.addresses.admin)).endswith("; WIDEBEAM_ADMIN_TOKEN holds none that this server knows")
        assert "no such path; is this the admin port?" in await said(server.addresses.public)


async def test_a_server_that_is_not_there_is_said_in_a_sentence():
    found = await asyncio.to_thread(CliRunner().invoke, app, ["snapshot", "list", "--admin", "http://127.0.0.1:9"])
    assert found.exit_code == 1
    assert "http://127.0.0.1:9" in str(found.exception)
