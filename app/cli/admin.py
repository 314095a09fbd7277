"""Calls of a running server's admin port, for commands that take `--admin URL`."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import httpx
import typer

from app.errors import WidebeamError

Admin = Annotated[str, typer.Option(help="The admin port, as http://host:port; WIDEBEAM_ADMIN_TOKEN holds the token")]
TIMEOUT_S: Final = 30.0


class ServerSays(WidebeamError):
    """What a server answered that is no success."""


def call(
    admin: str, method: str, path: str, body: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """One call of the admin port. Raises ServerSays with the server's own words."""
    token = os.environ.get("WIDEBEAM_ADMIN_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{admin.rstrip('/')}/admin/v1/{path}"
    try:
        reply = httpx.request(method, url, json=body, headers=headers, timeout=timeout_s)
        document = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerSays(f"{url}: {error or type(error).__name__}") from error
    if reply.is_error:
        error_body = document.get("error", {})
        raise ServerSays(f"{error_body.get('code')}: {error_body.get('message')}", path=error_body.get("path"))
    found: dict[str, Any] = document
    return found
