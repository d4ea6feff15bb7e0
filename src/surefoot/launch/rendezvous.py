"""Where the ranks of one generation meet: a port that nobody used before, and torchrun's environment contract with our additions.

Stock torchrun keeps one store and one port over all restarts, and stale keys broke 9 of 14 restarts on gloo. Here each generation has a
fresh listening socket that the agent binds (so no other process can take the port in between) and hands to rank 0 as a descriptor, for
`TCPStore(master_listen_fd=...)`. Ranks that connect before rank 0 is up wait in its backlog.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.launch.logs import rank_paths
from surefoot.launch.wire import RankSpec

LOCALHOST = "127.0.0.1"
LISTEN_FD = "SUREFOOT_LISTEN_FD"
BEATS_FD = "SUREFOOT_BEATS_FD"
LIFE_FD = "SUREFOOT_LIFE_FD"
PARALLEL = "SUREFOOT_PARALLEL"
"""The layout of this generation as JSON, where the number of nodes gives it another one than the config."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One generation of one job as this machine has it: `num_local_ranks` of `world_size`, from `first_rank` on. `env` is for all."""

    job: str
    run_dir: Path
    generation: int
    num_restarts: int
    world_size: int
    port: int
    first_rank: int = 0
    num_local_ranks: int = 0
    master_addr: str = LOCALHOST
    node_rank: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def open_listener(*, num_ranks: int, address: str = LOCALHOST) -> socket.socket:
    """A bound, listening socket on a port that the kernel chose. The caller closes its copy once the ranks are forked."""
    return socket.create_server((address, 0), backlog=max(128, 2 * num_ranks))


def rank_specs(meeting: Meeting) -> tuple[RankSpec, ...]:
    """What each rank is forked with. The descriptors sent along are [beats, end of the life pipe], and the listening socket after them
    where rank 0 is."""
    return tuple(_rank_spec(meeting, local_rank) for local_rank in range(meeting.num_local_ranks))


def _rank_spec(meeting: Meeting, local_rank: int) -> RankSpec:
    rank = meeting.first_rank + local_rank
    env = {
        **meeting.env,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(meeting.world_size),
        "LOCAL_WORLD_SIZE": str(meeting.num_local_ranks),
        "GROUP_RANK": str(meeting.node_rank),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": meeting.job,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.num_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "SUREFOOT_RUN_DIR": str(meeting.run_dir),
        "SUREFOOT_GENERATION": str(meeting.generation),
        "SUREFOOT_JOB": meeting.job,
    }
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(os.environ):
        env["TORCH_FR_BUFFER_SIZE"] = "2000"  # at 0 torch records no collectives, and nobody could say which one a rank is behind in
    if "GLOO_SOCKET_IFNAME" not in os.environ and meeting.num_local_ranks == meeting.world_size:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which many containers cannot
    out_path, err_path, _ = rank_paths(meeting.run_dir, meeting.generation, rank)
    fds = {BEATS_FD: 0, LIFE_FD: 1, **({LISTEN_FD: 2} if rank == 0 else {})}
    return RankSpec(rank=rank, env=env, out_path=str(out_path), err_path=str(err_path), fds=fds)
