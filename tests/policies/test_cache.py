"""What is compiled and proven again, and what is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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


def test_another_contract_proves_anew_and_those_asked_for_last_are_remembered(proofs):
    cache, made = Cache(), [replace(CONTRACT, id=f"{n}") for n in range(module.BASES + 1)]
    live, *prepared = made
    for count, on in enumerate(prepared, 2):
        compile_folder(folder(a=heat(1)), live, cache=cache)  # asked for again and again: it stays
        compile_folder(folder(a=heat(1)), on, cache=cache)
        assert len(proofs) == count
    compile_folder(folder(a=heat(1)), live, cache=cache)
    assert len(proofs) == module.BASES + 1
    compile_folder(folder(a=heat(1)), prepared[0], cache=cache)  # that was left out
    assert len(proofs) == module.BASES + 2


@pytest.fixture
def compilations(monkeypatch):
    """(contract, policy) of everything that was compiled, in turn."""
    seen, real = [], module.compile_policy

    def compile_policy(name, library, contract, *rest, **more):
        seen.append((contract.id, name))
        return real(name, library, contract, *rest, **more)

    monkeypatch.setattr(module, "compile_policy", compile_policy)
    return seen


def test_what_is_kept_for_a_rollback_compiles_only_what_was_edited_meanwhile(compilations):
    cache, older, live = Cache(), replace(CONTRACT, id="older"), replace(CONTRACT, id="live")
    texts = {name: heat(n) for n, name in enumerate("abc", 1)}
    compile_folder(folder(**texts), older, cache=cache)
    for edit in range(5):
        texts["a"] = heat(2, 1 + edit % 3) + f"about: {edit}\n"
        cache.turn()
        compile_folder(folder(**texts), live, cache=cache)
    compilations.clear()
    cache.turn()
    compile_folder(folder(**texts), older, cache=cache)
    assert compilations == [("older", "a")]


def test_what_was_compiled_for_a_rollback_is_forgotten_like_everything_else():
    cache, older = Cache(), replace(CONTRACT, id="older")
    for edit in range(6):
        cache.turn()
        compile_folder(folder(a=heat(1) + f"about: {edit}\n"), CONTRACT, cache=cache)
        compile_folder(folder(a=heat(1) + f"about: {edit}\n"), older, cache=cache)
    for basis in cache._bases:
        assert len(basis.results._now) + len(basis.results._before) == 2


def test_a_folder_that_comes_while_another_thread_compiles_takes_nothing_away(compilations, monkeypatch):
    cache, real = Cache(), module.compile_policy

    def compile_policy(name, *rest, **more):
        cache.turn()
        cache.turn()
        return real(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "compile_policy", compile_policy)
        assert len(compile_folder(folder(a=heat(1), b=heat(2)), CONTRACT, cache=cache).plans()) == 2


def test_several_threads_may_compile_for_contracts_of_their_own(compilations):
    cache, on = Cache(), [replace(CONTRACT, id=f"{n}") for n in range(module.BASES)]
    texts = {f"p{n}": heat(1 + n % 7) + f"about: {n}\n" for n in range(8)}
    with ThreadPoolExecutor(len(on)) as pool:
        for _ in range(3):
            found = list(pool.map(lambda one: compile_folder(folder(**texts), one, cache=cache), on))
            assert [len(one.plans()) for one in found] == [len(texts)] * len(on)
    assert len(compilations) == len(texts) * len(on)


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
