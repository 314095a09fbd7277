"""What is compiled and proven again, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.policies import cache as module
from app.policies import compile as compiling
from app.policies.cache import Cache
from app.policies.load import Folder, compile_folder
from app.policies.source import Source
from tests.policies.contracts import contract

CONTRACT = contract((8, 8, 8), (4, 4, 4))
HEAT = "widebeam: 1\nparams: {{heat: {{value: {heat}, range: [0.1, 9]}}}}\nwidths: [1, 2, {width}]\n"
HEAT += "steps: {{all: {{logits: logit / param.heat, normalize: {normalize}}}}}\n"


def folder(**texts):
    return Folder({name: Source(f"policies/{name}.yaml", text.encode()) for name, text in texts.items()})


def heat(value, width=3, normalize="step"):
    return HEAT.format(heat=value, width=width, normalize=normalize)


@pytest.fixture
def proofs(monkeypatch):
    """The policies that proved themselves, in turn; those named `wrong` fail."""
    seen = []

    def self_check(plan, *_):
        seen.append(plan.policy)
        return "it is wrong" if plan.policy == "wrong" else None

    monkeypatch.setattr(compiling, "self_check", self_check)
    return seen


def test_policies_that_differ_in_parameters_and_widths_share_one_proof(proofs):
    cache = Cache()
    made = compile_folder(folder(a=heat(1), b=heat(2, 4), c=heat(1, normalize="valid")), CONTRACT, cache=cache)
    assert len(made.plans()) == 3
    assert proofs == ["a", "c"]
    compile_folder(folder(a=heat(3), b=heat(2, 2), c=heat(2, normalize="valid")), CONTRACT, cache=cache)
    assert proofs == ["a", "c"]


def test_a_structure_that_failed_its_proof_is_asked_for_it_again(proofs):
    cache = Cache()
    assert compile_folder(folder(wrong=heat(1)), CONTRACT, cache=cache).plans() == ()
    assert compile_folder(folder(wrong=heat(2), z=heat(3)), CONTRACT, cache=cache).plan("wrong") is None
    assert proofs == ["wrong", "wrong", "z"]


def test_another_contract_proves_anew_and_the_last_two_are_remembered(proofs):
    cache, other = Cache(), replace(CONTRACT, id="other")
    for on, count in ((CONTRACT, 1), (other, 2), (CONTRACT, 2), (replace(CONTRACT, id="third"), 3), (CONTRACT, 4)):
        compile_folder(folder(a=heat(1)), on, cache=cache)
        assert len(proofs) == count


def test_an_endless_row_of_edits_does_not_fill_the_memory(proofs, monkeypatch):
    monkeypatch.setattr(module, "MOST_PROVEN", 1)
    cache = Cache()
    texts = {"a": heat(1), "b": heat(1, normalize="valid")}
    for _ in range(2):
        cache.turn()
        compile_folder(
            folder(**{name: f"{text}about: {len(proofs)}\n" for name, text in texts.items()}), CONTRACT, cache=cache
        )
    assert proofs == ["a", "b", "a", "b"]
