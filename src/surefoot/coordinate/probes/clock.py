"""How far the clock of another node is off, by exchanged stamps. Pure, and a small exchange over a socket that its caller opened.

Both sides stamp what they send and receive. The offset of an exchange is wrong by at most half of its round trip: the shortest one counts.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_STAMP: Final = struct.Struct("!d")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Asked at `sent_s` and answered at `back_s` by our clock; received and answered at the others by theirs."""

    sent_s: float
    received_s: float
    answered_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Offset:
    """Their clock is ahead of ours by `offset_s`, give or take `error_s`."""

    offset_s: float
    error_s: float


def offset_of(exchanges: Iterable[Exchange]) -> Offset | None:
    """By the exchange with the shortest round trip; None without one that makes sense."""
    found = [
        Offset(((one.received_s - one.sent_s) + (one.answered_s - one.back_s)) / 2, trip_s / 2)
        for one in exchanges
        if (trip_s := (one.back_s - one.sent_s) - (one.answered_s - one.received_s)) >= 0.0
    ]
    return min(found, key=lambda offset: offset.error_s, default=None)


def ask_offset(connection: socket.socket, *, num_exchanges: int = 8) -> Offset | None:
    """Ask the node at the other end, which runs `answer_offset`. Raises OSError when it goes away or a set time-out passes."""
    exchanges = []
    for _ in range(num_exchanges):
        sent_s = time.time()
        connection.sendall(_STAMP.pack(sent_s))
        received_s, answered_s = (_STAMP.unpack(_exactly(connection, _STAMP.size))[0] for _ in range(2))
        exchanges.append(Exchange(sent_s, received_s, answered_s, time.time()))
    return offset_of(exchanges)


def answer_offset(connection: socket.socket, *, num_exchanges: int = 8, ahead_s: float = 0.0) -> None:
    """`ahead_s` is added to our clock, for a drill of a clock that is wrong."""
    for _ in range(num_exchanges):
        _exactly(connection, _STAMP.size)
        received_s = time.time() + ahead_s
        connection.sendall(_STAMP.pack(received_s) + _STAMP.pack(time.time() + ahead_s))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionResetError("the other node hung up")
        parts += part
    return parts
