"""A keeper: a process that holds other processes' bytes in memory and serves them over TCP, so that they outlive a node. No torch.

Which node's keeper holds which rank's image, and how they find each other, is not decided here: that needs several nodes and comes with
them. Here is what such a placement stands on: the protocol, its checks, its bounds.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.keeper_wire import Wire, greet
from surefoot.checkpoint.kept import KeptBytes
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, PeerLost, SurefootError

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_ACCEPT_WAIT_S = 0.5


class KeeperServer:
    """Serves `kept` to whoever proves to know the run's token. A thread per connection, at most 64; a stalled one is dropped."""

    def __init__(self, kept: KeptBytes, *, run: str, token: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._kept = kept
        self._run = run
        self._token = token
        self._listener = socket.create_server((host, port), backlog=_MAX_CONNECTIONS)
        self._listener.settimeout(_ACCEPT_WAIT_S)
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._stopping = threading.Event()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def serve(self) -> None:
        """Until `stop` is called from another thread or a signal handler."""
        with self._listener:
            while not self._stopping.is_set():
                try:
                    connection, peer = self._listener.accept()
                except TimeoutError:
                    continue
                if not self._slots.acquire(blocking=False):
                    connection.close()
                    logger.warning("a connection from %s was refused: %d are open", peer, _MAX_CONNECTIONS)
                    continue
                threading.Thread(target=self._attend, args=(connection, peer), name="keeper", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _attend(self, connection: socket.socket, peer: Any) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire = greet(connection, token=self._token, run=self._run)
                if wire is None:
                    logger.warning("%s does not know the token of this run", peer)
                    return
                while self._answer(wire):
                    pass
        except (OSError, SurefootError, ValueError, KeyError, TypeError) as error:
            # What others send ends their connection and nothing else. A range that was on its way in was never kept.
            if not isinstance(error, ConnectionError):
                logger.warning("the connection of %s ends: %r", peer, error)
        finally:
            self._slots.release()

    def _answer(self, wire: Wire) -> bool:
        """One request; False when there was none."""
        try:
            request = wire.receive()
        except ConnectionError:
            return False
        try:
            if request["op"] == "put":
                self._take(wire, request)
                wire.send({"ok": True})
            else:
                answer, data = self._reply(request)
                wire.send(answer, data, xxh3_128=answer.get("checksum") if answer.get("whole") else None)
        except (CheckpointError, PeerLost) as error:
            wire.send({"ok": False, "error": type(error).__name__, "what": error.what, "where": error.where, "values": dict(error.values)})
        return True

    def _take(self, wire: Wire, request: Mapping[str, Any]) -> None:
        """Room first, then the bytes: what is refused is never sent."""
        size, xxh3_128 = int(request["size"]), str(request["checksum"])
        with self._kept.receiving(str(request["key"]), num_bytes=size, generation=int(request["generation"]), xxh3_128=xxh3_128) as buffer:
            wire.send({"ok": True, "go_on": True})
            header = wire.receive()
            if header["bytes"] != size:
                raise Corrupt(f"{header['bytes']} bytes come, {size} were announced", where="keeper")
            wire.take_into(buffer)  # `receiving` compares the checksum

    def _reply(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], memoryview | None]:
        kept, operation = self._kept, request["op"]
        if operation == "get":
            key = str(request["key"])
            if request["length"] is None:
                whole = kept.verified(key)
                return {"ok": True, "whole": True, "checksum": whole.xxh3_128}, whole.data
            start, end = int(request["offset"]), int(request["offset"]) + int(request["length"])
            found = kept.look(key)
            if not 0 <= start <= end <= found.data.nbytes:
                raise Incomplete(f"bytes {start} to {end} of {found.data.nbytes}", where=key, kind="missing")
            return {"ok": True, "checksum": found.xxh3_128}, found.data[start:end]
        if operation == "list":
            return {"ok": True, "kept": kept.listing()}, None
        if operation == "drop":
            kept.fence(int(request["generation"]))
            kept.drop(str(request["key"]))
        elif operation == "fence":
            kept.fence(int(request["generation"]))
        elif operation == "complete":
            files = {str(name): str(checksum) for name, checksum in request["files"].items()}
            kept.complete(str(request["checkpoint"]), rank=int(request["rank"]), files=files, generation=int(request["generation"]))
        elif operation == "ranks":
            return {"ok": True, "ranks": kept.complete_ranks(str(request["checkpoint"]))}, None
        else:
            raise CheckpointError(f"a keeper cannot {operation}", where="keeper", kind="refused")
        return {"ok": True}, None
