"""What a keeper and its clients say to each other over TCP: who may speak, and frames that are checked on both sides. No torch, no pickle.

Handshake: keeper -> magic, nonce; client -> nonce, proof; keeper -> proof. A proof is an HMAC-SHA256 under the run's token over both nonces
and the run's name, so neither side says the token, and an old recording proves nothing. A session key comes out of it.
Frame: length of the header, header (JSON), HMAC of the header under the session key with a running number, payload. The header holds the
payload's length and xxh3_128.

The HMAC keeps out who lacks the token. The xxh3 finds what went wrong on the way: it is no defence against somebody who can rewrite packets
of an open connection. Neither hides the bytes. So a keeper belongs on the private network that the ranks speak over anyway.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from surefoot.core.errors import CheckpointError, ConfigError, Corrupt
from surefoot.core.strict_json import canonical, loads

TOKEN_ENV = "SUREFOOT_KEEPER_TOKEN"
TOKEN_FILE_ENV = "SUREFOOT_KEEPER_TOKEN_FILE"
MIN_TOKEN_BYTES = 16
STALL_LIMIT_S = 30.0
"""A peer that moves no byte for this long is gone: a live one moves one every few milliseconds."""
HANDSHAKE_LIMIT_S = 10.0

_MAGIC = b"sfkeep1\n"
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 4 << 20


def run_token(environment: Mapping[str, str] | None = None) -> bytes:
    """The secret that all processes of a run share, from the environment or a file that its owner alone can read. Raises ConfigError."""
    given = os.environ if environment is None else environment
    token = given.get(TOKEN_ENV, "").encode()
    where = TOKEN_ENV
    if not token and (path := given.get(TOKEN_FILE_ENV)):
        token, where = _read_token(Path(path)), path
    if not token:
        raise ConfigError("no token for the keeper", where="environment", hint=f"set {TOKEN_ENV} or {TOKEN_FILE_ENV}")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(f"the token has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed", where=where)
    return token


def write_token(path: Path) -> bytes:
    """A fresh token in a new file of mode 0600."""
    token = secrets.token_hex(32).encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(token)
    return token


def _read_token(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                what = f"others may read the token: mode {stat.S_IMODE(status.st_mode):04o}"
                raise ConfigError(what, where=str(path), hint=f"chmod 600 {path}, and make a new token")
            return file.read().strip()
    except OSError as error:
        raise ConfigError(f"the token cannot be read: {error.strerror}", where=str(path)) from error


class Wire:
    """One authenticated connection. Not for two threads."""

    def __init__(self, connection: socket.socket, *, key: bytes, client: bool) -> None:
        self._socket = connection
        self._key = key
        self._directions = (b"c", b"k") if client else (b"k", b"c")
        self._numbers = [0, 0]

    def send(self, header: Mapping[str, Any], payload: memoryview | None = None, *, xxh3_128: str | None = None) -> None:
        """`xxh3_128`: of the payload, when it is known. Raises OSError."""
        data = payload.cast("B") if payload is not None and payload.nbytes else memoryview(b"")
        told = {**header, "bytes": data.nbytes, "xxh3_128": xxh3_128 or str(xxhash.xxh3_128(data).hexdigest())}
        text = canonical(told)
        self._socket.sendall(_LENGTH.pack(len(text)) + text + self._mac(0, text))
        if data.nbytes:
            self._socket.sendall(data)

    def receive(self) -> dict[str, Any]:
        """The next header; its payload, if `bytes` says there is one, must be taken by `receive_into`. Raises Corrupt or OSError."""
        (length,) = _LENGTH.unpack(receive_exactly(self._socket, _LENGTH.size))
        if length > _MAX_HEADER_BYTES:
            raise Corrupt(f"a header of {length} bytes, at most {_MAX_HEADER_BYTES} are allowed", where="keeper")
        text = receive_exactly(self._socket, length)
        if not hmac.compare_digest(receive_exactly(self._socket, _MAC_BYTES), self._mac(1, text)):
            raise Corrupt("a header that its sender did not write", where="keeper")
        header = loads(text)
        if not isinstance(header, dict) or not isinstance(header.get("bytes"), int) or header["bytes"] < 0:
            raise Corrupt("a header without a length", where="keeper")
        return header

    def receive_into(self, buffer: memoryview, header: Mapping[str, Any]) -> None:
        """The payload of `header`, checked. Raises Corrupt or OSError."""
        self.take_into(buffer)
        found = str(xxhash.xxh3_128(buffer).hexdigest())
        if buffer.nbytes != header["bytes"] or found != header["xxh3_128"]:
            raise Corrupt(f"xxh3_128 {found} came, {header['xxh3_128']} was sent", where="keeper", kind="damaged")

    def take_into(self, buffer: memoryview) -> None:
        """The payload, for a caller who checks it. Raises OSError."""
        fill(self._socket, buffer)

    def _mac(self, way: int, text: bytes) -> bytes:
        """`way` 0: what we send, 1: what we receive. The running number keeps a frame from being left out or played again."""
        self._numbers[way] += 1
        return hmac.digest(self._key, self._directions[way] + struct.pack("<Q", self._numbers[way]) + text, "sha256")


def greet(connection: socket.socket, *, token: bytes, run: str) -> Wire | None:
    """The keeper's side of the handshake; None when the other one does not know the token. Raises OSError."""
    connection.settimeout(HANDSHAKE_LIMIT_S)
    deadline_s = time.monotonic() + HANDSHAKE_LIMIT_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + ours)
    answer = receive_exactly(connection, _NONCE_BYTES + _MAC_BYTES, deadline_s=deadline_s)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", run=run, nonces=ours + theirs)):
        return None
    connection.sendall(_proof(token, b"keeper", run=run, nonces=ours + theirs))
    connection.settimeout(STALL_LIMIT_S)
    return Wire(connection, key=_proof(token, b"session", run=run, nonces=ours + theirs), client=False)


