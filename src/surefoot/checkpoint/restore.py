"""A load: everything is verified before the first live tensor is touched, and the loaded bits once more afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import RNG_PREFIX, read_manifest, rng_key
from surefoot.checkpoint.metadata import stored_in
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.rng import restore_rng
from surefoot.checkpoint.state import LiveState, compare_inventory
from surefoot.checkpoint.verify import (
    check_contents,
    check_file,
    check_listing,
    check_tensors,
    extras_of,
    raise_first,
    verified_metadata,
)
from surefoot.core.errors import CheckpointError, Corrupt, SurefootError
from surefoot.core.records import Manifest, Problem
from surefoot.tensors.digest import as_hex, combine, local_box, tensor_digest
from surefoot.tensors.world import World, agree_ok, gather_json

T = TypeVar("T")

_UNTOUCHED = "the live state was not touched: fall back to another checkpoint"
_GARBAGE = "the live state is garbage now: load another checkpoint or leave"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought back. `notes` are sentences about what was not: a rank without a stored random stream keeps its keyed one."""

    manifest: Manifest
    extras: Mapping[str, Any]
    rng_restored: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    manifest: Manifest
    metadata: Metadata
    extras: Mapping[str, Any]


def load(path: Path, *, state: LiveState, world: World, expected_state_digest: str | None = None) -> Loaded:
    """Collective over the save group. Load the checkpoint folder `path` into the live tensors of `state`, collected with `for_load`.

    `expected_state_digest` is what the ledger says. All ranks raise the same kind: Corrupt, Incomplete or Incompatible, naming file and
    tensor. The hint says whether the live state is as before or garbage; garbage must be loaded over or left. Random streams come back on
    ranks that had one at the save; `Loaded.notes` tells of the others.
    """
    found = _agreed(world, lambda: _verify_before(path, state, world=world, expected_state_digest=expected_state_digest), hint=_UNTOUCHED)
    if len(set(gather_json(world, found.manifest.hash))) > 1:
        raise Corrupt("ranks read different manifests", where=str(path), hint=_UNTOUCHED)
    stored_rng = {tensor.key: tensor.shape for tensor in found.manifest.tensors if tensor.key.startswith(RNG_PREFIX)}
    own_rng = {key: torch.empty(stored_rng[key], dtype=torch.uint8) for key in [rng_key(world.rank)] if key in stored_rng}
    tensors = {**state.tensors, **own_rng}
    _read(path, tensors, found=found, world=world)
    parts = _agreed(world, lambda: _loaded_parts(tensors, found.manifest), hint=_GARBAGE)
    _compare_digests(gather_json(world, parts), path=path, found=found)
    state.put_back_scalars()
    _agreed(world, lambda: _restore_streams(own_rng, world), hint=_GARBAGE)
    return Loaded(found.manifest, found.extras, bool(own_rng), _notes(len(stored_rng), world))


def _verify_before(path: Path, state: LiveState, *, world: World, expected_state_digest: str | None) -> _Found:
    """Local, files shared out among ranks. Everything that can be known without touching a live tensor."""
    manifest = read_manifest(path)
    if expected_state_digest is not None and manifest.state_digest != expected_state_digest:
        raise Corrupt(f"state_digest {manifest.state_digest}, the ledger says {expected_state_digest}", where=str(path))
    stored = [tensor for tensor in manifest.tensors if not tensor.key.startswith(RNG_PREFIX)]
    raise_first([*check_contents(manifest), *(check_listing(path, manifest) if world.leads else ())], where=path)
    raise_first(compare_inventory(state, stored), where=path)
    metadata = verified_metadata(path, manifest)
    extras = extras_of(path, manifest)
    for file in manifest.files[world.rank :: world.size]:
        if problem := check_file(path, file):
            hit = [tensor for tensor in manifest.tensors if file.name in stored_in(metadata, tensor.key)]
            raise_first([problem, *check_tensors(path, metadata, hit)], where=path)
    return _Found(manifest, metadata, extras)


def _read(path: Path, tensors: dict[str, torch.Tensor], *, found: _Found, world: World) -> None:
    try:
        with dcp_errors(world, what=f"loading {found.manifest.id}"):
            dcp_load(
                tensors,
                storage_reader=Reader(path, metadata=found.metadata),
                planner=StrictLoadPlanner(may_be_left=lambda key: key.startswith(RNG_PREFIX)),
                process_group=world.save_group,
                no_dist=world.save_group is None,
            )
    except CheckpointError as error:
        raise _with_hint(error, _GARBAGE) from error


def _loaded_parts(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, list[Any]]:
    """Local. [offsets, sizes, digest] of this rank's box of each tensor; empty boxes and whole tensors that are right are left out."""
    digests = {tensor.key: tensor.digest for tensor in manifest.tensors}
    parts: dict[str, list[Any]] = {}
    for key, tensor in tensors.items():
        sizes, offsets = local_box(tensor)
        digest = as_hex(tensor_digest(tensor))
        is_right = sizes == tuple(tensor.shape) and digest == digests[key]
        if math.prod(sizes) and not is_right:
            parts[key] = [offsets, sizes, digest]
    return parts


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
