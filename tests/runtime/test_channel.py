import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.channel import HEAD, Channel, Malformed


class Said(msgspec.Struct, array_like=True, tag=1):
    text: str


class Number(msgspec.Struct, array_like=True, tag=2):
    value: int


class Hearing(Channel[Said | Number]):
    def __init__(self, most: int = 1000) -> None:
        super().__init__(msgspec.msgpack.Decoder(Said | Number), most)
        self.heard: list[object] = []
        self.errors: list[Exception] = []
        self.lost = asyncio.get_running_loop().create_future()

    def received(self, message):
        if message == Number(13):
            raise ValueError("nobody takes 13")
        self.heard.append(message)

    def broken(self, error):
        self.errors.append(error)

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.lost.set_result(None)


class Written(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.writes, self.aborted = [], False

    def write(self, data):
        self.writes.append(data)

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True

    def close(self):
        self.aborted = True

    def set_write_buffer_limits(self, high=None, low=None):
        pass


def frames(*messages) -> bytes:
    bodies = [msgspec.msgpack.encode(one) for one in messages]
    return b"".join(len(one).to_bytes(HEAD) + one for one in bodies)


@given(st.lists(st.one_of(st.builds(Said, st.text(max_size=20).filter(str.isprintable)),
                          st.builds(Number, st.integers(14, 2**63 - 1))), max_size=8),
       st.lists(st.integers(1, 30), min_size=1, max_size=20))  # fmt: skip
def test_messages_arrive_whole_however_their_bytes_are_cut(messages, cuts):
    async def run():
        channel = Hearing()
        channel.connection_made(Written())
        data, number = frames(*messages), 0
        while data:
            size = cuts[number % len(cuts)]
            channel.data_received(data[:size])
            data, number = data[size:], number + 1
        assert channel.heard == messages
        assert channel.errors == []

    asyncio.run(run())


async def test_what_is_sent_in_one_turn_leaves_in_one_write():
    channel, transport = Hearing(), Written()
    channel.connection_made(transport)
    sent = [Number(n) for n in range(5)]
    for one in sent:
        channel.send(one)
    assert transport.writes == []
    await asyncio.sleep(0)
    channel.send(Said("later"))
    await asyncio.sleep(0)
    assert transport.writes == [frames(*sent), frames(Said("later"))]


async def test_what_is_sent_at_once_leaves_with_what_was_sent_before_it():
    channel, transport = Hearing(), Written()
    channel.connection_made(transport)
    channel.send(Number(1))
    channel.send(Number(2), at_once=True)
    assert transport.writes == [frames(Number(1), Number(2))]
    channel.send(Number(3), at_once=True)
    assert transport.writes[1:] == [frames(Number(3))]
    channel.send(Number(4))
    channel.send(Number(5))
    assert transport.writes[2:] == []
    await asyncio.sleep(0)
    assert transport.writes[2:] == [frames(Number(4), Number(5))]
    channel.connection_lost(None)
    channel.send(Number(6), at_once=True)
    assert transport.writes[3:] == []


async def test_what_was_sent_last_leaves_before_the_end():
    channel, transport = Hearing(), Written()
    channel.connection_made(transport)
    channel.send(Said("bye"))
    channel.close()
    assert transport.writes[0] == frames(Said("bye"))
    channel.connection_lost(None)
    channel.send(Said("too late"))
    await asyncio.sleep(0)
    assert b"too late" not in b"".join(transport.writes)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff", Malformed),
        ((1001).to_bytes(HEAD), Malformed),
        (frames(["no", "tag"]), msgspec.ValidationError),
        (frames([2, "no number"]), msgspec.ValidationError),
        ((3).to_bytes(HEAD) + b"\xc1\xc1\xc1", msgspec.DecodeError),
        (frames(Number(13)), ValueError),
    ],
)
async def test_what_is_no_message_ends_the_connection_after_those_before_it(data, error):
    channel, transport = Hearing(), Written()
    channel.connection_made(transport)
    channel.data_received(frames(Said("good")))
    channel.data_received(data)
    channel.data_received(frames(Said("never heard")))
    assert [type(one) for one in channel.errors] == [error]
    assert channel.heard == [Said("good")]
    assert transport.aborted


@asynccontextmanager
async def pair():
    ends = socket.socketpair()
    loop, found = asyncio.get_running_loop(), []
    for end in ends:
        end.setblocking(False)
        found.append((await loop.create_unix_connection(lambda: Hearing(2**26), sock=end))[1])
    yield found
    for one in found:
        one.abort()
    await asyncio.gather(*(one.lost for one in found))


async def test_large_and_small_messages_keep_their_order_over_a_real_socket():
    async with pair() as (one, other):
        sent = [Said("x" * size) for size in (3, 5_000_000, 0, 20_000_000, 7)]
        for message in sent:
            one.send(message)
        one.close()
        async with asyncio.timeout(30):
            await other.lost
        assert other.heard == sent
