"""`surefoot drain`: a node leaves a run in good order, is taken out of service at the site, or is let back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.operators import WAIT_S, Desk, Json, Wait, WaitS, live_job, require_live
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event

Node = Annotated[str, typer.Argument(metavar="NODE", help="Its name, or the id that `surefoot status` shows.")]
Run = Annotated[Path | None, typer.Option("--run", metavar="RUN", help="The run folder. Default: the one live run under runs/.")]
Cause = Annotated[str, typer.Option("--cause", metavar="TEXT", help="Why, for the ledger and the site's lists.")]
Yes = Annotated[bool, typer.Option("--yes", help="With --isolate: do it, not only say it. With --readmit: at once, without a burn-in.")]
Isolate = Annotated[bool, typer.Option("--isolate", help="Take it out of service at the site: drain, cordon, or the run's denylist.")]
Readmit = Annotated[bool, typer.Option("--readmit", help="Let it serve again, after its probes have passed for launch.burn_in_s.")]


def drain(
    node: Node,
    run: Run = None,
    cause: Cause = "",
    yes: Yes = False,
    isolate: Isolate = False,
    readmit: Readmit = False,
    json_output: Json = False,
    wait: Wait = True,
    wait_s: WaitS = WAIT_S,
) -> None:
    """Have NODE leave a live run at a step boundary: a spare takes its place, or the run goes on smaller. No step is lost.

    Other than that: --isolate takes it out of service for everybody, --readmit lets it serve again. Neither undoes what somebody else did.

    \b
    Examples:
      surefoot drain node17 --run runs/quickstart --cause "its fan is loud"
      surefoot drain node17 --run runs/quickstart --isolate --yes
      surefoot drain node17 --run runs/quickstart --readmit
    """
    if isolate and readmit:
        raise ConfigError("--isolate and --readmit are opposites", where="command line", hint="give one of them")
    from surefoot.coordinate.isolation.records import is_node_name

    if not is_node_name(node):
        hint = "one node at a time, by its name: letters, digits, dots, - and _"
        raise ConfigError(f"{node!r} is no name of a node", where="NODE", hint=hint)
    run_dir = run or _the_live_run()
    if isolate or readmit:
        from surefoot.cli.drain_site import isolate_node, readmit_node

        told = (isolate_node if isolate else readmit_node)(run_dir, node, cause=cause, confirmed=yes)
        told.say(json_output=json_output)
        return
    _order(run_dir, node, cause=cause, wait=wait, wait_s=wait_s, json_output=json_output)


def _order(run_dir: Path, node: str, *, cause: str, wait: bool, wait_s: float, json_output: bool) -> None:
    from surefoot.observe.drains import why_no_drain
    from surefoot.observe.ledger import LEDGER_NAME, read_ledger

    job = require_live(run_dir, "drain")
    if (why := why_no_drain(read_ledger(run_dir / LEDGER_NAME, up_to_damage=True))) is not None:
        raise ConfigError(why, where=str(run_dir), hint=f"`surefoot drain {node} --run {run_dir} --isolate` takes it out of service")
    desk = Desk(run_dir, "drain", job=job, wait_s=wait_s)
    told = desk.give(reason=cause, node=node)
    if wait:
        taken = desk.answer()
        began = desk.until_done(taken, Event.GENERATION_STARTED)
        world_size, num_nodes = began.fields.get("world_size"), began.fields.get("num_nodes")
        words = f"{node} left after step {taken.step}; generation {began.generation} runs with {world_size} ranks on {num_nodes} nodes"
        more = {"node": node, "generation": began.generation, "world_size": world_size, "num_nodes": num_nodes}
        told = desk.told(taken, words, more=more)
    told.say(json_output=json_output)


def _the_live_run() -> Path:
    from surefoot.observe.run_dir import CONFIG_NAME

    live = []
    for path in sorted(Path("runs").glob(f"*/{CONFIG_NAME}")):
        try:
            live += [path.parent] if live_job(path.parent) is not None else []
        except ConfigError:
            continue  # a copy, or one that stands still: whoever means it says so
    if len(live) != 1:
        what = f"{len(live)} live runs under runs/" + (f": {', '.join(map(str, live))}" if live else "")
        raise ConfigError(what, where="--run", hint="name the run: --run RUN")
    return live[0]
