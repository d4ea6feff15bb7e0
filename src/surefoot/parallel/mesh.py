"""The device mesh from the config, outermost axis first. An axis of size 1 is left out, so a plain run has no mesh at all."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection


def build_mesh(parallel: ParallelSection, *, world_size: int, device_type: str) -> DeviceMesh | None:
    """Collective over the world. The mesh over (dp_replicate, dp_shard), or None when nothing is sharded."""
    if parallel.num_ranks != world_size:
        raise ConfigError(
            f"[parallel] multiplies to {parallel.num_ranks} ranks, but {world_size} were started",
            where="[parallel]",
            hint="make dp_replicate x dp_shard equal to the number of ranks",
            got=world_size,
            wanted=parallel.num_ranks,
        )
    if parallel.dp_shard == 1:
        return None
    if parallel.dp_replicate == 1:
        return init_device_mesh(device_type, (parallel.dp_shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (parallel.dp_replicate, parallel.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))
