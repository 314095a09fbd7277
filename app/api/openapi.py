"""The OpenAPI document: FastAPI knows the routes, msgspec knows the bodies; this puts the two together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from app.api import media, wire

REF: Final = "#/components/schemas/{name}"
Schema = dict[str, Any]

MEANING: Final = {
    400: "The body is not JSON or msgpack",
    401: "No valid token",
    403: "The token does not allow this",
    404: "There is no such thing",
    406: "Accept allows neither JSON nor msgpack",
    408: "The body did not arrive in time",
    412: "If-Match names an epoch that has passed; look again",
    413: "The body is too large",
    415: "Neither JSON nor msgpack, or compressed",
    422: "A field is wrong; `path` names it",
    429: "The caller is above its own share",
    503: "Not now: overloaded, draining or not ready; `Retry-After` where a retry may help",
    504: "The deadline passed",
}


def operation(
    name: str,
    *,
    tag: str,
    answers: Mapping[int, type | str],
    body: type | None = None,
    errors: Iterable[int] = (),
    examples: Mapping[str, object] | None = None,
    parameters: Iterable[Schema] = (),
) -> dict[str, Any]:
    """Keyword arguments of `add_api_route` that describe one operation.

    answers  status -> struct type or dict (an open object) in JSON, or a text media type
    body     struct type of the request, in JSON and msgpack; then answers and errors come in both, too
    errors   statuses with an ErrorBody
    """
    kinds = (media.JSON, media.MSGPACK) if body is not None else (media.JSON,)
    responses = {status: _answer(status, kind, kinds) for status, kind in answers.items()}
    responses |= {status: _error(status, kinds) for status in errors}
    extra: Schema = {}
    if body is not None:
        schema: Schema = {"schema": _ref(body)}
        content = {media.JSON: {**schema, "examples": dict(examples or {})}, media.MSGPACK: schema}
        extra["requestBody"] = {"required": True, "content": content}
    if parameters:
        extra["parameters"] = list(parameters)
    return {
        "operation_id": name,
        "tags": [tag],
        "responses": responses,
        "response_model": None,
        "response_class": Response,
        "openapi_extra": extra,
    }


def _ref(kind: type) -> Schema:
    if kind is dict:
        return {"type": "object"}
    return {"$ref": REF.format(name=kind.__name__)}


def _answer(status: int, kind: type | str, kinds: tuple[str, ...]) -> Schema:
    description = HTTPStatus(status).phrase
    if isinstance(kind, str):
        return {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    return {"description": description, "content": {media: {"schema": _ref(kind)} for media in kinds}}


def _error(status: int, kinds: tuple[str, ...]) -> Schema:
    found: Schema = _answer(status, wire.ErrorBody, kinds)
    found["description"] = MEANING[status]
    if status in {429, 503}:
        seconds = {"description": "Whole seconds, where a retry may help", "schema": {"type": "integer", "minimum": 1}}
        found["headers"] = {"Retry-After": seconds}
    return found


def install(app: FastAPI, types: Iterable[type], *, security: Mapping[str, Schema] | None = None) -> None:
    """Give `app` a document with the schemas of `types` (and of every struct that they name).

    security  security schemes that apply to the whole document
    """
    _, schemas = msgspec.json.schema_components([*types, wire.ErrorBody], ref_template=REF)
    schemas = {name: _published(name, schema) for name, schema in schemas.items()}
    document: Schema = {}

    def make() -> Schema:
        if not document:
            document.update(
                get_openapi(
                    title=app.title, version=app.version, description=app.description, routes=app.routes
                )
            )  # fmt: skip
            components = document.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **schemas}
            if security:
                components["securitySchemes"] = dict(security)
                document["security"] = [{name: []} for name in security]
        return document

    app.openapi = make  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _published(name: str, schema: Schema) -> Schema:
    """A component as it is published: what a struct's types cannot say is added."""
    if name != "Context":
        return schema
    one_of = [{"required": [field]} for field in schema["properties"]]
    return {**schema, "oneOf": one_of}
