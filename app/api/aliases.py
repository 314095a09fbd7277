"""The versions under the names that other servers' clients know: TensorFlow Serving's model status, and the Open
Inference Protocol's metadata and readiness. Read-only; no reason of a rejection leaves the admin port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.metadata import version as distribution_version
from typing import Final, NamedTuple, Protocol

from fastapi import APIRouter, Request, Response

from app.api import errors, media, openapi
from app.api.health import Readiness

TF_STATES: Final[Mapping[str, str]] = {
    "discovered": "START",
    "incomplete": "START",
    "waiting": "START",
    "verifying": "LOADING",
    "loading": "LOADING",
    "validating": "LOADING",
    "warming": "LOADING",
    "ready": "LOADING",
    "active": "AVAILABLE",
    "draining": "UNLOADING",
    "retired": "END",
    "rejected": "END",
}
"""AVAILABLE is what requests are admitted on, and only that: a version in memory that waits is asked for by nobody."""
IN_MEMORY: Final = ("active", "ready")
Handler = Callable[[Request], Awaitable[Response]]


class HasStatus(Protocol):
    """Whoever knows the whole state of the server."""

    def status(self) -> dict[str, object]:
        """The document of `GET /admin/v1/status`."""


class Weights(NamedTuple):
    """A version of the weights: its name, its state, and the code of what is wrong with it."""

    version: str
    state: str
    code: str | None


class Models:
    """The one model of this server, and its versions: those of the weights."""

    def __init__(self, name: str, family: str, known: HasStatus, readiness: Readiness) -> None:
        self._name, self._family, self._known, self._readiness = name, family, known, readiness

    def weights(self, model: str, version: str | None = None) -> list[Weights]:
        """The versions, or one of them. Raises NotFound for another model and for an unknown version."""
        if model != self._name:
            raise errors.NotFound(f"this server's model is `{self._name}`")
        found = [one for one in self._all() if version in {None, one.version}]
        if version is not None and not found:
            raise errors.NotFound("there is no such version")
        return found

    def _all(self) -> Iterator[Weights]:
        artifacts = self._known.status().get("artifacts", ())
        assert isinstance(artifacts, list | tuple)
        for one in artifacts:
            if one["kind"] == "weights":
                yield Weights(one["version"], one["state"], one.get("reason", {}).get("code"))

    def tf(self, found: list[Weights]) -> dict[str, object]:
        """TensorFlow Serving's form, the newest first."""
        return {"model_version_status": [_tf(one) for one in reversed(found)]}

    def metadata(self, found: list[Weights]) -> dict[str, object]:
        """The protocol's model metadata. Its inference is not served, so there are no tensors to describe."""
        versions = [one.version for one in found if one.state in IN_MEMORY]
        return {
            "name": self._name,
            "versions": versions,
            "platform": f"widebeam_{self._family}",
            "inputs": [],
            "outputs": [],
        }

    def ready(self, found: list[Weights] | None = None) -> bool:
        """Whether this server, or a version on it, answers requests."""
        serves = found is None or any(one.state == "active" for one in found)
        return serves and not self._readiness.reasons()


def _tf(one: Weights) -> dict[str, object]:
    wrong = one.state == "rejected"
    code, message = ("FAILED_PRECONDITION", one.code or "rejected") if wrong else ("OK", "")
    return {
        "version": one.version,
        "state": TF_STATES[one.state],
        "status": {"error_code": code, "error_message": message},
    }


def routes(models: Models) -> APIRouter:
    """`/v1/models/...` and `/v2...`; health is beside them (`health.routes`)."""
    router = APIRouter()

    def add(path: str, handler: Handler, name: str, statuses: tuple[int, ...] = (200,)) -> None:
        names = tuple(part[1:-1] for part in path.split("/") if part.startswith("{"))
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        answers = dict.fromkeys(statuses, dict)
        described = openapi.operation(name, tag="aliases", answers=answers, errors=(404,), parameters=parameters)
        router.add_api_route(path, handler, **described)

    async def status(request: Request) -> Response:
        """What became of the versions of the weights."""
        return _json(models.tf(models.weights(**request.path_params)))

    async def server(request: Request) -> Response:  # noqa: ARG001  as the others
        """What this server is."""
        return _json({"name": "widebeam", "version": distribution_version("widebeam"), "extensions": []})

    async def metadata(request: Request) -> Response:
        """The model, and its versions in memory."""
        return _json(models.metadata(models.weights(**request.path_params)))

    async def ready(request: Request) -> Response:
        """200 where recommendations can be served, by this version where one is named; else 503."""
        found = models.weights(**request.path_params)
        is_ready = models.ready(found if "version" in request.path_params else None)
        return _json({"name": request.path_params["model"], "ready": is_ready}, 200 if is_ready else 503)

    version = "/versions/{version}"
    add("/v1/models/{model}", status, "tf_status")
    add("/v1/models/{model}" + version, status, "tf_version_status")
    add("/v2", server, "oip_server")
    add("/v2/models/{model}", metadata, "oip_model")
    add("/v2/models/{model}" + version, metadata, "oip_version")
    add("/v2/models/{model}/ready", ready, "oip_model_ready", (200, 503))
    add("/v2/models/{model}" + version + "/ready", ready, "oip_version_ready", (200, 503))
    return router


def _json(document: dict[str, object], status: int = 200) -> Response:
    return Response(media.ENCODE[media.JSON](document), status, {"cache-control": "no-store"}, media.JSON)
