"""A save: everything into a hidden folder, the manifest last, one rename as the commit point.

checkpoints/.<id>.g<generation>.writing/   being written; never read, swept by a later generation
checkpoints/<id>/                          published: whole, durable, never written to again
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import (
    DIGESTED_PREFIXES,
    EXTRAS_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    checksum_bytes,
    manifest_bytes,
    manifest_from_json,
    parse_id,
    rng_key,
    sealed,
)
from surefoot.checkpoint.planner import DigestingSavePlanner
from surefoot.checkpoint.rng import capture_rng
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.writer import Writer, free_bytes, storage_error
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import CheckpointError
from surefoot.core.records import Manifest, ManifestFile
from surefoot.core.strict_json import canonical
from surefoot.core.units import show_bytes
from surefoot.tensors.digest import state_digest
from surefoot.tensors.world import World, broadcast_json, lead

_OVERHEAD_PER_PART_BYTES = 2048  # zip headers and metadata: 1.7 KiB measured per stored part
_OVERHEAD_PER_RANK_BYTES = 64 * 1024  # random state, file ends, manifest: generously


def save(root: Path, draft: Manifest, *, state: LiveState, extras: Mapping[str, Any], world: World) -> Manifest:
    """Collective over the save group. Write, make durable and publish the checkpoint `draft.id` under `root`; the sealed manifest.

    `draft` brings everything that only the caller knows; files, tensors, digests, hash, `topology["world_size"]` and the cursor (from
    `extras`) are filled in here. All ranks raise the same error: a CheckpointError after which nothing of this save is left (try again
    with the next `-r<retry>`), or PeerLost. Every wait is bounded by the timeout of the group.
    """
    scratch = scratch_folder(root, draft)
    needed = state.num_bytes() + _OVERHEAD_PER_PART_BYTES * state.max_parts(world.size) + _OVERHEAD_PER_RANK_BYTES * world.size
    try:
        lead(world, lambda: _begin(root, draft, scratch=scratch, needed_bytes=needed), unexpected=CheckpointError)
        writer = Writer(scratch, needed_bytes=needed)
        tensors: dict[str, torch.Tensor] = {
            key: tensor for key, tensor in state.tensors.items() if world.leads or key not in state.rank_0_only
        }
        tensors[rng_key(world.rank)] = capture_rng(world.device)
        with dcp_errors(world, what=f"saving {draft.id}"):
            dcp_save(
                tensors,
                storage_writer=writer,
                planner=DigestingSavePlanner(),
                process_group=world.save_group,
                no_dist=world.save_group is None,
            )
        published = lead(
            world,
            lambda: _publish(root, draft, scratch=scratch, writer=writer, extras=extras, world=world),
            unexpected=CheckpointError,
        )
    except BaseException:
        if world.leads:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest_from_json(broadcast_json(world, asdict(published) if published else None))


def scratch_folder(root: Path, draft: Manifest) -> Path:
    return root / f".{draft.id}.g{draft.generation}.writing"


def _begin(root: Path, draft: Manifest, *, scratch: Path, needed_bytes: int) -> None:
    """Refuse before a byte is written: a malformed or existing id, too little room."""
    if parse_id(draft.id) is None:
        raise CheckpointError("a checkpoint id is s<step>-a<attempt>[-r<retry>]", where=draft.id)
    if (root / draft.id).exists():
        raise CheckpointError(
            "this checkpoint exists already", where=str(root / draft.id), hint="published checkpoints are never rewritten"
        )
    try:
        free = free_bytes(root)
        if free < needed_bytes:
            raise CheckpointError(
                f"too little room for a checkpoint: it needs {show_bytes(needed_bytes)}, {show_bytes(free)} are free",
                where=str(root),
                hint="free disk space or lower checkpoint.keep_last; older checkpoints are untouched",
                needed_bytes=needed_bytes,
                free_bytes=free,
            )
        root.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
    except OSError as error:
        raise storage_error(error, folder=root, needed_bytes=needed_bytes) from error


def _publish(root: Path, draft: Manifest, *, scratch: Path, writer: Writer, extras: Mapping[str, Any], world: World) -> Manifest:
    extras_bytes = canonical(extras)
    extras_file = ManifestFile(name=EXTRAS_NAME, num_bytes=len(extras_bytes), xxh3_128=checksum_bytes(extras_bytes))
    manifest = sealed(
        replace(
            draft,
            format_version=FORMAT_VERSION,
            cursor=extras.get("cursor", draft.cursor),
            topology={**draft.topology, "world_size": world.size},
            files=tuple(sorted((*writer.files, extras_file), key=lambda file: file.name)),
            tensors=writer.tensors,
            state_digest=state_digest(tensor for tensor in writer.tensors if tensor.key.startswith(DIGESTED_PREFIXES)),
        )
    )
    payload = manifest_bytes(manifest)
    try:
        write_atomic(scratch / EXTRAS_NAME, extras_bytes)
        write_atomic(scratch / MANIFEST_NAME, payload)  # last, and it syncs the folder: what it names is durable before the rename
        os.rename(scratch, root / draft.id)
        fsync_dir(root)
    except OSError as error:
        raise storage_error(error, folder=root, needed_bytes=len(payload)) from error
    return manifest
