"""Start from somebody else's DCP checkpoint: its weights and moments into our live tensors, by plain rules of naming.

    model.<fqn>, or the bare <fqn> as torchtitan stores it         -> model.<fqn>
    optim.state.<fqn>.<slot>, optimizer.state.<fqn>.<slot>          -> optim.<fqn>.<slot>
    both under one leading name, such as app.model.<fqn>            -> the same
    segments that DDP, FSDP and torch.compile put into names        -> left out

Everything that the model and its optimizer need must be found, and every tensor of the checkpoint must have a place: what has none is an
error that names it. Hyperparameters, schedules and positions in the data are no tensors of ours: they come from the config of the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.audit import audit, read_foreign_metadata
from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.foreign import look_at_folder
from surefoot.checkpoint.manifest import RNG_PREFIX
from surefoot.checkpoint.metadata import chunk_index
from surefoot.checkpoint.parts import PartReader
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.reader import Reader, listed
from surefoot.checkpoint.sources import FolderSource
from surefoot.checkpoint.state import LiveState, compare_inventory, dtype_name
from surefoot.checkpoint.verify import raise_first
from surefoot.core.errors import CheckpointError, ConfigError, Incompatible
from surefoot.core.records import ManifestTensor
from surefoot.tensors.digest import box_digest, combine, tensor_digest
from surefoot.tensors.world import World, broadcast_json, lead

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_STATE = re.compile(r"(?:(?P<outer>[A-Za-z_]\w*)\.)??(?P<kind>model|optim|optimizer)\.(?P<rest>.+)")
_LEFT = re.compile(
    r"(?:.*\.)?(?:param_groups|lr_schedulers?|scheduler|dataloader|data_loader|train_state|rng|rng_state|extra_state)(?:\.|/|$).*"
)
_STEP_KEYS = ("train_state.step", "train_state.global_step", "step", "global_step")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought. `step` is the number of updates that the optimizer counted, None when it counts none.

    `left_out` are the keys that no tensor of ours takes, known by their names; `tied` are weights that are stored a second time under
    another name, with the same bits. `notes` say what could not be checked.
    """

    step: int | None
    num_tensors: int
    left_out: tuple[str, ...]
    tied: Mapping[str, str]
    notes: tuple[str, ...]


def import_dcp(path: Path, *, state: LiveState, world: World) -> Imported:
    """Collective over the save group. Load the stock DCP folder `path` into the live tensors of `state`, collected with `for_load`.

    The folder is audited first. Raises ConfigError for what is no stock DCP folder with moments, CheckpointError that names what is
    damaged, missing, of another shape or dtype, or without a place;
    the live state is garbage after an error that comes later than the audit. Nothing in the folder is executed.
    """
    notes = broadcast_json(world, lead(world, lambda: _audited(path), unexpected=CheckpointError))
    metadata = read_foreign_metadata(path)
    stored = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    places = our_names(stored, wanted=state.tensors)
    left_out = sorted(key for key in metadata.state_dict_metadata if key not in stored or _is_left(key))
    theirs = {ours: key for key, ours in places.items()}
    second = sorted(ours for ours in theirs.keys() - state.tensors.keys() if ours.startswith("model."))
    _check(state, {ours: stored[key] for ours, key in theirs.items() if ours not in second}, where=str(path))
    targets = {theirs[ours]: tensor for ours, tensor in state.tensors.items()}
    with dcp_errors(world, what=f"importing {path}"):
        dcp_load(
            targets,
            storage_reader=Reader(path, metadata=metadata),
            planner=StrictLoadPlanner(may_be_left=lambda key: key not in targets),
            process_group=world.save_group,
            no_dist=world.save_group is None,
        )
    tied = {theirs[ours]: _twin(ours, path, metadata, key=theirs[ours], state=state) for ours in second}
    state.put_back_scalars()
    return Imported(step=_counted(state), num_tensors=len(targets), left_out=tuple(left_out), tied=tied, notes=tuple(notes))


