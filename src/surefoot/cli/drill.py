"""`surefoot drill`: faults into a real run, and whether it survives them as promised."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.core.errors import EXIT_FAILED, ConfigError
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.drill.campaign import Order
    from surefoot.drill.verdict import Result

app = typer.Typer(help="Inject faults into a real run, and see whether it survives them.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Repeat = Annotated[int, typer.Option("--repeat", metavar="N", help="how often, each at a rank and step of its own")]
Ranks = Annotated[int, typer.Option("--ranks", metavar="N", help="CPU ranks of the run")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="draws ranks and steps; drawn and printed when not given")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="strike this run, in a folder of its own, not a small one")]
Keep = Annotated[bool, typer.Option("--keep", help="leave the folders of the runs, and say where they are")]
Record = Annotated[Path | None, typer.Option("--record", metavar="RUN", help="also note the outcome in the ledger of this run")]


@app.command("list")
def list_drills(json_output: Json = False) -> None:
    """Name every fault of the catalogue, and what those need that cannot run yet.

    Example: surefoot drill list
    """
    from surefoot.drill.catalogue import CATALOGUE

    drills = CATALOGUE.values()
    if json_output:
        listed = [{"name": drill.name, "fault": drill.fault, "can_run": drill.can_run, "needs": drill.needs or None} for drill in drills]
        say(dumps({"schema_version": 1, "drills": listed}))
        return
    for drill in drills:
        say(f"{drill.number:>2}  {drill.name:<26} {drill.fault}" + (f"; not yet: needs {drill.needs}" if drill.needs else ""))


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a fault of `surefoot drill list`")],
    repeat: Repeat = 1,
    ranks: Ranks = 2,
    seed: Seed = None,
    config: Config = None,
    keep: Keep = False,
    record: Record = None,
    json_output: Json = False,
) -> None:
    """Strike a real run at a random rank and step, and compare it with one that nothing happened to. Ends with 1 when a promise is broken.

    \b
    Examples:
      surefoot drill run kill-a-rank
      surefoot drill run hung-rank --repeat 10 --ranks 4 --json
    """
    from surefoot.drill.campaign import Order, refuse_order
    from surefoot.drill.catalogue import find_drill

    order = Order(find_drill(name), repeat, ranks, _seed(seed))
    refuse_order(order, where="drill run")
    _carry_out([order], config=config, keep=keep, record=record, json_output=json_output)


@app.command()
def campaign(
    target: Annotated[str, typer.Argument(metavar="FILE|NAME", help="a TOML of [[drill]] tables, one drill, or `all` that can run here")],
    repeat: Repeat = 10,
    ranks: Ranks = 2,
    seed: Seed = None,
    config: Config = None,
    keep: Keep = False,
    record: Record = None,
    json_output: Json = False,
) -> None:
    """Run many drills, one after another. Ends with 1 when any of them finds a problem.

    \b
    Examples:
      surefoot drill campaign nightly.toml
      surefoot drill campaign all --repeat 3
    """
    from surefoot.drill.campaign import Order, read_campaign, refuse_order, whole_catalogue
    from surefoot.drill.catalogue import find_drill

    if target == "all":
        orders = whole_catalogue(num_repeats=repeat, num_ranks=ranks, seed=_seed(seed))
    elif target.endswith(".toml"):
        orders = read_campaign(Path(target))
    else:
        orders = [Order(find_drill(target), repeat, ranks, _seed(seed))]
    for order in orders:
        refuse_order(order, where="drill campaign")
    _carry_out(orders, config=config, keep=keep, record=record, json_output=json_output)


def _seed(wanted: int | None) -> int:
    return random.SystemRandom().randrange(1_000_000) if wanted is None else wanted


def _carry_out(orders: Sequence[Order], *, config: Path | None, keep: bool, record: Path | None, json_output: bool) -> None:
    from surefoot.drill.campaign import run_orders, scratch_folder

    if config is not None and not config.exists():
        raise ConfigError("there is no such file", where=str(config), hint="--config takes a TOML as `surefoot train` does")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILED))  # what was started is ended on the way out
    if not json_output:
        for order in orders:
            say(f"{order.drill.name}: {order.drill.fault}; {order.num_repeats} times, seed {order.seed}")
    with scratch_folder(keep=keep) as folder:
        results = run_orders(orders, folder=folder, config=config, on_result=_after_each(record, json_output=json_output))
    ok = all(result.ok for result in results)
    if json_output:
        answer: dict[str, Any] = {"schema_version": 1, "ok": ok, "seeds": [order.seed for order in orders]}
        say(dumps({**answer, "folder": str(folder) if keep else None, "results": [result.as_json() for result in results]}))
    else:
        say(f"{sum(result.ok for result in results)} of {len(results)} as promised" + (f"; their folders: {folder}" if keep else ""))
    if not ok:
        raise typer.Exit(EXIT_FAILED)


def _after_each(record: Path | None, *, json_output: bool) -> Callable[[Result], None]:
    from surefoot.drill.rehearse import record as note
    from surefoot.observe.run_dir import require_run

    if record is not None:
        require_run(record)

    def after(result: Result) -> None:
        if record is not None:
            note(record, result)
        if not json_output:
            say(_line(result))

    return after


def _line(result: Result) -> str:
    struck = f"rank {result.struck_rank} " if result.struck_rank is not None else ""
    seen = f"seen after {result.detected_s:g} s of {result.bound_s:g} s" if result.detected_s is not None else "not seen"
    again = result.recovery.get("training_again_s")
    parts = [
        f"{'ok  ' if result.ok else 'FAIL'}  {struck}at step {result.struck_step}: {seen}",
        _blamed(result),
        f"{result.grade}, {result.action}",
        f"training again {again:g} s later" if again is not None else "",
        f"{result.steps_lost} steps lost" if result.steps_lost is not None else "",
        "same bits" if result.same_bits else "",
        *result.problems,
    ]
    return "; ".join(part for part in parts if part)


def _blamed(result: Result) -> str:
    told = result.culprit or {}
    named = told.get("ranks") or told.get("candidates") or []
    words = "blamed" if told.get("ranks") else "named"
    return f"{words} {', '.join(str(rank) for rank in named)}" if named else "nobody blamed"
