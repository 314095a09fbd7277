"""Weight slots: fixed memory, lent to one engine at a time, never written while anybody holds it."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine.slots import Layout, Slots
from app.engine.weights import open_version, resolve_precision
from app.errors import Fault, Rejected
from tests.engine import tiny

LAYOUT = Layout((("a", (3, 4)), ("b", (5,))), torch.float32, torch.device("cpu"))


def addresses(slot):
    return {name: tensor.data_ptr() for name, tensor in slot.tensors.items()}


def test_what_comes_back_is_lent_again_at_the_same_addresses():
    slots = Slots(most=2)
    first, second = slots.take(LAYOUT), slots.take(LAYOUT)
    known = {slot.number: addresses(slot) for slot in (first, second)}
    assert (slots.lent, slots.full, sorted(known)) == (2, True, [0, 1])
    number = first.number
    del first
    assert (slots.lent, slots.free_bytes) == (1, 4 * 17)
    again = slots.take(LAYOUT)
    assert (again.number, addresses(again)) == (number, known[number])
    assert slots.free_bytes == 0


def test_no_slot_is_lent_twice_and_none_beyond_the_most():
    slots = Slots(most=1)
    held = slots.take(LAYOUT)
    with pytest.raises(Rejected, match="all 1 weight slots are in use") as caught:
        slots.take(LAYOUT)
    assert caught.value.code == "no_slot"
    held.release()
    held.release()  # twice is once
    assert slots.lent == 0
    assert slots.take(LAYOUT).number == 0


def test_memory_of_another_layout_or_beyond_the_most_is_given_up():
    slots, other = Slots(), LAYOUT._replace(dtype=torch.bfloat16)
    many = [slots.take(LAYOUT) for _ in range(4)]
    many.clear()
    assert slots.free_bytes == 4 * 4 * 17
    slots.most = 2
    one = slots.take(LAYOUT)
    assert slots.free_bytes == 4 * 17, "one lent, one free: two in all"
    two = slots.take(other)
    assert slots.free_bytes == 0
    assert two.tensors["a"].dtype == torch.bfloat16
    assert {one.number, two.number} == {0, 1} or one.number != two.number


def test_memory_that_is_not_there_is_refused_and_nothing_is_lent():
    slots = Slots(most=2)
    with pytest.raises(Rejected, match="no memory for `a`") as caught:
        slots.take(Layout((("a", (1 << 40, 1 << 20)),), torch.float32, torch.device("cpu")))
    assert (caught.value.code, slots.lent) == ("no_memory", 0)


def test_a_load_that_fails_gives_its_slot_back_whoever_keeps_the_error(tmp_path):
    slots, kept = Slots(most=1), []
    directory = tiny.write(tmp_path)
    for _ in range(3):
        try:
            tiny.engine(directory, slots=slots, sha256={"model.safetensors": "0" * 64})
        except Rejected as error:
            kept.append(error)
    assert [error.code for error in kept] == ["file_digest"] * 3
    assert slots.lent == 0
    assert tiny.engine(directory, slots=slots).slot.number == 0


def test_an_engine_holds_its_slot_for_as_long_as_anybody_computes_with_it(tmp_path):
    slots, directory = Slots(most=2), tiny.write(tmp_path)
    engine = tiny.engine(directory, slots=slots)
    step = engine.step  # a running batch
    del engine
    gc.collect()
    assert slots.lent == 1
    del step
    gc.collect()
    assert slots.lent == 0


def test_what_a_new_slot_takes_beside_its_tensors_is_said_only_while_the_next_one_is_new():
    slots = Slots(most=2)
    held = slots.take(LAYOUT)
    slots.beside = 1000
    assert slots.new_bytes == 1000
    held.release()
    assert slots.new_bytes == 0


BESIDE = frozenset({("config.json", "1" * 64)})


def opened(directory, slots, beside=BESIDE, limits=tiny.LIMITS, wanted=torch.float32):
    return open_version(directory, tiny.family("qwen3"), tiny.SID, limits, wanted, slots=slots, beside=beside)


@pytest.mark.parametrize("precision", ["float32", "fp8"])
def test_a_version_that_differs_in_values_alone_gets_the_module_of_a_free_slot(tmp_path, monkeypatch, precision):
    monkeypatch.setattr("app.engine.weights.unfit", lambda _: None)  # a CPU computes in 8 bits, too
    slots, wanted, sizes = Slots(most=1), resolve_precision(precision, tiny.CPU), {"intermediate_size": 32}
    first, second = (tiny.write(tmp_path / f"v{n}", seed=n, **sizes) for n in (1, 2))

    def loaded(directory, **how):
        return tiny.engine(directory, slots=slots, precision=precision, **how)

    one = opened(first, slots, wanted=wanted)
    engine = loaded(first, opened=one)
    assert opened(second, slots, wanted=wanted).bound is None, "the slot is lent"
    module, addresses = one.module, engine.addresses
    del engine, one
    two = opened(second, slots, wanted=wanted)
    assert two.module is module
    engine = loaded(second, opened=two)
    alone = tiny.engine(second, precision=precision)
    assert (engine.addresses, engine.slot.number, slots.lent) == (addresses, 0, 1)
    contexts = tiny.contexts(engine, [(3, 4, 5), (7, 8)])
    found, expected = (one.encode(contexts, one.new_arena(tiny.LIMITS)) for one in (engine, alone))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.log_norm, expected.log_norm)


def test_a_module_is_made_anew_where_anything_but_values_differs_or_nobody_knows(tmp_path):
    slots = Slots(most=1)
    directory, other = tiny.write(tmp_path / "v1"), tiny.write(tmp_path / "v2", vocab_size=41)
    tiny.engine(directory, slots=slots, opened=opened(directory, slots))
    assert opened(directory, slots).bound is not None
    assert opened(directory, slots, beside=None).bound is None
    assert opened(directory, slots, beside=frozenset({("config.json", "2" * 64)})).bound is None
    assert opened(directory, slots, limits=msgspec.structs.replace(tiny.LIMITS, batch=3)).bound is None
    assert opened(directory, slots, wanted=torch.bfloat16).bound is None
    assert opened(other, slots).bound is None
    halved = {name: one.half() for name, one in load_file(directory / "model.safetensors").items()}
    save_file(halved, directory / "model.safetensors")
    assert opened(directory, slots).bound is None


def test_a_load_that_fails_leaves_a_module_that_the_next_one_can_be_read_into(tmp_path):
    slots, directory = Slots(most=1), tiny.write(tmp_path)
    tiny.engine(directory, slots=slots, opened=opened(directory, slots))
    for _ in range(2):
        with pytest.raises(Rejected, match="manifest"):
            tiny.engine(directory, slots=slots, opened=opened(directory, slots), sha256={"model.safetensors": "0" * 64})
    again = opened(directory, slots)
    assert again.bound is not None
    assert tiny.engine(directory, slots=slots, opened=again).slot.number == 0


def test_a_module_whose_slot_somebody_else_has_is_not_loaded_into(tmp_path):
    slots, directory = Slots(most=2), tiny.write(tmp_path)
    tiny.engine(directory, slots=slots, opened=opened(directory, slots))
    late = opened(directory, slots)
    held = tiny.engine(directory, slots=slots)
    with pytest.raises(Fault, match="not free"):
        tiny.engine(directory, slots=slots, opened=late)
    del held
