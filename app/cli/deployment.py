"""Reading a root's deployment.toml, for commands that need nothing of the runtime."""

from __future__ import annotations

from pathlib import Path

from app.config import Deployment, parse, read_small
from app.errors import BadDeployment

MAX_BYTES = 1 << 20


def read_deployment(root: Path) -> Deployment:
    """ROOT/deployment.toml. Raises BadDeployment; one that cannot be read is refused like one that cannot be parsed."""
    file = root / "deployment.toml"
    try:
        text = read_small(file, MAX_BYTES, root).decode("utf-8")
    except OSError as error:
        raise BadDeployment(f"cannot be read: {error.strerror}", file=file.name) from error
    except UnicodeDecodeError as error:
        raise BadDeployment("is not UTF-8", file=file.name) from error
    return parse(text, file.name)
