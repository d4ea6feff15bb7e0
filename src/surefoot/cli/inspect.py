"""`surefoot inspect`: what the processes of a live run on this machine are doing, hung or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.observe.live import LiveRecord

MAX_PROFILE_S = 600.0


def inspect(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is live on this machine.")],
    stacks: Annotated[bool, typer.Option("--stacks", help="where every rank is, and which does not answer")] = False,
    profile: Annotated[float, typer.Option("--profile", metavar="N", help="for N seconds: where ranks spend their time")] = 0.0,
    memory: Annotated[bool, typer.Option("--memory", help="what each process holds, and what the machine allows")] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="this rank alone")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Look into the processes of a live run, hung or not. Training goes on; a rank that does not answer is told by the kernel.

    \b
    Examples:
      surefoot inspect runs/quickstart --stacks
      surefoot inspect runs/quickstart --profile 5 --rank 1
      surefoot inspect runs/quickstart --memory --json
    """
    if (wanted := stacks + memory + (profile != 0)) != 1:
        raise ConfigError(f"{wanted} things to look at, wanted one", where="inspect", hint="--stacks, --profile N or --memory")
    if profile < 0 or profile > MAX_PROFILE_S:
        raise ConfigError(
            f"--profile {profile:g}", where="inspect", hint=f"seconds, up to {MAX_PROFILE_S:g}", got=profile, limit=MAX_PROFILE_S
        )
    live = _live_here(run_dir)
    pids = _pids(live, rank, run_dir)
    if memory:
        from surefoot.cli.inspect_memory import look_at_memory as look

        answer, lines = look(live, pids)
    else:
        from surefoot.cli.inspect_stacks import look_at_profile, look_at_stacks

        answer, lines = look_at_profile(run_dir, live, pids, duration_s=profile) if profile else look_at_stacks(run_dir, live, pids)
    about = {
        "schema_version": 1,
        "run": str(run_dir),
        "host": live.host,
        "generation": live.generation,
        "phase": live.phase,
        "step": live.step,
    }
    if json_output:
        say(dumps({**about, **answer}))
        return
    say(f"generation {live.generation}, {live.phase}, step {live.step}, on {live.host}")
    for line in lines:
        say(line)


def _live_here(run_dir: Path) -> LiveRecord:
    """Raises ConfigError when the run is not live, or its processes are not of this machine."""
    from surefoot.cli.operators import require_live
    from surefoot.core.holder import is_alive, this_process
    from surefoot.observe.live import read_live
    from surefoot.observe.run_dir import require_run

    require_run(run_dir)
    lock = require_live(run_dir, "inspect")
    if is_alive(lock.holder, seen_from=this_process()) is None:
        raise ConfigError(
            f"its processes are on {lock.holder.host} (or in another container there), where its lock is held by pid {lock.holder.pid}",
            where=str(run_dir),
            hint=f"call `surefoot inspect` on {lock.holder.host}",
        )
    live = read_live(run_dir)
    if live is None or live.pid != lock.holder.pid:
        raise ConfigError("its agent has not said yet which ranks there are", where=str(run_dir), hint="ask again in a second")
    return live


def _pids(live: LiveRecord, rank: int | None, run_dir: Path) -> dict[int, int]:
    pids = {one.rank: one.pid for one in live.ranks}
    if not pids:
        raise ConfigError(f"there is no rank at this moment, it is in phase {live.phase}", where=str(run_dir), hint="ask again in a second")
    if rank is None:
        return pids
    if rank not in pids:
        raise ConfigError(f"there is no rank {rank} on {live.host}", where="--rank", hint=f"there are {_listed(sorted(pids))}", got=rank)
    return {rank: pids[rank]}


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:16]) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
