"""The weights of a checkpoint for others: read verified, written as safetensors or a stock DCP folder, read back by their own tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.metadata import stored_in
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.prove_rank import batches
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.state import dtype_name
from surefoot.checkpoint.verify import raise_first, verified_metadata
from surefoot.core.durable import fsync_dir, fsync_file, write_atomic
from surefoot.core.errors import ConfigError, Incomplete
from surefoot.core.records import ManifestTensor, Problem
from surefoot.core.strict_json import dumps
from surefoot.tensors.digest import as_hex, tensor_digest
from surefoot.tensors.world import single_world

MODEL_PREFIX = "model."
SHARD_BYTES = 4 << 30
"""Of a safetensors file: so much is in memory at a time. Hugging Face cuts at 5 GB."""
_INDEX_NAME = "model.safetensors.index.json"


def weights_of(path: Path) -> list[ManifestTensor]:
    """The model's tensors in the checkpoint folder `path`, without the optimizer's. Raises CheckpointError."""
    found = [tensor for tensor in read_manifest(path).tensors if tensor.key.startswith(MODEL_PREFIX)]
    if not found:
        raise Incomplete("it holds no weights of a model", where=str(path))
    return found


def read_weights(path: Path, *, budget_bytes: int = SHARD_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Local. The model's tensors by their name in the model, in portions, with the bits that they had in the run. Raises Corrupt."""
    manifest = read_manifest(path)
    metadata = verified_metadata(path, manifest)
    for batch in batches(weights_of(path), budget_bytes=budget_bytes):
        tensors = {tensor.key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in batch}
        planner = StrictLoadPlanner(may_be_left=lambda key, wanted=frozenset(tensors): key not in wanted)  # type: ignore[misc]
        with dcp_errors(single_world(), what=f"reading the weights of {manifest.id}"):
            dcp_load(tensors, storage_reader=Reader(path, metadata=metadata), planner=planner, no_dist=True)
        problems = [
            Problem(kind="wrong-digest", file=",".join(sorted(stored_in(metadata, tensor.key))), tensor=tensor.key, detail="loaded another")
            for tensor in batch
            if as_hex(tensor_digest(tensors[tensor.key])) != tensor.digest
        ]
        raise_first(problems, where=path)
        yield {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in tensors.items()}


def write_dcp(path: Path, out: Path) -> None:
    """Local. A stock DCP folder with the weights alone, all in memory at once."""
    weights = {name: tensor for portion in read_weights(path) for name, tensor in portion.items()}
    with dcp_errors(single_world(), what="writing the export"):
        dcp_save(weights, checkpoint_id=out, no_dist=True)


def write_safetensors(path: Path, out: Path, *, rename: Callable[[str], str] = lambda name: name) -> None:
    """Local. `model.safetensors`, or several with an index where they are large, as Hugging Face has them."""
    save_file = _safetensors().save_file
    num_shards = sum(1 for _ in batches(weights_of(path), budget_bytes=SHARD_BYTES))
    places: dict[str, str] = {}
    total = 0
    for number, portion in enumerate(read_weights(path), start=1):
        name = "model.safetensors" if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        tensors = {rename(key): tensor.contiguous() for key, tensor in portion.items()}
        (out / name).touch()
        mode = (out / name).stat().st_mode & 0o777
        save_file(tensors, out / name, metadata={"format": "pt"})
        (out / name).chmod(mode)  # the library leaves 0600, whatever the umask says
        fsync_file(out / name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, name)
    if num_shards > 1:
        write_atomic(out / _INDEX_NAME, dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
    fsync_dir(out)


def check_dcp(out: Path, wanted: Sequence[ManifestTensor]) -> list[Problem]:
    """Local. Read the folder back as anybody would, by stock DCP, and compare with what was in the run."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(out)
    stored = reader.read_metadata().state_dict_metadata
    expected = {tensor.key.removeprefix(MODEL_PREFIX): tensor for tensor in wanted}
    problems = _compare_keys(stored.keys(), expected)
    tensors = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for name, tensor in expected.items() if name in stored}
    with dcp_errors(single_world(), what="reading the export back"):
        dcp_load(tensors, storage_reader=reader, no_dist=True)
    return problems + _compare_bits(tensors.items(), expected)


def check_safetensors(out: Path, wanted: Sequence[ManifestTensor], *, rename: Callable[[str], str] = lambda name: name) -> list[Problem]:
    """Local. Read the files back by the safetensors library, tensor by tensor, and compare with what was in the run."""
    from safetensors import safe_open

    expected = {rename(tensor.key.removeprefix(MODEL_PREFIX)): tensor for tensor in wanted}
    problems: list[Problem] = []
    seen: set[str] = set()
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            seen |= names
            found = ((name, opened.get_tensor(name)) for name in sorted(names & expected.keys()))
            problems += _compare_bits(found, expected)
    return _compare_keys(seen, expected) + problems


def _compare_keys(found: Any, expected: Mapping[str, ManifestTensor]) -> list[Problem]:
    missing = [Problem(kind="missing-tensor", tensor=name) for name in sorted(expected.keys() - set(found))]
    return missing + [Problem(kind="extra-tensor", tensor=name) for name in sorted(set(found) - expected.keys())]


def _compare_bits(found: Any, expected: Mapping[str, ManifestTensor]) -> list[Problem]:
    problems = []
    for name, tensor in found:
        wanted = expected[name]
        if dtype_name(tensor.dtype) != wanted.dtype or tuple(tensor.shape) != wanted.shape:
            detail = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}, in the run {wanted.dtype} {wanted.shape}"
            problems.append(Problem(kind="wrong-shape", tensor=name, detail=detail))
        elif as_hex(tensor_digest(tensor)) != wanted.digest:
            detail = f"digest {as_hex(tensor_digest(tensor))}, in the run {wanted.digest}"
            problems.append(Problem(kind="wrong-digest", tensor=name, detail=detail))
    return problems


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ConfigError(
            "safetensors is not installed", where="--format", hint="pip install 'surefoot[hf]', or take --format dcp"
        ) from None
    return safetensors.torch
