"""One end of the socket between a front end and the engine: frames in, messages out, and the other way round."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar, cast

import msgspec

Message = TypeVar("Message")
HEAD: Final = 4
"""Bytes of a frame's length, which does not count them; big-endian."""
MOST: Final = 2 ** (8 * HEAD) - 1
UNREAD: Final = 2**20
"""Bytes that wait for the other end to read them before it counts as slow."""


class Malformed(Exception):
    """What came is none of our messages."""


class Channel(asyncio.Protocol, Generic[Message]):
    """Sends messages and receives those of one type. What is sent in one turn of the event loop leaves in one write,
    but for what is sent at once.

    A frame of more than `most` bytes, one that is no message, and whatever `received` raises end the connection.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message], most: int = MOST) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode, self._most = decoder.decode, most
        self._incoming = bytearray()
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def received(self, message: Message) -> None:
        """Take a message."""

    @abstractmethod
    def broken(self, error: Exception) -> None:
        """The connection ends because of what came; called once, before `connection_lost`."""

    # ---- out ---------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, *, at_once: bool = False) -> None:
        """Send a message with this turn's others, or at once with those before it; nothing once the connection has
        ended. Raises UnicodeEncodeError."""
        body = self._encode(message)
        if self._transport is None:
            return
        if not self._outgoing and not at_once:
            self._loop.call_soon(self._flush)
        self._outgoing += (len(body).to_bytes(HEAD), body)
        if at_once:
            self._flush()

    def _flush(self) -> None:
        if not self._outgoing:
            return
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End the connection when everything has been written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- in ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNREAD)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  as the base class
        """See `asyncio.Protocol`."""
        self._transport = None
        self._incoming.clear()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._transport is None or self._transport.is_closing():
            return
        self._incoming += data
        try:
            for message in self._whole():
                self.received(message)
        except Exception as error:  # noqa: BLE001  whatever the other end wrote, only this connection may end of it
            self.broken(error)
            self.abort()

    def _whole(self) -> Sequence[Message]:
        """The messages that have come as a whole; what is left of the bytes waits for more."""
        found, at = [], 0
        with memoryview(self._incoming) as view:
            while len(view) - at >= HEAD:
                size = int.from_bytes(view[at : at + HEAD])
                if size > self._most:
                    raise Malformed(f"a frame of {size} bytes; at most {self._most} are taken")
                if len(view) - at - HEAD < size:
                    break
                with view[at + HEAD : at + HEAD + size] as frame:
                    found.append(self._decode(frame))
                at += HEAD + size
        del self._incoming[:at]
        return found
