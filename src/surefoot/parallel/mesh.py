"""The device mesh from the config, outermost axis first. An axis of size 1 is left out, so a plain run has no mesh at all."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ParallelSection


def build_mesh(parallel: ParallelSection, *, world_size: int, device_type: str, collective_limit_s: float) -> DeviceMesh | None:
    """Collective over the world. The mesh over (dp_replicate, dp_shard), or None when nothing is sharded.

    Every group of it gets `collective_limit_s` as timeout; torch would give them 1800 s.
    """
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
    axes = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    names = tuple(name for name, size in axes.items() if size > 1)
    mesh = init_device_mesh(device_type, tuple(axes[name] for name in names), mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=collective_limit_s), group)
    return mesh
