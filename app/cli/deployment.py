"""Reading a root's deployment.toml, for commands that need nothing of the runtime."""

from __future__ import annotations

from pathlib import Path

from app.config import Deployment, decode, parse, read_overlay


def read_deployment(root: Path) -> Deployment:
    """ROOT/deployment.toml. Raises BadDeployment; one that cannot be read is refused like one that cannot be parsed."""
    return parse(decode(read_overlay(root)))
