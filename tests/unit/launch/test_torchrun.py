"""Who started this process as a rank, and what is missing without our agent."""

from __future__ import annotations

import pytest

from surefoot.launch.torchrun import foreign_launcher, is_restart, missing_variables, what_is_missing

CONTRACT = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        ({**CONTRACT, "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        ({**CONTRACT, "TORCHELASTIC_RUN_ID": "x", "SUREFOOT_GENERATION": "1"}, None),
        ({"TORCHELASTIC_RUN_ID": "x"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # an sbatch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "WORLD_SIZE": "4"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty of a shell in it
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, "slurm"),
        ({"SLURM_JOB_ID": "7"}, None),
    ],
)
def test_launcher(environ: dict[str, str], launcher: str | None) -> None:
    assert foreign_launcher(environ) == launcher


def test_missing_variables() -> None:
    assert missing_variables(CONTRACT) == ()
    assert missing_variables({"RANK": "0", "WORLD_SIZE": "2"}) == ("MASTER_ADDR", "MASTER_PORT")


def test_what_is_missing_is_said_in_lines() -> None:
    lines = what_is_missing("torchrun")
    assert any("memory tier" in line for line in lines)
    assert any("culprit" in line for line in lines)
    assert any("warm restart" in line for line in lines)


def test_a_launcher_that_starts_ranks_again_says_so() -> None:
    assert not is_restart({})
    assert not is_restart({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "2"})
