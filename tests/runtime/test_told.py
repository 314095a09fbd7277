import pytest

from app.errors import Cancelled, Expired, Fault
from app.runtime.told import ToldTicket


class Held:
    def __init__(self, deadline=None):
        self.now, self.left, self.told = 0.0, [], []
        self.ticket = ToldTicket(deadline, lambda: self.now, self.left.append, self.told.append)


def test_who_asked_is_told_once_and_only_the_first_result():
    held = Held()
    first = Fault("first")
    assert held.ticket.gone(1e9) is None
    assert held.ticket.resolve(first)
    assert not held.ticket.resolve(Fault("second"))
    held.ticket.cancel()
    assert (held.told, held.left) == ([first], [])


def test_who_gave_up_is_not_told_and_the_queue_hears_of_it_once():
    held = Held()
    held.ticket.cancel()
    held.ticket.cancel()
    assert not held.ticket.resolve(Fault("late"))
    assert (held.told, held.left) == ([], [held.ticket])
    assert isinstance(held.ticket.gone(0.0), Cancelled)


@pytest.mark.parametrize(("now", "kind"), [(1.9, Cancelled), (1.9985, Expired), (2.0, Expired), (2.5, Expired)])
def test_giving_up_at_the_deadline_counts_as_expired(now, kind):
    held = Held(deadline=2.0)
    assert held.ticket.gone(1.99) is None
    assert isinstance(held.ticket.gone(2.0), Expired)
    held.now = now
    held.ticket.cancel()
    assert isinstance(held.ticket.gone(now), kind)
    assert isinstance(held.ticket.gone(3.0), kind)
