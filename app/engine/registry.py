"""The installed model families: plug-ins of the entry point group `widebeam.families`."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from app.engine.families.base import Family
from app.errors import Rejected

GROUP = "widebeam.families"


@cache
def _points() -> EntryPoints:
    """Looked up once a process, by which the batches beside a load are spared some milliseconds of Python."""
    return entry_points(group=GROUP)


def names() -> tuple[str, ...]:
    """The names that `family` in deployment.toml may have, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in _points()}))


def families() -> dict[str, type[Family]]:
    """Every installed family by name. Raises Rejected for the first one that cannot be loaded."""
    return {name: family(name) for name in names()}


def family(name: str) -> type[Family]:
    """The family of that name.

    Raises Rejected("unknown_family") listing the known ones, Rejected("bad_family") where a plug-in cannot be loaded,
    gives no `Family`, or is installed twice.
    """
    points = list(_points().select(name=name))
    if not points:
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean `{near[0]}`? known" if near else "known"
        message = f"`{name}` is no installed family; {hint}: {', '.join(names()) or 'none'}"
        raise Rejected("unknown_family", message, location="deployment.toml: family")
    if len({point.value for point in points}) > 1:
        homes = " and ".join(sorted({point.value for point in points}))
        raise Rejected("bad_family", f"`{name}` is installed twice: {homes}", location="deployment.toml: family")
    return _load(points[0])


def _load(point: EntryPoint) -> type[Family]:
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise Rejected("bad_family", f"`{point.name}` cannot be loaded: {error}", location=point.value) from error
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise Rejected("bad_family", f"`{point.name}` is no subclass of Family", location=point.value)
    return found