def our_names(keys: Iterable[str], *, wanted: Iterable[str]) -> dict[str, str]:
    """Their key -> ours, for each tensor that is a weight or a moment. Raises Incompatible naming those that no rule places.

    A leading `model` may be the container of the weights or the first segment of their names: whichever gives more of the keys that are
    `wanted`.
    """
    kept = [key for key in keys if not _is_left(key)]
    ways = [_without_module({key: _place(key, in_container=way) for key in kept}) for way in (True, False)]
    named = max(ways, key=lambda way: len(set(wanted) & set(way.values())))
    models = {ours.removeprefix("model.") for ours in named.values() if ours.startswith("model.")}
    lost = sorted(
        key for key, ours in named.items() if ours.startswith("optim.") and ours.removeprefix("optim.").rpartition(".")[0] not in models
    )
    if lost:
        by_number = all(named[key].split(".")[1].isdigit() for key in lost)
        why = "moments numbered by position do not say whose they are" if by_number else "they belong to no weight that is stored"
        raise Incompatible(f"{len(lost)} tensors have no place: {why}", where=lost[0], hint="save with get_state_dict", keys=lost)
    seen: dict[str, str] = {}
    for key, ours in named.items():
        if (other := seen.setdefault(ours, key)) != key:
            raise Incompatible(f"{other} and {key} would both become {ours}", where=key)
    return named


def _audited(path: Path) -> list[str]:
    """On rank 0. What the audit could not check, after it found nothing wrong."""
    if (kind := look_at_folder(path)) != "dcp":
        what = "a surefoot checkpoint: branch from it instead" if kind == "surefoot" else "a safetensors folder, which has no moments"
        raise ConfigError(f"this is {what}", where=str(path), hint="only stock DCP folders are imported")
    found = audit(path)
    raise_first([problem for problem in found.problems if problem.kind != "extra-file"], where=path)
    return [*found.notes, *(f"{problem.file}: {problem.detail}" for problem in found.problems)]


def _is_left(key: str) -> bool:
    return key in _STEP_KEYS or key.startswith(RNG_PREFIX) or _LEFT.fullmatch(key) is not None


def _place(key: str, *, in_container: bool) -> str:
    match = _STATE.fullmatch(key)
    if match is None or (match["kind"] == "model" and not in_container):
        return f"model.{_clean(key)}"
    if match["kind"] == "model":
        return f"model.{_clean(match['rest'])}"
    return f"optim.{_clean(match['rest'].removeprefix('state.'))}"


def _clean(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def _without_module(named: Mapping[str, str]) -> dict[str, str]:
    """DistributedDataParallel calls the model inside it `module`; where every weight is in there, the name says nothing."""
    if not all(ours.startswith("model.module.") for ours in named.values() if ours.startswith("model.")):
        return dict(named)
    return {key: re.sub(r"^(model|optim)\.module\.", r"\1.", ours) for key, ours in named.items()}


def _check(state: LiveState, found: Mapping[str, TensorStorageMetadata], *, where: str) -> None:
    """Two-way: keys, dtypes and shapes."""
    tensors = [ManifestTensor(key, dtype_name(entry.properties.dtype), tuple(entry.size), digest="") for key, entry in found.items()]
    problems = compare_inventory(state, tensors)
    if any(key.startswith("optim.") for key in state.tensors) and not any(key.startswith("optim.") for key in found):
        raise ConfigError("weights only, no moments of the optimizer", where=where, hint="import a checkpoint that was saved with them")
    raise_first(problems, where=Path("import"))


def _twin(ours: str, path: Path, metadata: Metadata, *, key: str, state: LiveState) -> str:
    """Collective where the state is sharded. The weight of ours that has the bits of the stored tensor `key`: tied weights are ours once.

    Raises Incompatible when there is none.
    """
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    files = listed(path, metadata)
    with FolderSource(path) as folder:
        parts = PartReader(files, dict.fromkeys(files, folder))
        digest = combine(
            box_digest(
                parts.read_whole(parts.part(metadata.storage_data[chunk_index(key, chunk)])),
                global_shape=entry.size,
                offsets=chunk.offsets,
            )
            for chunk in entry.chunks
        )
    for other, tensor in state.tensors.items():
        alike = other.startswith("model.") and tensor.shape == entry.size and tensor.dtype == entry.properties.dtype
        if alike and not hasattr(tensor, "placements") and tensor_digest(tensor) == digest:
            return other
    raise Incompatible(f"{key} has no place: the model has no {ours}, nor a weight with its bits", where=key, keys=[key])


def _counted(state: LiveState) -> int | None:
    """The number of updates, from the counters of the optimizer."""
    counters = [tensor for key, tensor in state.tensors.items() if key.startswith("optim.") and key.endswith(".step")]
    return int(max(float(counter.item()) for counter in counters)) if counters else None
