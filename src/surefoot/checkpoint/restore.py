"""A load: everything is verified before the first live tensor is touched, and the loaded bits once more afterwards."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.choosing import (
    Places,
    agree_shared,
    agree_wanted,
    choose_local,
    choose_shared,
    find_manifest,
    share_listings,
)
from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import EXTRAS_NAME, METADATA_NAME, RNG_PREFIX, rng_key
from surefoot.checkpoint.metadata import chunk_index, part_at, stored_in, tensor_metadata
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.rng import restore_rng
from surefoot.checkpoint.sources import FileSource, FolderSource, in_threads
from surefoot.checkpoint.state import LiveState, compare_inventory
from surefoot.checkpoint.verify import check_contents, checked_metadata, parse_extras, raise_first
from surefoot.core.errors import CheckpointError, Corrupt, SurefootError
from surefoot.core.hashing import sha256_json
from surefoot.core.records import Manifest, Problem
from surefoot.tensors.digest import as_hex, combine, local_box, tensor_digest
from surefoot.tensors.world import World, agree_ok, gather_json

T = TypeVar("T")

_UNTOUCHED = "the live state was not touched: fall back to another checkpoint"
_GARBAGE = "the live state is garbage now: load another checkpoint or leave"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought back. `notes` are sentences about what was not: a rank without a stored random stream keeps its keyed one.

    `sources` says where the bytes of each file came from, by the names of the sources; "disk,memory" where ranks took different ones.
    `problems` is the damage that was found and gone around.
    """

    manifest: Manifest
    extras: Mapping[str, Any]
    rng_restored: bool
    notes: tuple[str, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the checkpoint before a live tensor is touched."""

    manifest: Manifest
    metadata: Metadata
    extras: Mapping[str, Any]
    problems: tuple[Problem, ...]


def load(
    path: Path, *, state: LiveState, world: World, expected_state_digest: str | None = None, sources: Sequence[FileSource] = ()
) -> Loaded:
    """Collective over the save group. Load the checkpoint folder `path` into the live tensors of `state`, collected with `for_load`.

    `expected_state_digest` is what the ledger says. `sources` are asked before the folder, file by file: memory of this host, other copies
    of the folder; but for memory they are the same on all ranks. All ranks raise the same kind: Corrupt, Incomplete or Incompatible,
    naming file and tensor. The hint says whether the live state is as before or garbage; garbage must be loaded over or left. Random
    streams come back on ranks that had one at the save; `Loaded.notes` tells of the others.
    """
    with FolderSource(path) as own, _without_collections():
        listed = any(isinstance(source, FolderSource) and source.folder == path for source in sources)
        every_source = [*sources, *([] if listed else [own])]
        return _load(path, every_source, state=state, world=world, expected_state_digest=expected_state_digest)


def was_touched(error: CheckpointError) -> bool:
    """Whether the load that ended so had begun to write over the live tensors; the same on all ranks."""
    return error.hint == _GARBAGE


@contextmanager
def _without_collections() -> Iterator[None]:
    """A full garbage collection beside torch takes 0.2 s, and the many objects of a load would cause one in the middle of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def threads_per_rank(world: World) -> int:
    """How many cores this rank may keep busy while all ranks of its host load."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def _load(path: Path, sources: Sequence[FileSource], *, state: LiveState, world: World, expected_state_digest: str | None) -> Loaded:
    num_threads = threads_per_rank(world)
    folders = [source for source in sources if isinstance(source, FolderSource)]
    manifest, problems = _agreed(world, lambda: find_manifest(path, folders, expected_state_digest=expected_state_digest), hint=_UNTOUCHED)
    if len(set(gather_json(world, manifest.hash))) > 1:
        raise Corrupt("ranks read different manifests", where=str(path), hint=_UNTOUCHED)
    listings = share_listings(folders, manifest, world=world)
    places = Places(path, sources, listings)
    held = held_anywhere(state, world=world)
    inventory = _agree_inventory(manifest, state, held=held, world=world)
    found = _agreed(world, lambda: _look(manifest, inventory, places=places), hint=_UNTOUCHED)
    own_rng = {tensor.key: torch.empty(tensor.shape, dtype=torch.uint8) for tensor in manifest.tensors if tensor.key == rng_key(world.rank)}
    tensors = {**state.tensors, **own_rng}
    needed = {name for key, tensor in tensors.items() for name in _files_of(found.metadata, key, tensor)}

    local, damaged, wanted = choose_local(places, manifest, needed=needed, num_threads=num_threads)
    asked = agree_wanted(world, wanted)
    share = _agreed(
        world,
        lambda: choose_shared(places, manifest, found.metadata, wanted=asked, world=world, num_threads=num_threads),
        hint=_UNTOUCHED,
    )
    shared, gone_around = agree_shared(places, world, share)
    chosen = {**shared, **local}

    reader = _read(path, tensors, held=held, found=found, chosen=chosen, world=world, num_threads=num_threads)
    parts = _agreed(world, lambda: _loaded_parts(tensors, manifest, reader=reader, num_threads=num_threads), hint=_GARBAGE)
    told = gather_json(world, {"parts": parts, "sources": {name: chosen[name].name for name in sorted(needed)}})
    _compare_digests([rank["parts"] for rank in told], path=path, found=found)
    state.put_back_scalars()
    _agreed(world, lambda: _restore_streams(own_rng, world), hint=_GARBAGE)
    return Loaded(
        manifest=manifest,
        extras=found.extras,
        rng_restored=bool(own_rng),
        notes=_notes(sum(tensor.key.startswith(RNG_PREFIX) for tensor in manifest.tensors), world),
        sources=_merged([rank["sources"] for rank in told]),
        problems=(*problems, *found.problems, *damaged, *gone_around),
    )


def held_anywhere(state: LiveState, *, world: World) -> frozenset[str]:
    """Collective over the save group. The keys that any rank has: the stages of a pipeline have different ones."""
    own = sorted(state.tensors)
    if len(set(gather_json(world, sha256_json(own)))) == 1:
        return frozenset(own)
    return frozenset(key for keys in gather_json(world, own) for key in keys)


def _agree_inventory(manifest: Manifest, state: LiveState, *, held: frozenset[str], world: World) -> list[Problem]:
    """Collective over the save group. What differs between the checkpoint and all ranks together, each thing once."""
    stored = [tensor for tensor in manifest.tensors if not tensor.key.startswith(RNG_PREFIX)]
    told = gather_json(world, [asdict(problem) for problem in compare_inventory(state, stored, elsewhere=held)])
    problems = dict.fromkeys(Problem(**problem) for rank in told for problem in rank)
    return sorted(problems, key=lambda problem: problem.tensor)


def _look(manifest: Manifest, inventory: Sequence[Problem], *, places: Places) -> _Found:
    """Local. What manifest, lists and small files say: everything that can be known without reading a tensor."""
    raise_first(check_contents(manifest), where=places.path)
    if len(places.sources) == 1:  # else another source may stand in for what is missing here
        raise_first(places.listings[str(places.path)], where=places.path)
    raise_first(inventory, where=places.path)
    raw_metadata, damaged_metadata = places.read_small(manifest, METADATA_NAME)
    raw_extras, damaged_extras = places.read_small(manifest, EXTRAS_NAME)
    return _Found(
        manifest=manifest,
        metadata=checked_metadata(raw_metadata, manifest, where=places.path),
        extras=parse_extras(raw_extras, where=places.path),
        problems=(*damaged_metadata, *damaged_extras),
    )


def _files_of(metadata: Metadata, key: str, tensor: torch.Tensor) -> set[str]:
    """Local. The files that hold something of this rank's box of the tensor."""
    sizes, offsets = local_box(tensor)
    chunks = tensor_metadata(metadata, key).chunks
    return {metadata.storage_data[chunk_index(key, chunk)].relative_path for chunk in chunks if _overlaps(chunk, sizes, offsets)}


def _overlaps(chunk: ChunkStorageMetadata, sizes: Sequence[int], offsets: Sequence[int]) -> bool:
    boxes = zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
    return all(max(start, other) < min(start + size, other + more) for start, size, other, more in boxes)


def _read(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    held: frozenset[str],
    found: _Found,
    chosen: Mapping[str, FileSource],
    world: World,
    num_threads: int,
) -> Reader:
    """Collective over the save group. The live tensors are touched here."""
    files = {file.name: file for file in found.manifest.files if file.name in chosen}
    reader = Reader(path, metadata=found.metadata, files=files, sources=chosen, num_threads=num_threads)
    try:
        with dcp_errors(world, what=f"loading {found.manifest.id}"):
            dcp_load(
                tensors,
                storage_reader=reader,
                planner=StrictLoadPlanner(may_be_left=lambda key: key in held or key.startswith(RNG_PREFIX)),
                process_group=world.save_group,
                no_dist=world.save_group is None,
            )
    except CheckpointError as error:
        raise _with_hint(error, _GARBAGE) from error
    return reader


def _loaded_parts(tensors: Mapping[str, torch.Tensor], manifest: Manifest, *, reader: Reader, num_threads: int) -> dict[str, list[Any]]:
    """Local. [offsets, sizes, digest] of this rank's box of each tensor; empty boxes and whole tensors that are right are left out."""
    digests = {tensor.key: tensor.digest for tensor in manifest.tensors}
    parts: dict[str, list[Any]] = {}

    def look(key: str) -> None:
        tensor = tensors[key]
        sizes, offsets = local_box(tensor)
        digest = _seen_digest(key, sizes, offsets, reader) or as_hex(tensor_digest(tensor))
        is_right = sizes == tuple(tensor.shape) and digest == digests[key]
        if math.prod(sizes) and not is_right:
            parts[key] = [offsets, sizes, digest]

    in_threads(look, sorted(tensors, key=lambda key: -tensors[key].numel()), num_threads=num_threads)
    return parts


def _seen_digest(key: str, sizes: Sequence[int], offsets: tuple[int, ...], reader: Reader) -> str | None:
    """Local. What the reader saw on the way, when the box is exactly one stored part."""
    digest = reader.digests.get((key, offsets))
    entry = tensor_metadata(reader.read_metadata(), key)
    is_part = digest is not None and part_at(entry, MetadataIndex(key, offsets)).sizes == torch.Size(sizes)
    return digest if is_part else None


def _compare_digests(parts_of_ranks: Sequence[Mapping[str, Any]], *, path: Path, found: _Found) -> None:
    """Add up one copy of every box, the same on every rank, and compare; copies of a box must agree with each other."""
    digests = {tensor.key: tensor.digest for tensor in found.manifest.tensors}
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], set[str]]] = {}
    for parts in parts_of_ranks:
        for key, (offsets, sizes, digest) in parts.items():
            boxes.setdefault(key, {}).setdefault((tuple(offsets), tuple(sizes)), set()).add(digest)
    problems = []
    for key, copies in sorted(boxes.items()):
        total = as_hex(combine(int(digest, 16) for box in copies.values() for digest in box))
        if total != digests[key] or any(len(box) > 1 for box in copies.values()):
            files = ",".join(sorted(stored_in(found.metadata, key)))
            problems.append(Problem(kind="wrong-digest", file=files, tensor=key, detail=f"loaded {total}, in the run {digests[key]}"))
    try:
        raise_first(problems, where=path)
    except CheckpointError as error:
        raise _with_hint(error, _GARBAGE) from None


