"""The versions as clients of TensorFlow Serving and of the Open Inference Protocol ask for them."""

from __future__ import annotations

from app.api.aliases import TF_STATES
from app.runtime.states import State
from tests.api.support import get
from tests.live_support import live_server
from tests.runtime.test_cutover import weights, world


def named(root, name):
    toml = root / "deployment.toml"
    toml.write_text(toml.read_text().replace("[server]", f'[server]\nmodel_name = "{name}"'))
    return root


def test_every_state_of_a_version_has_a_name_there():
    assert set(TF_STATES) == {str(state) for state in State}


async def test_versions_under_other_servers_names(tmp_path):
    async with live_server(named(world(tmp_path), "movies")) as server:
        weights(server.root, "v2", 5)
        await server.settles(lambda status: status["active"]["weights"]["version"] == "v2")
        (server.root / "weights" / "v3").mkdir()
        (server.root / "weights" / "v3" / "MANIFEST.json").write_text("{}")
        await server.settles(lambda status: any(one["state"] == "rejected" for one in status["artifacts"]))

        async def ask(path):
            reply = await get(server.public, path)
            return reply.status, reply.json()

        status, found = await ask("/v1/models/movies")
        assert status == 200
        states = {one["version"]: (one["state"], one["status"]["error_code"]) for one in found["model_version_status"]}
        assert states == {"v1": ("LOADING", "OK"), "v2": ("AVAILABLE", "OK"), "v3": ("END", "FAILED_PRECONDITION")}
        assert "weights/" not in str(found)  # places and messages stay behind the admin token
        assert (await ask("/v1/models/movies/versions/v2"))[1]["model_version_status"][0]["state"] == "AVAILABLE"
        assert (await ask("/v2"))[1]["name"] == "widebeam"
        status, model = await ask("/v2/models/movies")
        assert (status, model["versions"], model["platform"]) == (200, ["v1", "v2"], "widebeam_onerec")
        assert (await ask("/v2/models/movies/versions/v2"))[1]["versions"] == ["v2"]
        assert await ask("/v2/models/movies/ready") == (200, {"name": "movies", "ready": True})
        assert (await ask("/v2/models/movies/versions/v2/ready"))[0] == 200
        assert (await ask("/v2/models/movies/versions/v1/ready"))[0] == 503  # in memory, and nobody is served by it
        for path in ("/v1/models/films", "/v1/models/movies/versions/v9", "/v2/models/movies/versions/v9/ready"):
            assert (await ask(path))[0] == 404, path
        await server.post("drain")
        assert (await ask("/v2/models/movies/ready"))[0] == 503


async def test_a_server_without_anything_says_so_there_too(tmp_path):
    root = world(tmp_path)
    (root / "weights" / "v1" / "MANIFEST.json").unlink()
    async with live_server(root, ready=False) as server:
        assert (await get(server.public, "/v2/models/widebeam/ready")).status == 503
        assert (await get(server.public, "/v1/models/widebeam")).status == 200
