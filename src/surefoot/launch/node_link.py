"""A node's end of the wire: beats from a thread of its own, so that a long look at a disk is no silence, and the node's own fence.

The thread beats, reconnects, and kills this node's ranks once nine tenths of `dead_s` have passed since the newest beat that was heard. It
needs nobody for that: a node that is cut off cannot ask. What the coordinator says is queued for the agent's one thread.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surefoot.coordinate.silence import SilenceLimits
from surefoot.core.clock import Clock
from surefoot.core.sections import LaunchSection
from surefoot.launch.coordinator_wire import (
    Beat,
    Contact,
    Ended,
    Heard,
    Hello,
    Join,
    Leave,
    Lines,
    Message,
    Ready,
    Welcome,
    decode,
    encode,
    read_contact,
)
from surefoot.launch.node import NodeIdentity

logger = logging.getLogger(__name__)

_TURN_S = 0.1
_CONNECT_LIMIT_S = 1.0
_RECONNECT_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """The ranks of this node: `kill` ends them at once, `step` is their newest. Called from the thread of the link, until `end`."""

    generation: int
    kill: Callable[[], None]
    step: Callable[[], int]


class NodeLink:
    """Made in the thread that lives as long as the process; `close` ends the thread. All methods may be called from any thread."""

    def __init__(self, run_dir: Path, me: NodeIdentity, *, limits: LaunchSection, capacity: int, clock: Clock) -> None:
        self.me = me
        self._run_dir, self._limits, self._capacity, self._clock = run_dir, limits, capacity, clock
        self._guard = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._outbox: deque[Message] = deque()
        self._running: Running | None = None
        self._ready: Ready | None = None
        self._ended: Ended | None = None
        self._leave: Leave | None = None
        self._untold = 0
        self._fenced = ""
        self._fence_s = SilenceLimits(dead_s=limits.dead_s).fence_s
        self._heard_s = clock.monotonic_s()
        self._connected = False
        self._lost_s = self._connected_s = self._heard_s
        self._channel: socket.socket | None = None
        self._lines = Lines()
        self._beat_due_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="node-beats", daemon=True)
        self._thread.start()

    def say(self, message: Message) -> None:
        """Sent as soon as there is a connection; kept until then."""
        with self._guard:
            self._outbox.append(message)

    def be_ready(self, port: int) -> None:
        """No rank is left here; said again on every new connection until ranks run."""
        with self._guard:
            self._ready, self._ended = Ready(self.me.node, port), None
            self._outbox.append(self._ready)

    def be_done(self, ended: Ended) -> None:
        """How the ranks ended; said again on every new connection until this node is ready for others."""
        with self._guard:
            self._ended, self._untold = ended, 0
            self._outbox.append(ended)

    def be_gone(self, reason: str) -> None:
        """This node goes and takes no place any more; said again on every new connection, as long as there is one."""
        with self._guard:
            self._ready, self._leave = None, Leave(self.me.node, reason)
            self._outbox.append(self._leave)

    def begin(self, running: Running) -> None:
        with self._guard:
            self._running, self._ready, self._ended, self._fenced = running, None, None, ""
            self._untold = running.generation

    def end(self) -> None:
        """None of the ranks is left."""
        with self._guard:
            self._running = None

    def take(self, *, wait_s: float = 0.0) -> Message | None:
        """The next word of the coordinator; None when none came within `wait_s`."""
        with self._guard:
            if not self._inbox and wait_s:
                self._guard.wait(wait_s)
            return self._inbox.popleft() if self._inbox else None

    @property
    def fenced(self) -> str:
        """Why this node has killed its own ranks in the generation that began last; empty while it has not."""
        with self._guard:
            return self._fenced

    @property
    def lost_for_s(self) -> float:
        """How long there has been no connection; 0 while there is one."""
        with self._guard:
            return 0.0 if self._connected else self._clock.monotonic_s() - self._lost_s

    @property
    def silent_for_s(self) -> float:
        """How long ago the newest beat that was heard was sent."""
        with self._guard:
            return self._clock.monotonic_s() - self._heard_s

    def flush(self, *, limit_s: float) -> None:
        """Return when all that was said has left this machine, or after `limit_s`."""
        until_s = self._clock.monotonic_s() + limit_s
        while self._clock.monotonic_s() < until_s:
            with self._guard:
                if not self._outbox:
                    return
            self._clock.sleep(_TURN_S / 4)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    # --- From here on: in the thread ---

    def _live(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except (OSError, ValueError) as error:
                self._disconnect(str(error))
                self._closing.wait(_RECONNECT_WAIT_S)
            self._fence_if_due()
        self._disconnect("")

    def _turn(self) -> None:
        if self._channel is None:
            self._connect()
        channel = self._channel
        if channel is None:
            self._closing.wait(_RECONNECT_WAIT_S)
            return
        self._send_due(channel)
        if select.select([channel], [], [], _TURN_S)[0]:
            data = channel.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the coordinator hung up")
            for line in self._lines.feed(data):
                self._take_in(decode(line))
        silent_s = self._clock.monotonic_s() - max(self._heard_s, self._connected_s)
        if silent_s > self._limits.dead_s:
            raise TimeoutError(f"not heard for {silent_s:.1f} s")  # the other end is gone without a word: look for a new one

    def _connect(self) -> None:
        contact = read_contact(self._run_dir)
        if contact is None:
            return
        channel = socket.create_connection((contact.host, contact.port), timeout=_CONNECT_LIMIT_S)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel, self._lines, self._connected_s = channel, Lines(), self._clock.monotonic_s()
        channel.sendall(self._greeting(contact))
        with self._guard:
            self._connected, self._beat_due_s = True, 0.0

    def _greeting(self, contact: Contact) -> bytes:
        """Who we are, and again what may have been said into a connection that was cut: how the ranks ended, that none is left, that we go.

        How they ended comes first: a node that joins without ranks and has not said so counts as one that was started anew.
        """
        with self._guard:
            generation = self._running.generation if self._running else self._untold
            step = self._running.step() if self._running else 0
            first, last = self._ended, self._leave or self._ready
        me = self.me
        join = Join(me.node, me.name, me.address, self._capacity, me.machine, generation, step)
        return b"".join(encode(message) for message in (Hello(contact.run, contact.token), first, join, last) if message is not None)

    def _send_due(self, channel: socket.socket) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._limits.beat_s
            with self._guard:
                generation, step = (self._running.generation, self._running.step()) if self._running else (0, 0)
            channel.sendall(encode(Beat(self.me.node, now_s, generation, step)))
        while True:
            with self._guard:
                message = self._outbox[0] if self._outbox else None
            if message is None:
                return
            channel.sendall(encode(message))
            with self._guard:
                self._outbox.popleft()

    def _take_in(self, message: Message) -> None:
        if isinstance(message, Heard):
            with self._guard:
                self._heard_s = max(self._heard_s, message.nodes.get(self.me.node, 0.0))
        elif not isinstance(message, Welcome):
            with self._guard:
                self._inbox.append(message)
                self._guard.notify_all()

    def _fence_if_due(self) -> None:
        with self._guard:
            running, silent_s = self._running, self._clock.monotonic_s() - self._heard_s
            if running is None or self._fenced or silent_s <= self._fence_s:
                return
            self._fenced = f"not heard by the coordinator for {silent_s:.1f} s, the limit is {self._fence_s:g} s"
            running.kill()  # within: nobody lets go of these ranks meanwhile
        logger.warning("generation %d: %s: this node has killed its own ranks", running.generation, self._fenced)

    def _disconnect(self, why: str) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.close()
            if why:
                logger.warning("the coordinator is not there any more (%s): looking for it, or for the next one", why)
        with self._guard:
            if self._connected:
                self._lost_s = self._clock.monotonic_s()
            self._connected = False
