from importlib.metadata import EntryPoint, EntryPoints

import pytest

from app.engine import registry
from app.engine.families.base import Family
from app.engine.families.qwen import Qwen3
from app.errors import Rejected


def install(monkeypatch, *points):
    monkeypatch.setattr(registry, "_points", lambda: EntryPoints(points))


def point(name, value):
    return EntryPoint(name, value, registry.GROUP)


def test_the_shipped_families_are_installed():
    assert registry.family("qwen3") is Qwen3
    assert {"onerec", "qwen2", "qwen3"} <= set(registry.families())
    assert all(issubclass(family, Family) for family in registry.families().values())


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(Rejected) as caught:
        registry.family("qwen4")
    assert caught.value.code == "unknown_family"
    assert "did you mean `qwen3`? known: onerec, qwen2, qwen3" in caught.value.message


@pytest.mark.parametrize(
    "value",
    ["app.engine.nowhere:Model", "app.engine.families.qwen:Nothing", "app.engine.families.qwen_config:block_parts"],
)
def test_a_broken_plugin_is_refused_and_leaves_the_others_alone(value, monkeypatch):
    install(monkeypatch, point("broken", value), point("qwen3", "app.engine.families.qwen:Qwen3"))
    with pytest.raises(Rejected) as caught:
        registry.family("broken")
    assert (caught.value.code, caught.value.location) == ("bad_family", value)
    assert registry.family("qwen3") is Qwen3


def test_two_plugins_of_one_name_are_refused(monkeypatch):
    install(monkeypatch, point("x", "a:B"), point("x", "c:D"))
    with pytest.raises(Rejected, match="installed twice: a:B and c:D"):
        registry.family("x")
