import threading

import pytest

from app.runtime.turns import BUSY_S, Turns


class Time:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(round(seconds, 6))
        self.now += seconds


def test_a_capture_rests_as_long_as_it_took_while_batches_come():
    time = Time()
    turns = Turns(time, time.sleep)
    with turns.capture():
        time.now += 0.05
    assert time.slept == []  # a server that starts
    with turns.launch():
        time.now += 0.01
    for took in (0.05, 0.02):
        with turns.capture():
            time.now += took
    assert time.slept == [0.05, 0.02]
    time.now += BUSY_S
    with turns.capture():
        time.now += 0.05
    assert time.slept == [0.05, 0.02]


def test_nobody_launches_during_a_capture_but_during_its_rest():
    turns, order, resting, launched = Turns(), [], threading.Event(), threading.Event()

    def launch():
        with turns.launch():
            order.append("launch")
        launched.set()

    def rest(_):
        order.append("rest")
        resting.set()
        assert launched.wait(30)

    with turns.launch():
        pass
    turns._sleep = rest
    thread = threading.Thread(target=launch)
    with turns.capture():
        thread.start()
        order.append("captured")
    thread.join()
    assert order[0] == "captured"
    assert sorted(order) == ["captured", "launch", "rest"]


def test_a_launch_or_a_capture_that_fails_gives_its_turn_back():
    turns = Turns()
    for turn in (turns.launch, turns.capture):
        with pytest.raises(ZeroDivisionError), turn():
            1 / 0  # noqa: B018
    with turns.launch():
        pass
