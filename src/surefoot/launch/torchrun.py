"""Under stock torchrun or Slurm the same worker runs without our agent. This says so, and what is missing then."""

from __future__ import annotations

from collections.abc import Mapping

_AGENTS_OWN = "SUREFOOT_GENERATION"  # set by our agent, which speaks torchrun's contract too
_ONE_AGENT_EACH = "SUREFOOT_ONE_AGENT_PER_NODE"  # set by our batch script: its step starts agents, and no ranks
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def foreign_launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one rank of many: "torchrun", "slurm", or None (our agent, or a plain process).

    A Slurm allocation alone is none, nor is the batch script in it, although Slurm gives that a SLURM_PROCID and the job's SLURM_NTASKS:
    only a step (srun) of several tasks makes ranks.
    """
    if _AGENTS_OWN in environ or _ONE_AGENT_EACH in environ:
        return None
    if "TORCHELASTIC_RUN_ID" in environ and all(name in environ for name in _NEEDED):
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def missing_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What of the rank contract the launcher left out; `srun` alone sets none of it."""
    return tuple(name for name in _NEEDED if name not in environ)


def what_is_missing(launcher: str) -> list[str]:
    """One line per thing that our agent would have given, for the capability print."""
    return [
        f"started by {launcher}, not by surefoot's agent:",
        "no memory tier: nothing outlives a worker, so a restart reads from disk",
        f"no culprit: {launcher} reports the first failure that it sees, which may be a victim",
        "no warm restart: every restart imports torch anew (3-4 s, more on a loaded machine)",
        f"restarts, their budget and their waits are {launcher}'s; nothing of them is ledgered",
    ]


def is_restart(environment: Mapping[str, str]) -> bool:
    """Whether the launcher starts these processes again because they ended, and no person does."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