def introduce(connection: socket.socket, *, token: bytes, run: str) -> Wire:
    """The client's side. Raises CheckpointError when the two do not share token and run, OSError when the other one is gone."""
    connection.settimeout(HANDSHAKE_LIMIT_S)
    greeting = receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(_MAGIC):
        raise CheckpointError("no keeper answers there", where="keeper", kind="unreachable")
    theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    nonces = theirs + ours
    connection.sendall(ours + _proof(token, b"client", run=run, nonces=nonces))
    try:
        proof = receive_exactly(connection, _MAC_BYTES)
    except ConnectionError:
        proof = b""
    if not hmac.compare_digest(proof, _proof(token, b"keeper", run=run, nonces=nonces)):
        hint = f"both sides need the same {TOKEN_ENV} and run name"
        raise CheckpointError(f"the keeper does not know the token of run {run}", where="keeper", hint=hint, kind="credentials")
    connection.settimeout(STALL_LIMIT_S)
    return Wire(connection, key=_proof(token, b"session", run=run, nonces=nonces), client=True)


def receive_exactly(connection: socket.socket, num_bytes: int, *, deadline_s: float | None = None) -> bytes:
    buffer = bytearray(num_bytes)
    fill(connection, memoryview(buffer), deadline_s=deadline_s)
    return bytes(buffer)


def fill(connection: socket.socket, buffer: memoryview, *, deadline_s: float | None = None) -> None:
    """Raises ConnectionError when the other side hangs up before that, TimeoutError when it stalls."""
    done = 0
    while done < buffer.nbytes:
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise TimeoutError("too slow a handshake")
        num_bytes = connection.recv_into(buffer[done:])
        if not num_bytes:
            raise ConnectionError(f"hung up after {done} of {buffer.nbytes} bytes")
        done += num_bytes


def _proof(token: bytes, role: bytes, *, run: str, nonces: bytes) -> bytes:
    return hmac.digest(token, _MAGIC + role + b"\0" + nonces + run.encode(), "sha256")
