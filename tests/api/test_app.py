from tests.api.support import get, served


async def test_unknown_paths_and_methods_have_the_error_shape_and_no_redirects():
    async with served() as server:
        url = server.addresses.public
        for path in ("/", "/v1/recommend/", "/docs", "/v1/%00", "/admin/v1/status"):
            missing = await get(url, path)
            assert (missing.status, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await get(url, "/v1/recommend")
        assert (wrong.status, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


async def test_the_public_port_serves_no_admin_route(tmp_path):
    async with served(root=tmp_path, admin_auth="none") as server:
        assert (await get(server.addresses.public, "/admin/v1/status")).status == 404
        assert (await get(server.addresses.admin, "/v1/recommend")).status == 404
