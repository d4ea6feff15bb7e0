"""Where the ranks of one generation meet: a port that nobody used before, and torchrun's environment contract with our additions.

Stock torchrun keeps one store and one port over all restarts, and stale keys broke 9 of 14 restarts on gloo. Here each generation has a
fresh listening socket that the agent binds (so no other process can take the port in between) and hands to rank 0 as a descriptor, for
`TCPStore(master_listen_fd=...)`. Ranks that connect before rank 0 is up wait in its backlog.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from surefoot.launch.logs import rank_paths
from surefoot.launch.wire import RankSpec

_LOCALHOST = "127.0.0.1"
LISTEN_FD = "SUREFOOT_LISTEN_FD"
BEATS_FD = "SUREFOOT_BEATS_FD"
LIFE_FD = "SUREFOOT_LIFE_FD"


@dataclass(frozen=True, slots=True)
class Meeting:
    """One generation of one job on this machine."""

    job: str
    run_dir: Path
    generation: int
    num_restarts: int
    num_ranks: int
    port: int


def open_listener(*, num_ranks: int) -> socket.socket:
    """A bound, listening socket on a port that the kernel chose. The caller closes its copy once the ranks are forked."""
    return socket.create_server((_LOCALHOST, 0), backlog=max(128, 2 * num_ranks))


def rank_specs(meeting: Meeting) -> tuple[RankSpec, ...]:
    """What each rank is forked with. The descriptors sent along are [listening socket, beats, end of the life pipe]."""
    return tuple(_rank_spec(meeting, rank) for rank in range(meeting.num_ranks))


def _rank_spec(meeting: Meeting, rank: int) -> RankSpec:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(meeting.num_ranks),
        "LOCAL_WORLD_SIZE": str(meeting.num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _LOCALHOST,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": meeting.job,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.num_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "SUREFOOT_RUN_DIR": str(meeting.run_dir),
        "SUREFOOT_GENERATION": str(meeting.generation),
        "SUREFOOT_JOB": meeting.job,
    }
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which many containers cannot
    out_path, err_path, _ = rank_paths(meeting.run_dir, meeting.generation, rank)
    fds = {BEATS_FD: 1, LIFE_FD: 2, **({LISTEN_FD: 0} if rank == 0 else {})}
    return RankSpec(rank=rank, env=env, out_path=str(out_path), err_path=str(err_path), fds=fds)
