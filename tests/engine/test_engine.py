import inspect
import typing
from collections.abc import Mapping

import pytest
import torch

import app.engine.engine as module
from app import core
from app.config import Limits
from app.engine.engine import Engine
from app.errors import Rejected
from tests.engine import tiny

SPOKEN = {
    *(core.Context, core.Inputs, core.Contexts, core.Rows, core.StepOutput, core.HeadSpec),
    *(core.InputSpec, core.StateSpec, core.WeightSpec, Limits),
    *(Mapping[str, torch.Tensor], int, bool, str, type, type(None), torch.device, torch.dtype),
}


def leaves(annotation):
    if annotation in SPOKEN or annotation is ...:
        return set()
    arguments = typing.get_args(annotation)
    return set().union(*map(leaves, arguments)) if arguments else {annotation}


def test_the_engine_names_only_tensors_specs_and_contexts():
    methods = [m for name, m in inspect.getmembers(Engine) if not name.startswith("_")]
    functions = [m.fget if isinstance(m, property) else m for m in methods]
    assert len(functions) >= 8
    for function in functions:
        for annotation in typing.get_type_hints(function, vars(module)).values():
            assert leaves(annotation) == set(), function.__name__


def test_an_arena_is_made_once_as_the_state_specs_say(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path))
    arena = engine.new_arena(tiny.LIMITS)
    assert set(arena) == {spec.name for spec in engine.state_specs()}
    assert arena["prompt_k.1"].shape == (4, 25, 2, 8)
    assert arena["prompt_length"].shape == (4,)
    assert arena["v.0"].shape == (2, 64, 2, 8)
    assert not any(tensor.is_inference() for tensor in arena.values()), "a transition may write them in place"


def test_a_state_that_does_not_fit_is_refused_with_its_name(tmp_path, monkeypatch):
    engine = tiny.engine(tiny.write(tmp_path))
    zeros = torch.zeros

    def scarce(shape, **how):
        if len(shape) > 1:
            raise RuntimeError("can't allocate memory")
        return zeros(shape, **how)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(Rejected, match=r"no memory for the state `prompt_k\.0`") as caught:
        engine.new_arena(tiny.LIMITS)
    assert caught.value.code == "no_memory"


def test_two_arenas_of_one_engine_do_not_know_each_other(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path))
    one, other = engine.new_arena(tiny.LIMITS), engine.new_arena(tiny.LIMITS)
    engine.encode(tiny.contexts(engine, [(3, 4, 5)]), one)
    addresses = {tensor.data_ptr() for tensor in one.values()}
    assert not any(tensor.any() for tensor in other.values())
    assert addresses.isdisjoint(tensor.data_ptr() for tensor in other.values())
