import asyncio
import io
import json
from pathlib import Path

import httpx
import jsonschema
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from app.api.app import admin, public
from app.api.health import Readiness
from app.errors import InvalidRequest, Rejected
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from tests.api.support import GOLDEN, FakeFront, deployment


def application(make=public, **extra):
    front = extra.get("control") or FakeFront()
    return make(front, deployment(), Metrics(), make_log(io.BytesIO()), Readiness(front), **extra)


def document(make=public, path="/openapi.json", **extra):
    async def fetch():
        transport = httpx.ASGITransport(application(make, **extra))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).json()

    return asyncio.run(fetch())


def test_the_document_is_valid_and_says_what_the_types_say():
    found = document()
    validate(found)
    schemas = found["components"]["schemas"]
    body = schemas["RecommendRequest"]
    assert body["additionalProperties"] is False
    assert (body["properties"]["k"]["minimum"], body["properties"]["k"]["maximum"]) == (1, 100)
    assert sorted(body["required"]) == ["context", "k"]
    assert schemas["Context"]["oneOf"] == [
        {"required": ["history"]}, {"required": ["tokens"]}, {"required": ["embeddings"]}
    ]  # fmt: skip
    post = found["paths"]["/v1/recommend"]["post"]
    assert set(post["requestBody"]["content"]) == {"application/json", "application/msgpack"}
    assert set(post["responses"]) == {"200", "400", "406", "408", "413", "415", "422", "429", "503", "504"}
    assert set(found["paths"]) == {
        "/v1/recommend", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics",
        "/v1/models/{model}", "/v1/models/{model}/versions/{version}", "/v2", "/v2/models/{model}",
        "/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}",
        "/v2/models/{model}/versions/{version}/ready",
    }  # fmt: skip


def test_the_document_is_the_golden_one_to_the_last_key_in_its_order():
    """A change of golden/openapi.json is a change of what clients were promised: it stands in the changelog."""
    found = document()
    found["info"]["version"] = "VERSION"
    assert json.dumps(found, indent=1) + "\n" == (Path(__file__).parent / "golden" / "openapi.json").read_text()


def test_the_admin_document_is_valid_and_asks_for_a_token():
    found = document(admin, "/admin/v1/openapi.json", tokens=None)
    validate(found)
    assert set(found["paths"]) == {"/admin/v1/status", "/admin/v1/assignments/{experiment}"}


def test_every_example_is_a_request_that_is_served():
    found = document()
    examples = found["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert examples

    async def post(value):
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/recommend", json=value)

    for example in examples.values():
        assert asyncio.run(post(example["value"])).status_code == 200


CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance]


@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_server_error_and_no_undocumented_answer():
    schema = schemathesis.openapi.from_asgi("/openapi.json", application())
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        seen.add(operation.path)

        @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            case.validate_response(case.call(), checks=CHECKS)

        check()
    assert "/v1/recommend" in seen


class FakeControl(FakeFront):
    """What an operator may do, refused in every documented way by name."""

    boot, epoch = "b00t", "b00t-1"

    def status(self):
        found = {"kind": "weights", "version": "v1", "state": "active", "at": "now"}
        return {**super().status(), "artifacts": [found], "history": [], "policies": {"base": {"state": "live"}}}

    def assignment(self, experiment, unit, ctx, user):
        return {"experiment": experiment, "unit": unit} if len(experiment) % 2 else None

    def policies(self):
        return {"policies": {}, "errors": [], "last_attempt_ok": True}

    async def reload_policies(self):
        return {**self.policies(), "last_attempt_ok": False}

    async def check_policy(self, name, text):
        return {"ok": False, "policy_id": None, "diagnostics": [{"file": name, "text": text[:9]}]}

    async def explain_policy(self, name):
        return {"policy": name} if name == "base" else None

    async def kill(self, add, remove):
        if "base" in set(add):
            raise InvalidRequest("the default cannot be killed", path="$.kill")
        return {"killed": [{"name": name, "by": "post"} for name in add]}

    def snapshots(self):
        return {"snapshots": [{"id": "s1", "state": "active"}], "desired": {}}

    async def select(self, snapshot_id, cause):
        if snapshot_id != "s1":
            raise Rejected("canary_failed", f"{cause}: no", location="policies/")
        return {"snapshot": "s1", "state": "active", "pin": None}

    async def ask(self, versions, wait_s):
        if len(versions) == 2:
            raise Rejected("requires", "they do not go together", location="weights/v1/MANIFEST.json")
        return {"state": "pending" if wait_s < 1 else "active", "pin": versions}

    def unpin(self, snapshot_id=None):
        return {"pin": snapshot_id}

    def events(self, after):
        return [{"number": after + 1, "at": "now", "event": "pin"}]

    async def told(self, after):
        await asyncio.Event().wait()

    def drain(self):
        return {"draining": True}


def asked_as_localhost(app):
    """Without tokens the admin port answers those only who name this machine."""

    async def asked(scope, receive, send):
        if scope["type"] == "http":
            rest = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "headers": [*rest, (b"host", b"localhost")]}
        await app(scope, receive, send)

    return asked


@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_server_error_on_the_admin_port_either():
    app = asked_as_localhost(application(admin, tokens=None, control=FakeControl()))
    schema = schemathesis.openapi.from_asgi("/admin/v1/openapi.json", app)
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        seen.add(operation.path)

        @settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            case.validate_response(case.call(), checks=CHECKS)

        check()
    assert {"/admin/v1/kill", "/admin/v1/snapshots/{snapshot}:unpin", "/admin/v1/policies:check"} <= seen


def test_an_answer_validates_against_the_document():
    found = document()

    async def post():
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/recommend", json=GOLDEN)

    answer = msgspec.json.decode(asyncio.run(post()).content)
    jsonschema.validate(answer, {**found, "$ref": "#/components/schemas/Answer"})
