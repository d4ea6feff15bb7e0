"""The ranks as a grid: axes from outermost to innermost, neighbours in the innermost one on the fastest links.

Ranks that differ only in `cp` or `tp` or `pp` are one data rank: they get the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection

logger = logging.getLogger(__name__)

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SHARD_AXIS = "dp_shard_cp"
"""Ranks that share one copy of the parameters: those of `dp_shard` and `cp` together, for both hold other tokens of one gradient."""


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's coordinate on each of `AXES`."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]

    @property
    def data_rank(self) -> int:
        return self.coordinates["dp_replicate"] * self.sizes["dp_shard"] + self.coordinates["dp_shard"]

    @property
    def num_data_ranks(self) -> int:
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts: over all ranks, each token once. Context ranks have the loss of their own positions each."""
        return self.coordinates["tp"] == 0 and self.coordinates["pp"] == self.sizes["pp"] - 1

    @property
    def counts_tokens(self) -> bool:
        """Whether the live tokens of this rank's samples count: over all ranks, each sample once."""
        return self.counts_loss and self.coordinates["cp"] == 0


def place_of(parallel: ParallelSection, *, rank: int, world_size: int) -> Place:
    """Local. Raises ConfigError when the axes do not multiply to the number of ranks."""
    if parallel.num_ranks != world_size:
        raise ConfigError(
            f"[parallel] multiplies to {parallel.num_ranks} ranks, but {world_size} were started",
            where="[parallel]",
            hint="make the product of its axes equal to the number of ranks",
            got=world_size,
            wanted=parallel.num_ranks,
        )
    sizes = {axis: int(getattr(parallel, axis)) for axis in AXES}
    coordinates, rest = {}, rank
    for axis in reversed(AXES):
        rest, coordinates[axis] = divmod(rest, sizes[axis])
    return Place(sizes, coordinates)


def build_mesh(place: Place, *, device_type: str, collective_limit_s: float) -> DeviceMesh:
    """Collective over the world. All `AXES`, also those of size 1, and `SHARD_AXIS`.

    Every axis has a group of its own, also where it spans the world, so that its name (surefoot:<axis>) says what a collective is for.
    Each gets `collective_limit_s` as timeout; torch would give them 1800 s.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    sizes = tuple(place.sizes[axis] for axis in AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=dict.fromkeys(AXES, backend))
    shared = mesh["dp_shard", "cp"]._flatten(SHARD_AXIS, backend_override=backend)
    for name, group in zip((*AXES, SHARD_AXIS), (*mesh.get_all_groups(), shared.get_group()), strict=True):
        # torch names a mesh's groups mesh_<axis> and has no public way to say otherwise, nor to say their timeout.
        group._set_group_desc(f"surefoot:{name}")
        _set_pg_timeout(timedelta(seconds=collective_limit_s), group)
    return mesh


def across_hosts(place: Place, *, ranks_per_host: int) -> tuple[str, ...]:
    """Local, pure. The axes that talk inside every layer, of which a group spans hosts: "tp", then "cp" around it.

    Ranks of one host are neighbours in rank order, as launchers place them.
    """
    spanning = []
    inner = 1
    for axis in ("tp", "cp"):
        inner *= place.sizes[axis]
        if place.sizes[axis] > 1 and ranks_per_host % inner:
            spanning.append(axis)
    return tuple(spanning)


def warn_of_placement(place: Place, *, ranks_per_host: int) -> None:
    """Local. A layout that is legal may still be slow: inside a layer every product waits for the links between hosts."""
    for axis in across_hosts(place, ranks_per_host=ranks_per_host):
        logger.warning(
            "parallel.%s = %d spans hosts, which have %d ranks each: every layer waits for the links between them; "
            "make tp * cp a divisor of the ranks of a host",
            axis,
            place.sizes[axis],
            ranks_per_host,
        )


def shard_mesh(mesh: DeviceMesh, place: Place) -> DeviceMesh:
    """For `fully_shard`: one axis, or two when there are whole copies of the model."""
    if place.sizes["dp_replicate"] == 1:
        return _shard_axis(mesh)
    return DeviceMesh._concatenate([mesh["dp_replicate"], _shard_axis(mesh)])


def _shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """One mesh and one group, however often it is asked for. Private names: torch warns of a flattened axis that is taken by its name."""
    return mesh["dp_shard", "cp"]._flatten(SHARD_AXIS)
