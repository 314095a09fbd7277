"""Calls of a running server's admin port, for commands that take `--admin URL`."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import httpx
import typer

from app.errors import WidebeamError

Admin = Annotated[str, typer.Option(help="The admin port, as http://host:port; WIDEBEAM_ADMIN_TOKEN holds the token")]
TIMEOUT_S: Final = 30.0
VARIABLE: Final = "WIDEBEAM_ADMIN_TOKEN"
OTHER: Final = "is this the admin port? It is the server's second one, `server.admin_port`, 8001 by default"


class ServerSays(WidebeamError):
    """What a server answered that is no success."""


def call(
    admin: str, method: str, path: str, body: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """One call of the admin port. Raises ServerSays with the server's own words."""
    token = os.environ.get(VARIABLE)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{admin.rstrip('/')}/admin/v1/{path}"
    try:
        reply = httpx.request(method, url, json=body, headers=headers, timeout=timeout_s)
        document = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerSays(f"{url}: {error or type(error).__name__}") from error
    if reply.is_error:
        given = document.get("error") if isinstance(document, dict) else None
        failed = given if isinstance(given, dict) else {}
        said = f"{failed.get('code')}: {failed.get('message')}"
        if reply.status_code == httpx.codes.UNAUTHORIZED:
            said += f"; {VARIABLE} " + ("holds none that this server knows" if token else "is not set")
        if failed.get("message") == "no such path":
            said = f"{url}: no such path; {OTHER}"
        raise ServerSays(said, path=failed.get("path"))
    found: dict[str, Any] = document
    return found
