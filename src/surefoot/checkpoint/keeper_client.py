"""Putting bytes into a keeper, and a checkpoint back together from what keepers hold. No torch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from surefoot.checkpoint.blocks import Blocks
from surefoot.checkpoint.fetch import assemble
from surefoot.checkpoint.keeper_wire import HANDSHAKE_LIMIT_S, Wire, introduce
from surefoot.checkpoint.kept import kept_key
from surefoot.checkpoint.manifest import MANIFEST_NAME
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, PeerLost, SurefootError
from surefoot.core.records import ManifestFile

_ERRORS: Mapping[str, type[SurefootError]] = {kind.__name__: kind for kind in (Corrupt, Incomplete, PeerLost)}

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class KeeperClient:
    """A ByteKeeper at another address. Each call is a connection of its own: nothing to mend when the keeper was away.

    Raises CheckpointError whose `kind` is "unreachable", "credentials", "budget", "missing" or "damaged", and PeerLost when fenced.
    """

    host: str
    port: int
    run: str
    token: bytes
    generation: int

    @property
    def name(self) -> str:
        return f"keeper {self.host}:{self.port}"

    def put(self, key: str, data: memoryview, *, xxh3_128: str | None = None) -> None:
        """Returns when the keeper holds the bytes and has compared their checksum, which may be known already."""
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        checksum = xxh3_128 or str(xxhash.xxh3_128(flat).hexdigest())

        def talk(wire: Wire) -> None:
            self._ask(wire, {"op": "put", "key": key, "size": flat.nbytes, "checksum": checksum, "generation": self.generation})
            wire.send({}, flat, xxh3_128=checksum)
            self._heard(wire)

        self._connected(talk)

    def get(self, key: str) -> memoryview:
        """All bytes of a range, compared with the checksum of its writer."""

        def talk(wire: Wire) -> memoryview:
            header = self._ask(wire, {"op": "get", "key": key, "offset": 0, "length": None})
            buffer = memoryview(bytearray(header["bytes"]))
            wire.receive_into(buffer, header)
            if buffer.nbytes and header["xxh3_128"] != header["checksum"]:
                raise Corrupt(f"xxh3_128 {header['xxh3_128']}, its writer had {header['checksum']}", where=key, kind="damaged")
            return buffer

        return self._connected(talk)

    def read_into(self, key: str, *, offset: int, buffer: memoryview) -> None:
        """A part of a range, checked on the way; whether the whole is what was written only the whole can tell."""

        def talk(wire: Wire) -> None:
            wire.receive_into(buffer, self._ask(wire, {"op": "get", "key": key, "offset": offset, "length": buffer.nbytes}))

        self._connected(talk)

    def keys(self) -> list[str]:
        return sorted(self.listing())

    def listing(self) -> dict[str, tuple[int, str]]:
        """Bytes and xxh3_128 of all ranges."""

        def talk(wire: Wire) -> dict[str, tuple[int, str]]:
            return {key: (int(size), str(checksum)) for key, (size, checksum) in self._ask(wire, {"op": "list"})["kept"].items()}

        return self._connected(talk)

    def drop(self, key: str) -> None:
        self._connected(lambda wire: self._ask(wire, {"op": "drop", "key": key, "generation": self.generation}))

    def fence(self) -> None:
        """Have the keeper refuse everything that is older than this client's generation."""
        self._connected(lambda wire: self._ask(wire, {"op": "fence", "generation": self.generation}))

    def complete(self, checkpoint: str, *, rank: int, files: Mapping[str, str]) -> None:
        """Say that these files (name -> xxh3_128) are all of a rank's share of a checkpoint; older ones of the rank may go."""
        request = {"op": "complete", "checkpoint": checkpoint, "rank": rank, "files": dict(files), "generation": self.generation}
        self._connected(lambda wire: self._ask(wire, request))

    def complete_ranks(self, checkpoint: str) -> list[int]:
        return self._connected(lambda wire: [int(rank) for rank in self._ask(wire, {"op": "ranks", "checkpoint": checkpoint})["ranks"]])

    def _connected(self, talk: Callable[[Wire], Answer]) -> Answer:
        try:
            with socket.create_connection((self.host, self.port), timeout=HANDSHAKE_LIMIT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return talk(introduce(connection, token=self.token, run=self.run))
        except OSError as error:
            hint = "the bytes are still on disk"
            raise CheckpointError(f"the keeper does not answer: {error}", where=self.name, hint=hint, kind="unreachable") from error

    def _ask(self, wire: Wire, request: Mapping[str, Any]) -> dict[str, Any]:
        wire.send(request)
        return self._heard(wire)

    def _heard(self, wire: Wire) -> dict[str, Any]:
        header = wire.receive()
        if header.get("ok") is True:
            return header
        kind = _ERRORS.get(str(header.get("error")), CheckpointError)
        values = header.get("values")
        raise kind(
            str(header.get("what")),
            where=f"{self.name}: {header.get('where')}",
            **(values if isinstance(values, dict) else {"kind": "refused"}),
        )


class KeeperSource:
    """The files of one checkpoint that a keeper holds, as a FileSource."""

    def __init__(self, keeper: KeeperClient, checkpoint: str) -> None:
        self.name = keeper.name
        self._keys: dict[tuple[str, int, str], str] = {}
        for key, (size, checksum) in keeper.listing().items():
            held, _, name = key.partition("/")
            if held == checkpoint:
                self._keys[name.partition("/")[2], size, checksum] = key
        self._blocks = Blocks(
            lambda file, offset, buffer: keeper.read_into(self._keys[_identity(file)], offset=offset, buffer=buffer), name=self.name
        )

    def has(self, file: ManifestFile) -> bool:
        return _identity(file) in self._keys

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        self._blocks.read_into(file, offset=offset, buffer=buffer)


def give_share(keeper: KeeperClient, checkpoint: str, *, rank: int, files: Mapping[str, memoryview]) -> None:
    """Put a rank's share of a checkpoint (file name -> bytes, such as the image in its slot), and say that it is complete.

    What a job has once (manifest.json, .metadata, extras.json) belongs to rank 0's share.
    """
    checksums = {}
    for name, data in files.items():
        checksums[name] = str(xxhash.xxh3_128(data).hexdigest())
        keeper.put(kept_key(checkpoint, rank=rank, name=name), data, xxh3_128=checksums[name])
    keeper.complete(checkpoint, rank=rank, files=checksums)


def fetch_from_keepers(keepers: Sequence[KeeperClient], checkpoint: str, *, into: Path) -> Path:
    """Local. Write a checkpoint from what several keepers hold together, each file verified; its folder. Raises CheckpointError."""
    key = kept_key(checkpoint, rank=0, name=MANIFEST_NAME)
    sources: list[KeeperSource] = []
    manifest: bytes | None = None
    told = []
    for keeper in keepers:
        try:
            sources.append(KeeperSource(keeper, checkpoint))
            if manifest is None and key in keeper.listing():
                manifest = bytes(keeper.get(key))
        except CheckpointError as error:
            told.append(str(error))
    if manifest is None:
        raise Incomplete(
            f"no keeper holds the manifest of {checkpoint}: {'; '.join(told) or 'all answered'}", where="keepers", kind="missing"
        )
    return assemble(manifest, sources, into=into)


def _identity(file: ManifestFile) -> tuple[str, int, str]:
    return file.name, file.num_bytes, file.xxh3_128
