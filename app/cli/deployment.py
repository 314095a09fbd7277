"""Reading a root's deployment.toml, for commands that need nothing of the runtime."""

from __future__ import annotations

import os
from pathlib import Path

from app.config import DEPLOYMENT, Deployment, decode, parse, read_overlay
from app.errors import BadDeployment


def read_deployment(root: Path) -> Deployment:
    """ROOT/deployment.toml. Raises BadDeployment; one that cannot be read is refused like one that cannot be parsed.

    Where there is none, the root is most likely another folder.
    """
    if not os.path.lexists(root / DEPLOYMENT):
        raise BadDeployment("is not there; --root names the folder that holds it", file=DEPLOYMENT)
    return parse(decode(read_overlay(root)))
