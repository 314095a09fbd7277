from app.errors import Expired
from app.runtime.ticket import PendingTicket
from tests.api.support import until


async def test_a_timer_that_is_early_is_the_deadline_all_the_same():
    left = []
    ticket = PendingTicket(0.001, lambda: 0.0, left.append)  # a clock that is behind the event loop's
    await until(lambda: left)
    assert isinstance(ticket.gone(0.0), Expired)
