"""Checkpoints in an object store: copied file by file, read back, published by one small marker that is created last. No torch.

<url>/<id>.<hash>/<file>   the files of a checkpoint as they are on disk; <hash> begins the hash of its manifest, so two checkpoints of one
                           id never mix, whoever writes them; manifest.json is sent when all others were read back
<url>/<id>.json            the marker: what it names is published. Created under the condition that it does not exist

A bare copy of the folder is a checkpoint that any tool can read. Parts of an upload that was killed are seen by nobody and can only be
removed by the store: give the bucket a rule that aborts incomplete multipart uploads.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from surefoot.checkpoint.blocks import Blocks
from surefoot.checkpoint.manifest import MANIFEST_NAME, checksum_bytes, parse_id, parse_manifest
from surefoot.checkpoint.object_store import ObjectStore
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete
from surefoot.core.records import Manifest, ManifestFile
from surefoot.core.strict_json import canonical, loads

logger = logging.getLogger(__name__)

MARKER_FORMAT = 1
_HASH_CHARS = 16
_PIECE_BYTES = 1 << 20
_NUM_PUBLISH_TRIES = 3  # a store may refuse two who create at once, and then there is none
_NUM_SENDS = 2  # a flip on the way is an accident, two are not
_MARKER = re.compile(r"(s\d+-a\d+(?:-r\d+)?)\.json")
_FOLDER = re.compile(r"(s\d+-a\d+(?:-r\d+)?)\.([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Marker:
    """What publishes a checkpoint: whose manifest, and the token of the writer that created it."""

    id: str
    manifest_hash: str
    writer: str

    @property
    def folder(self) -> str:
        return folder_of(self.id, manifest_hash=self.manifest_hash)

    def as_bytes(self) -> bytes:
        return canonical(
            {
                "format_version": MARKER_FORMAT,
                "id": self.id,
                "manifest_hash": self.manifest_hash,
                "writer": self.writer,
            }
        )


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that is published and was read back. `ours`: this writer published it, else another one of the same checkpoint did."""

    id: str
    manifest_hash: str
    ours: bool
    num_files: int
    num_sent: int
    num_bytes: int
    num_sent_bytes: int


