"""One process of a proof: `python -m surefoot.checkpoint.prove_rank JOB`. It knows a folder and its manifest, and nothing of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_dtensor

from surefoot.checkpoint.clean import begin_clean, end_clean, leave_result
from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import MANIFEST_NAME, parse_id, read_manifest
from surefoot.checkpoint.metadata import stored_in
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.readback import check_file, check_listing
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.verify import check_contents, check_tensors, extras_of, verified_metadata
from surefoot.core.errors import CheckpointError, Incomplete
from surefoot.core.records import Manifest, ManifestTensor, Problem
from surefoot.tensors.digest import as_hex, combine, local_box, tensor_digest
from surefoot.tensors.world import World, gather_json, join_world, single_world


def main() -> None:
    """Collective over the ranks of the proof."""
    job = begin_clean()
    torch.set_num_threads(1)
    world = _join(job)
    problems = load_and_compare(
        Path(job["path"]), world=world, dim=job["dim"], budget_bytes=job["budget_bytes"], expected_state_digest=job["expected"]
    )
    if world.leads:
        leave_result(job, problems)
    gather_json(world, "done")  # nobody ends while a peer still talks to it
    end_clean()


def load_and_compare(path: Path, *, world: World, dim: int, budget_bytes: int, expected_state_digest: str | None = None) -> list[Problem]:
    """Collective over the save group. What is wrong with the checkpoint, the same on every rank; every tensor of it is loaded."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        kind = "missing-file" if isinstance(error, Incomplete) else "bad-manifest"
        return [Problem(kind=kind, file=MANIFEST_NAME, detail=error.what)]
    problems = _gathered(world, _look(path, manifest, world=world, expected_state_digest=expected_state_digest))
    if problems:
        return problems
    metadata = verified_metadata(path, manifest)
    mesh = init_device_mesh("cpu", (world.size,)) if world.size > 1 else None
    try:
        for batch in batches(manifest.tensors, budget_bytes=budget_bytes):
            if _num_bytes(batch[0]) > budget_bytes:
                problems += check_tensors(path, metadata, batch)  # part by part: no such tensor fits whole
            else:
                problems += _load_batch(path, batch, metadata=metadata, world=world, mesh=mesh, dim=dim)
    except CheckpointError as error:
        file, tensor = str(error.values.get("file", "")), str(error.values.get("tensor", ""))
        problems.append(Problem(kind="unreadable", file=file, tensor=tensor, detail=str(error)))
    return problems


def batches(tensors: Sequence[ManifestTensor], *, budget_bytes: int) -> Iterator[list[ManifestTensor]]:
    """`tensors` in portions of at most `budget_bytes`; one that is larger is a portion of its own."""
    batch: list[ManifestTensor] = []
    for tensor in tensors:
        if batch and sum(_num_bytes(other) for other in batch) + _num_bytes(tensor) > budget_bytes:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


def _look(path: Path, manifest: Manifest, *, world: World, expected_state_digest: str | None) -> list[Problem]:
    """Local, files shared out among ranks. What a restore checks before it touches a tensor."""
    problems: list[Problem] = []
    if world.leads:
        problems += check_contents(manifest) + check_listing(path, manifest)
        if expected_state_digest not in (None, manifest.state_digest):
            detail = f"state_digest {manifest.state_digest}, the ledger says {expected_state_digest}"
            problems.append(Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=detail))
        if parse_id(path.name) and path.name != manifest.id:
            problems.append(Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=f"it is that of {manifest.id}"))
    missing = {problem.file for problem in problems}
    for file in manifest.files[world.rank :: world.size]:
        if file.name not in missing and (problem := check_file(path, file)):
            problems.append(problem)
    if not problems:
        try:
            verified_metadata(path, manifest)
            extras_of(path, manifest)
        except (CheckpointError, OSError) as error:
            problems.append(Problem(kind="unreadable", detail=str(error)))
    return problems


def _load_batch(
    path: Path, batch: Sequence[ManifestTensor], *, metadata: Metadata, world: World, mesh: DeviceMesh | None, dim: int
) -> list[Problem]:
    """Collective over the save group. DCP's own load of these tensors, cut over the ranks, and their digests."""
    tensors = {tensor.key: _empty(tensor, mesh=mesh, dim=dim) for tensor in batch}
    with dcp_errors(world, what="the load"):
        dcp_load(
            tensors,
            storage_reader=Reader(path, metadata=metadata),
            planner=StrictLoadPlanner(may_be_left=lambda key: key not in tensors),
            process_group=world.save_group,
            no_dist=world.save_group is None,
        )
    parts = {key: [*local_box(tensor), as_hex(tensor_digest(tensor))] for key, tensor in tensors.items()}
    return _compare(gather_json(world, parts), batch, metadata=metadata)


def _empty(tensor: ManifestTensor, *, mesh: DeviceMesh | None, dim: int) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if mesh is None or not tensor.shape:
        return torch.empty(tensor.shape, dtype=dtype)
    return empty_dtensor(*tensor.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(dim % len(tensor.shape))])


def _compare(parts_of_ranks: Sequence[Mapping[str, Any]], batch: Sequence[ManifestTensor], *, metadata: Metadata) -> list[Problem]:
    """Add up one copy of every box of each tensor; copies of one box must agree."""
    problems = []
    for tensor in batch:
        boxes: dict[tuple[Any, Any], set[str]] = {}
        for parts in parts_of_ranks:
            sizes, offsets, digest = parts[tensor.key]
            if math.prod(sizes):
                boxes.setdefault((tuple(sizes), tuple(offsets)), set()).add(digest)
        found = as_hex(combine(int(digest, 16) for copies in boxes.values() for digest in copies))
        if found != tensor.digest or any(len(copies) > 1 for copies in boxes.values()):
            files = ",".join(sorted(stored_in(metadata, tensor.key)))
            detail = f"loaded {found}, in the run {tensor.digest}"
            problems.append(Problem(kind="wrong-digest", file=files, tensor=tensor.key, detail=detail))
    return problems


def _gathered(world: World, problems: Sequence[Problem]) -> list[Problem]:
    return [Problem(**problem) for rank in gather_json(world, [asdict(problem) for problem in problems]) for problem in rank]


def _num_bytes(tensor: ManifestTensor) -> int:
    return math.prod(tensor.shape) * torch.empty((), dtype=getattr(torch, tensor.dtype)).element_size()


def _join(job: Mapping[str, Any]) -> World:
    if job["world_size"] == 1:
        return single_world()
    store = dist.FileStore(str(Path(job["folder"]) / "store"), job["world_size"])  # type: ignore[attr-defined]  # torch re-exports its C part
    limit = timedelta(seconds=job["limit_s"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["world_size"], timeout=limit)
    return join_world(device=torch.device("cpu"), collective_limit_s=job["limit_s"])


if __name__ == "__main__":
    main()
