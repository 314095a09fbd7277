import asyncio
import io

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
from app.runtime.logs import make_log
from app.runtime.metrics import Metrics
from tests.api.support import GOLDEN, FakeFront, deployment


def application(make=public, **extra):
    front = FakeFront()
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


def test_an_answer_validates_against_the_document():
    found = document()

    async def post():
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/recommend", json=GOLDEN)

    answer = msgspec.json.decode(asyncio.run(post()).content)
    jsonschema.validate(answer, {**found, "$ref": "#/components/schemas/Answer"})