def _merged(sources_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    names: dict[str, set[str]] = {}
    for sources in sources_of_ranks:
        for file, name in sources.items():
            names.setdefault(file, set()).add(name)
    return {file: ",".join(sorted(names[file])) for file in sorted(names)}


def _restore_streams(own_rng: Mapping[str, torch.Tensor], world: World) -> None:
    for stored in own_rng.values():
        restore_rng(stored, device=world.device)


def _notes(num_streams: int, world: World) -> tuple[str, ...]:
    if num_streams == world.size:
        return ()
    if num_streams < world.size:
        what = f"ranks {num_streams} to {world.size - 1} had no stored random state and keep their keyed one"
    else:
        what = f"the random states of ranks {world.size} to {num_streams - 1} are not used"
    return (f"saved by {num_streams} ranks, loaded by {world.size}: {what}",)


def _with_hint(error: CheckpointError, hint: str) -> CheckpointError:
    return type(error)(error.what, where=error.where, hint=hint, **error.values)


def _agreed(world: World, local: Callable[[], T], *, hint: str) -> T:
    """Collective over the save group. Run a local part; every rank raises the error of the lowest rank that failed."""
    result: T | None = None
    error: SurefootError | None = None
    try:
        result = local()
    except CheckpointError as found:
        error = _with_hint(found, hint)
    except Exception as found:  # the boundary to the other ranks: they wait for an outcome, whatever it is
        error = CheckpointError(f"{type(found).__name__}: {found}", hint=hint)
        error.__cause__ = found
    if (agreed := agree_ok(world, error)) is not None:
        raise agreed
    return cast(T, result)
