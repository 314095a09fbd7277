"""A sample of the 405 shapes, each compared for a few pairs of request and key head; `bench.gdn_accuracy` does all."""

import pytest
import torch

from bench.gdn_accuracy import BAR, GEOMETRIES, SHAPES, Shape, errors


@pytest.mark.parametrize(("number", "geometry"), list(enumerate(GEOMETRIES)))
def test_replay_is_within_the_bar_of_a_state_for_every_beam(number, geometry):
    """Slow decay is the hard case: nothing that was rounded is ever forgotten."""
    calls = 6 if number == 5 else 2
    found = errors(Shape(4, 128, geometry), seed=number, decay="slow", units=2, calls=calls)
    assert [one.calls for one in found] == list(range(2, calls + 1))
    assert found[-1].error < BAR / 10
    assert found[-1].largest > 0.02


def test_the_models_own_decay_and_records_in_float16_are_within_the_bar_too():
    shape = Shape(4, 128, GEOMETRIES[5])
    assert errors(shape, seed=4, decay="init", units=4)[-1].error < BAR / 10
    assert 1e-6 < errors(shape, seed=4, decay="slow", records=torch.float16, units=4)[-1].error < BAR


def test_the_sweep_covers_405_shapes_and_comes_in_slices():
    assert len(SHAPES) * 5 == 405
    assert len(set(GEOMETRIES)) == 9
    assert sorted(n for part in range(4) for n in range(part, len(SHAPES), 4)) == list(range(len(SHAPES)))
