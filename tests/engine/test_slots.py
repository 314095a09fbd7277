"""Weight slots: fixed memory, lent to one engine at a time, never written while anybody holds it."""

from __future__ import annotations

import gc

import pytest
import torch

from app.engine.slots import Layout, Slots
from app.errors import Rejected
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