class Throttle:
    """Spreads what is sent so that it stays below `bytes_per_s` (0: no cap). No burst: unused time is not saved up."""

    def __init__(self, bytes_per_s: int, *, clock: Clock | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock or SystemClock()
        self._free_at_s = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be sent."""
        if not self._bytes_per_s:
            return
        now_s = self._clock.monotonic_s()
        if self._free_at_s > now_s:
            self._clock.sleep(self._free_at_s - now_s)
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s


def folder_of(checkpoint: str, *, manifest_hash: str) -> str:
    return f"{checkpoint}.{manifest_hash[:_HASH_CHARS]}"


def copy_checkpoint(
    folder: Path,
    store: ObjectStore,
    *,
    throttle: Throttle | None = None,
    writer: str | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Copied:
    """Copy the published and read-back checkpoint `folder`, read the copy back, publish it.

    Files that are there already and right are not sent again. `on_progress` is called before each piece is sent: what it raises ends
    the copy. Raises CheckpointError; its value `kind` is "conflict" when another checkpoint holds the id, "source" when the local files
    are gone or not those of the manifest, "damaged" when what was sent is not what is read back, else as ObjectStore says.
    """
    throttle = throttle or Throttle(0)
    writer = writer or uuid.uuid4().hex
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise _source_problem(folder, str(error)) from error
    manifest = parse_manifest(raw, where=str(folder / MANIFEST_NAME))
    marker = Marker(manifest.id, manifest.hash, writer)
    _refuse_other(read_marker(store, manifest.id), marker, store=store)
    present = store.keys(under=marker.folder)
    sent = []
    for file in (*manifest.files, its_manifest(raw)):
        key = f"{marker.folder}/{file.name}"
        if present.get(key) == file.num_bytes and checksum_object(store, key, num_bytes=file.num_bytes) == file.xxh3_128:
            continue
        send_file(folder / file.name, store, key, file=file, throttle=throttle, on_progress=on_progress)
        sent.append(file)
    return Copied(
        id=manifest.id,
        manifest_hash=manifest.hash,
        ours=_publish(store, marker),
        num_files=len(manifest.files) + 1,
        num_sent=len(sent),
        num_bytes=sum(file.num_bytes for file in manifest.files),
        num_sent_bytes=sum(file.num_bytes for file in sent),
    )


def send_file(path: Path, store: ObjectStore, key: str, *, file: ManifestFile, throttle: Throttle, on_progress: Callable[[], None]) -> None:
    """Send one file and read it back. Raises CheckpointError when either end does not hold the bytes of the manifest."""

    def pieces() -> Iterator[bytes]:
        digest = xxhash.xxh3_128()
        try:
            with path.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    on_progress()
                    throttle.take(len(piece))
                    digest.update(piece)
                    yield piece
        except OSError as error:
            raise _source_problem(path, str(error)) from error
        if digest.hexdigest() != file.xxh3_128:
            # Raised before the last part is acknowledged, so the client aborts the object.
            raise _source_problem(path, f"its bytes are not those of the manifest: xxh3_128 {digest.hexdigest()}, written {file.xxh3_128}")

    found = ""
    for _ in range(_NUM_SENDS):
        store.write(key, pieces, num_bytes=file.num_bytes)
        size = store.keys(under=key.rpartition("/")[0]).get(key, -1)
        found = checksum_object(store, key, num_bytes=file.num_bytes) if size == file.num_bytes else f"{size} bytes of {file.num_bytes}"
        if found == file.xxh3_128:
            return
        logger.warning("%s/%s was read back as %s, sent as xxh3_128 %s", store.url, key, found, file.xxh3_128)
    raise Corrupt(
        f"{key} was read back as {found}, sent {_NUM_SENDS} times as xxh3_128 {file.xxh3_128}",
        where=str(store.url),
        hint="the store or the way to it changes bytes",
        kind="damaged",
        file=file.name,
    )


def its_manifest(raw: bytes) -> ManifestFile:
    """The manifest itself as one more file of the checkpoint."""
    return ManifestFile(name=MANIFEST_NAME, num_bytes=len(raw), xxh3_128=checksum_bytes(raw))


def checksum_object(store: ObjectStore, key: str, *, num_bytes: int) -> str:
    """xxh3_128 of an object, all of it read."""
    digest = xxhash.xxh3_128()
    for piece in store.pieces(key, num_bytes=num_bytes):
        digest.update(piece)
    return str(digest.hexdigest())


def _publish(store: ObjectStore, marker: Marker) -> bool:
    """Create the marker; whether this writer did. A marker that exists is read before somebody else is believed to have made it."""
    key = _marker_key(marker.id)
    found = None
    for _ in range(_NUM_PUBLISH_TRIES):
        store.create(key, marker.as_bytes())
        if (found := read_marker(store, marker.id)) is not None:
            break
    if found is None:
        raise Incomplete(f"{key} was created and is not there", where=str(store.url), kind="damaged")
    _refuse_other(found, marker, store=store)
    return found.writer == marker.writer


def _refuse_other(found: Marker | None, marker: Marker, *, store: ObjectStore) -> None:
    if found is None or found.manifest_hash == marker.manifest_hash:
        return
    other, this = found.manifest_hash[:12], marker.manifest_hash[:12]
    raise CheckpointError(
        f"another checkpoint is published there as {marker.id}: manifest {other}, this one is {this}",
        where=str(store.url),
        hint="give each run a prefix of its own in checkpoint.tiers",
        kind="conflict",
    )


def read_marker(store: ObjectStore, checkpoint: str) -> Marker | None:
    """The marker of a checkpoint, None when it is not published. Raises Corrupt."""
    raw = store.read_or_none(_marker_key(checkpoint))
    if raw is None:
        return None
    where = f"{store.url}/{_marker_key(checkpoint)}"
    try:
        value = loads(raw)
        if not isinstance(value, dict) or value["format_version"] != MARKER_FORMAT or value["id"] != checkpoint:
            raise ValueError("not the marker of this checkpoint")
        marker = Marker(checkpoint, str(value["manifest_hash"]), str(value["writer"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"no marker that can be read: {error!r}", where=where, hint="choose another checkpoint", kind="damaged") from error
    return marker


def remote_ids(store: ObjectStore) -> list[str]:
    """Ids of the published checkpoints, by (step, attempt, retry)."""
    names = [match[1] for key in store.top()[1] if (match := _MARKER.fullmatch(key))]
    return sorted(names, key=lambda name: parse_id(name) or (0, 0, 0))


def remote_manifest(store: ObjectStore, checkpoint: str) -> tuple[Manifest, bytes]:
    """The manifest of a published checkpoint and its exact bytes, verified against the marker. Raises Incomplete or Corrupt."""
    marker = read_marker(store, checkpoint)
    if marker is None:
        there = ", ".join(remote_ids(store)[-5:]) or "none"
        raise Incomplete(f"{checkpoint} is not published there", where=str(store.url), hint=f"published: {there}", kind="missing")
    raw = store.read(f"{marker.folder}/{MANIFEST_NAME}")
    manifest = parse_manifest(raw, where=f"{store.url}/{marker.folder}/{MANIFEST_NAME}")
    if (manifest.hash, manifest.id) != (marker.manifest_hash, checkpoint):
        raise Corrupt("not the manifest that was published", where=f"{store.url}/{marker.folder}", kind="damaged")
    return manifest, raw


def remote_newest(store: ObjectStore) -> str:
    """The published checkpoint that was saved last, by its place in the ledger of its run. Raises Incomplete when there is none.

    Those whose manifest is damaged are passed over, aloud. Steps say nothing: after a roll-back the highest belongs to a branch given up.
    """
    found = []
    for name in remote_ids(store):
        try:
            manifest, _ = remote_manifest(store, name)
        except CheckpointError as error:
            logger.warning("%s is passed over: %s", name, error)
            continue
        found.append((manifest.ledger_seq, manifest.time_utc, name))
    if not found:
        raise Incomplete("no checkpoint is published there", where=str(store.url), hint="mend the URL, or copy one there", kind="missing")
    return max(found)[2]


def retire_remote(store: ObjectStore, checkpoint: str, *, manifest_hash: str | None = None) -> dict[str, str]:
    """Un-publish, then delete; what could not be deleted, with the reason (swept by a later call). Nothing happens to another run's one.

    `manifest_hash`: only this checkpoint may go. The marker first: without it nobody reads the rest. Then the manifest, then the data.
    """
    marker = read_marker(store, checkpoint)
    if marker is not None and manifest_hash is not None and marker.manifest_hash != manifest_hash:
        return {_marker_key(checkpoint): "it is another checkpoint's by now"}
    gone = marker.manifest_hash if marker else manifest_hash
    if marker is not None and (failed := store.delete_all([_marker_key(checkpoint)])):
        return failed
    if gone is None:
        return {}
    folder = folder_of(checkpoint, manifest_hash=gone)
    return store.delete_all(sorted(store.keys(under=folder), key=lambda key: not key.endswith(f"/{MANIFEST_NAME}")))


def unpublished(store: ObjectStore) -> list[tuple[str, str]]:
    """(id, beginning of the manifest's hash) of folders that no marker names: copies under way, given up, or half deleted."""
    folders, objects = store.top()
    markers = {match[1]: read_marker(store, match[1]) for key in objects if (match := _MARKER.fullmatch(key))}
    found = [(match[1], match[2]) for name in folders if (match := _FOLDER.fullmatch(name))]
    return [(name, part) for name, part in found if not ((marker := markers.get(name)) and marker.manifest_hash.startswith(part))]


class RemoteSource:
    """The files of one published remote checkpoint, as a FileSource: a restore takes each file from where it is whole."""

    def __init__(self, store: ObjectStore, checkpoint: str) -> None:
        manifest, self.manifest_bytes = remote_manifest(store, checkpoint)
        self.name = str(store.url)
        self.manifest = manifest
        self._files = {(file.name, file.num_bytes, file.xxh3_128) for file in manifest.files}
        folder = folder_of(checkpoint, manifest_hash=manifest.hash)
        self._blocks = Blocks(
            lambda file, offset, buffer: store.read_into(f"{folder}/{file.name}", offset=offset, buffer=buffer),
            name=f"{self.name}/{folder}",
        )

    def has(self, file: ManifestFile) -> bool:
        return (file.name, file.num_bytes, file.xxh3_128) in self._files

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        self._blocks.read_into(file, offset=offset, buffer=buffer)


def _marker_key(checkpoint: str) -> str:
    return f"{checkpoint}.json"


def _source_problem(path: Path, why: str) -> CheckpointError:
    hint = "it was retired meanwhile, or its disk is ill: see checkpoint verify"
    return CheckpointError(f"cannot be copied: {why}", where=str(path), hint=hint, kind="source")
