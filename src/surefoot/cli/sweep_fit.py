"""`surefoot sweep fit`: gather a sweep, fit what it was made for, say what moved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.sweep_folder import SweepFolder, law_of, read_sweep
from surefoot.cli.sweep_gather import TABLE_NAME, Gathered, Row, as_csv, gather, told
from surefoot.core.durable import write_atomic
from surefoot.core.errors import DataError
from surefoot.core.strict_json import dumps

FIT_NAME = "fit.json"
PROBE = "batch-probe"
TRANSFER = "transfer"


def fit_(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")],
    accelerator: Annotated[str, typer.Option("--accelerator", help="Its peak turns the measured pace into MFU.")] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws behind the bands.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit the law that a sweep was made for, with bands, and say what moved against the law that it assumed.

    Leaves runs.csv and fit.json in DIR; `surefoot plan --law DIR/fit.json` plans by it.

    Example: surefoot sweep fit sweeps/first
    """
    folder = read_sweep(path)
    gathered = gather([path], accelerator=accelerator)
    write_atomic(path / TABLE_NAME, as_csv(gathered.rows))
    if folder.kind == PROBE:
        _tell_probe(folder, gathered, as_json=as_json)
        return
    answer, lines = _transfer(folder, gathered.rows) if folder.kind == TRANSFER else _fitted(folder, seed=seed)
    if answer.get("law") in ("isoflop", "parametric"):
        # What says that sizes were tried on this data, and how far up: a plan by this fit is validated by it.
        answer["sweep"] = {"runs": len(gathered.rows), "largest_flops": max(row.flops for row in gathered.rows)}
    write_atomic(path / FIT_NAME, dumps({"schema_version": 1, **answer}, indent=1) + "\n")
    pace = _pace(gathered.rows)
    if as_json:
        more = {"left_out_runs": dict(gathered.left_out), "doubts": list(gathered.doubts), "pace": pace}
        say(dumps({"schema_version": 1, **answer, **more}))
        return
    say("\n".join([*lines, *told(gathered), *_pace_line(pace)]))
    say(f"\n{len(gathered.rows)} runs in {path / TABLE_NAME}, the fit in {path / FIT_NAME}")


def _fitted(folder: SweepFolder, *, seed: int) -> tuple[dict[str, Any], list[str]]:
    from surefoot.cli.fit_page import page
    from surefoot.plan.fits.answer import Question, answer_of
    from surefoot.plan.fits.table import read_table
    from surefoot.plan.sweeps.moved import COLUMN_OF, PLANNED_BY, compared

    table = read_table(folder.path / TABLE_NAME)
    if folder.kind != "isoflop":
        answer = answer_of(table, law=folder.kind, question=Question(seed=seed))
        return answer, page(answer)
    law = law_of(str(folder.about["law_asked"]))
    column = COLUMN_OF[law.counts]
    answer = answer_of(table, law="isoflop", question=Question(count=column if column in PLANNED_BY else "n", seed=seed))
    told, answer["assumed"] = compared(law, answer, table, seed=seed)
    lines = [*page(answer), "", "what moved:", *(f"  {line}" for line in told)]
    try:
        surface = answer_of(table, law="parametric", question=Question(seed=seed))
    except DataError as error:
        lines += ["", f"parametric: {error.what}"]
    else:
        answer["parametric"] = {name: surface[name] for name in ("E", "A", "B", "alpha", "beta", "a", "bands", "condition", "objective")}
        lines += ["", "the same runs as a surface:", *page(surface)]
    return answer, lines


def _transfer(folder: SweepFolder, rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    from surefoot.plan.tuning.rate_transfer import TriedRate, transfer

    found = transfer([TriedRate(row.d_model, row.lr, row.loss) for row in rows])
    name = str(folder.about["parametrization"])
    widths = [{"d_model": one.d_model, "best_lr": one.best_lr, "loss": one.loss, "inside": one.is_inside} for one in found.widths]
    answer: dict[str, Any] = {"kind": TRANSFER, "parametrization": name, "widths": widths, "exponent": found.exponent}
    answer["price_of_first"] = {str(width): price for width, price in found.price_of_first.items()}
    lines = [f"{name} parametrization, best learning rate by width:"]
    for one in found.widths:
        edge = "" if one.is_inside else "  at the edge of what was tried"
        price = found.price_of_first.get(one.d_model)
        kept = f"; the best of width {found.widths[0].d_model} costs {price:+.4f} here" if price is not None else ""
        lines.append(
            f"  d_model {one.d_model:>5}  lr {one.best_lr:.3g}  loss {one.loss:.4f}{edge}{kept if one is not found.widths[0] else ''}"
        )
    if found.exponent is not None:
        lines.append(f"best lr ~ width^{found.exponent:.2f}: 0 is full transfer, -1 the rule of one over the width")
    return answer, lines


def _tell_probe(folder: SweepFolder, gathered: Gathered, *, as_json: bool) -> None:
    from surefoot.plan.sweeps.batch_probe import ProbedLoss, judge

    verdict = judge([ProbedLoss(row.batch_tokens, row.loss) for row in gathered.rows], tolerance=float(folder.about["tolerance"]))
    answer = {
        "within_tokens": verdict.within_tokens,
        "beyond_tokens": verdict.beyond_tokens,
        "tolerance": verdict.tolerance,
        "excess": [{"batch_tokens": batch, "loss_above": above} for batch, above in verdict.excess],
        **{name: folder.about[name] for name in ("run", "step", "tokens_seen", "tokens_each")},
    }
    if as_json:
        say(dumps({"schema_version": 1, "kind": PROBE, **answer, "left_out_runs": dict(gathered.left_out)}))
        return
    for batch, above in verdict.excess:
        say(
            f"  batch {batch:>12,.0f} tokens  loss {above:+.4f}" + ("" if above <= verdict.tolerance else f"  beyond {verdict.tolerance:g}")
        )
    upper = f"below {verdict.beyond_tokens:,.0f}" if verdict.beyond_tokens else "and no batch that was tried is beyond"
    say(f"the critical batch after {answer['tokens_seen']:.3g} tokens is at least {verdict.within_tokens:,.0f} tokens, {upper}")
    for line in told(gathered):
        say(line)


def _pace(rows: Sequence[Row]) -> dict[str, float | None]:
    """Of the largest model: small ones are slower per FLOP, and say less about the target."""
    largest = max(rows, key=lambda row: row.n)
    return {"tokens_per_s": largest.tokens_per_s, "flops_per_s": largest.flops_per_s, "mfu": largest.mfu, "n": float(largest.n)}


def _pace_line(pace: dict[str, float | None]) -> list[str]:
    if pace["flops_per_s"] is None:
        return []
    mfu = f", {pace['mfu']:.1%} of the accelerator's peak" if pace["mfu"] is not None else ""
    return [f"the largest model ran at {pace['tokens_per_s']:.3g} tokens/s, {pace['flops_per_s']:.3g} FLOP/s{mfu}"]
