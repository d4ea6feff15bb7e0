"""The connections of the coordinator: one thread, none waits for another. Who sends garbage or does not read is dropped, and counted."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from surefoot.launch.coordinator_wire import PROTOCOL, Hello, Lines, Message, ToNode, Welcome, decode, encode

logger = logging.getLogger(__name__)

# No settings: each is far above what a well-behaved node needs, and bounds what one that is not can cost.
_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 4 << 20
_MAX_CONNECTIONS = 4096
_HELLO_LIMIT_S = 10.0


@dataclass(eq=False, slots=True)
class Link:
    """One connection. `nodes` are those that it speaks for; it is heard once it said a good hello."""

    channel: socket.socket
    peer: str
    since_s: float
    lines: Lines = field(default_factory=Lines)
    unsent: bytearray = field(default_factory=bytearray)
    welcomed: bool = False
    nodes: set[str] = field(default_factory=set)
    heard: dict[str, float] = field(default_factory=dict)


class Links:
    """Owns the listener and all connections. `dropped` counts connections by why they were."""

    def __init__(self, listener: socket.socket, *, token: str, run: str, welcome: Welcome) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._token, self._run, self._welcome = token.encode(), run, welcome
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._open: set[Link] = set()
        self._by_node: dict[str, Link] = {}
        self.dropped: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def receive(self, *, wait_s: float, now_s: float) -> Iterator[tuple[Link, Message]]:
        """What has come, after waiting at most `wait_s` for the first of it."""
        for key, mask in self._selector.select(wait_s):
            link: Link | None = key.data
            if link is None:
                self._accept(now_s)
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush(link)
            if mask & selectors.EVENT_READ and link in self._open:
                yield from self._read(link)
        for link in [link for link in self._open if not link.welcomed and now_s - link.since_s > _HELLO_LIMIT_S]:
            self._drop(link, "silent")

    def speaks_for(self, link: Link, node: str) -> None:
        """The newest connection that spoke for a node is the one that it is answered on."""
        before = self._by_node.get(node)
        if before is not link:
            if before is not None:
                before.nodes.discard(node)
            self._by_node[node] = link
            link.nodes.add(node)

    def send(self, node: str, message: ToNode) -> bool:
        """Queue it for a node; False when no connection speaks for it now: it asks again when it comes back."""
        link = self._by_node.get(node)
        if link is not None:
            self.answer(link, message)
        return link is not None

    def answer(self, link: Link, message: ToNode) -> None:
        if link not in self._open:
            return
        link.unsent += encode(message)
        self._flush(link)
        if len(link.unsent) > _MAX_UNSENT_BYTES:
            self._drop(link, "slow reader")

    def links(self) -> tuple[Link, ...]:
        return tuple(self._open)

    def close(self) -> None:
        for link in self.links():
            self._flush(link)
            self._drop(link, "")
        self._selector.close()
        self._listener.close()

    def _accept(self, now_s: float) -> None:
        try:
            channel, address = self._listener.accept()
        except OSError:  # it hung up already, or no descriptor is left: the next look tries again
            return
        if len(self._open) >= _MAX_CONNECTIONS:
            channel.close()
            self.dropped["too many"] += 1
            return
        channel.setblocking(False)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(channel, f"{address[0]}:{address[1]}", now_s)
        self._open.add(link)
        self._selector.register(channel, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> Iterator[tuple[Link, Message]]:
        try:
            data = link.channel.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link, "")
            return
        try:
            for line in link.lines.feed(data):
                message = decode(line)
                if link.welcomed and not isinstance(message, Hello):
                    yield link, message
                elif not self._greet(link, message):
                    return
        except ValueError as error:
            self._drop(link, "garbage", str(error))

    def _greet(self, link: Link, message: Message) -> bool:
        if not isinstance(message, Hello) or message.protocol != PROTOCOL or message.run != self._run:
            self._drop(link, "stranger")
            return False
        if not hmac.compare_digest(message.token.encode(), self._token):
            self._drop(link, "wrong token")
            return False
        link.welcomed = True
        self.answer(link, self._welcome)
        return True

    def _flush(self, link: Link) -> None:
        try:
            while link.unsent:
                sent = link.channel.send(link.unsent)
                del link.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(link, "")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        if link in self._open and self._selector.get_key(link.channel).events != wanted:
            self._selector.modify(link.channel, wanted, link)

    def _drop(self, link: Link, why: str, words: str = "") -> None:
        if link not in self._open:
            return
        if why:
            self.dropped[why] += 1
            if self.dropped[why] <= 10:  # a port scanner must not fill the log; the counts go on
                logger.warning("the connection of %s is dropped: %s %s", link.peer, why, words)
        self._open.discard(link)
        self._selector.unregister(link.channel)
        link.channel.close()
        for node in link.nodes:
            if self._by_node.get(node) is link:
                del self._by_node[node]
