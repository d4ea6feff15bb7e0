"""The environment contract of a rank, and a port that is ours from the first moment."""

from __future__ import annotations

import socket
from pathlib import Path

from surefoot.launch.rendezvous import Meeting, open_listener, rank_specs


def test_a_rank_gets_torchruns_contract_and_ours() -> None:
    meeting = Meeting(job="j", run_dir=Path("/run"), generation=3, num_restarts=2, world_size=2, num_local_ranks=2, port=1234)
    first, second = rank_specs(meeting)
    assert first.env["RANK"] == first.env["LOCAL_RANK"] == "0"
    assert second.env["RANK"] == second.env["LOCAL_RANK"] == "1"
    for spec in (first, second):
        wanted = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234",
            "TORCHELASTIC_RUN_ID": "j",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "SUREFOOT_RUN_DIR": "/run",
            "SUREFOOT_GENERATION": "3",
            "SUREFOOT_JOB": "j",
        }
        assert wanted.items() <= spec.env.items()
    assert first.fds == {"SUREFOOT_BEATS_FD": 0, "SUREFOOT_LIFE_FD": 1, "SUREFOOT_LISTEN_FD": 2}
    assert second.fds == {"SUREFOOT_BEATS_FD": 0, "SUREFOOT_LIFE_FD": 1}


def test_ranks_may_connect_before_anybody_accepts() -> None:
    with open_listener(num_ranks=2) as listener, socket.create_connection(listener.getsockname(), timeout=5):
        assert listener.getsockname()[0] == "127.0.0.1"


def test_two_listeners_have_two_ports() -> None:
    with open_listener(num_ranks=2) as one, open_listener(num_ranks=2) as other:
        assert one.getsockname()[1] != other.getsockname()[1]
