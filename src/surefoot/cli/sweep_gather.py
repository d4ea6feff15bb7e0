"""`surefoot sweep gather`: finished runs as rows of a table that `surefoot fit` reads."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.sweep_folder import SWEEP_NAME, read_sweep
from surefoot.core.durable import write_atomic
from surefoot.core.errors import DataError, SurefootError
from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.core.sections import RunConfig
    from surefoot.plan.fits.comparing import Standing

TABLE_NAME = "runs.csv"


@dataclass(frozen=True, slots=True)
class Row:
    """One run. `loss` is held out, in nats per token, after the last step; `flops` are exact, `mfu` is None without an accelerator.

    `n_body_and_head` and `n_flops_6` are N as some published laws count it: without the embedding but with the head, tied or not; and a
    sixth of the FLOPs per token outside the head.
    """

    run: str
    n: int
    n_without_embedding: int
    n_body_and_head: int
    n_flops_6: float
    tokens: int
    flops: float
    flops_6nd: float
    loss: float
    bits_per_byte: float | None
    lr: float
    batch_tokens: int
    num_steps: int
    d_model: int
    num_layers: int
    schedule: str
    finished: bool
    lr_share: float
    tokens_per_s: float | None
    flops_per_s: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Gathered:
    """`left_out`: run -> why. `doubts`: what of the rows may not be compared, one sentence each."""

    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    doubts: tuple[str, ...]


def gather_(
    paths: Annotated[list[Path], typer.Argument(metavar="DIR|RUN...", help="The folder of a sweep, or folders of runs.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where the table goes; DIR/runs.csv for one sweep.")] = None,
    accelerator: Annotated[str, typer.Option("--accelerator", help="Its peak turns the measured pace into MFU.")] = "",
    all_runs: Annotated[bool, typer.Option("--all", help="Also runs that are not finished, with finished = false.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Gather the held-out losses of finished runs into a CSV for `surefoot fit`. What may not be compared is named.

    Example: surefoot sweep gather sweeps/first && surefoot fit sweeps/first/runs.csv --law isoflop
    """
    gathered = gather(paths, accelerator=accelerator, all_runs=all_runs)
    table = out or (paths[0] / TABLE_NAME if len(paths) == 1 and (paths[0] / SWEEP_NAME).exists() else None)
    if table is not None:
        write_atomic(table, as_csv(gathered.rows))
    if as_json:
        rows = [{item.name: getattr(row, item.name) for item in fields(Row)} for row in gathered.rows]
        answer = {"rows": rows, "left_out": dict(gathered.left_out), "doubts": list(gathered.doubts)}
        say(dumps({"schema_version": 1, **answer, "table": str(table) if table else None}))
        return
    if table is None:
        say(as_csv(gathered.rows).rstrip("\n"))
    for line in told(gathered):
        say(line, err=table is None)
    if table is not None:
        say(f"{len(gathered.rows)} runs in {table}")


def told(gathered: Gathered) -> list[str]:
    return [f"left out: {name}: {why}" for name, why in gathered.left_out.items()] + [f"note: {doubt}" for doubt in gathered.doubts]


def gather(paths: Sequence[Path], *, accelerator: str = "", all_runs: bool = False) -> Gathered:
    """Raises DataError where nothing can be gathered."""
    from surefoot.plan.fits.comparing import unequal

    peak_of = _peak_of(accelerator)
    rows: list[Row] = []
    compared: list[Standing] = []
    left_out: dict[str, str] = {}
    for name, run_dir, num_steps in _runs(paths):
        try:
            seen = _seen(name, run_dir, num_steps=num_steps)
            if seen.standing.is_finished or all_runs:
                rows.append(_row(seen, peak_of=peak_of))
                compared.append(seen.standing)
            else:
                left_out[name] = unequal([seen.standing])[0]
        except SurefootError as error:
            left_out[name] = error.what
    if not rows:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise DataError("no finished run here", where=", ".join(map(str, paths)), hint=reasons or "`surefoot sweep run DIR` trains them")
    return Gathered(tuple(sorted(rows, key=lambda row: (row.flops, row.n))), left_out, tuple(unequal(compared)))


def as_csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([item.name for item in fields(Row)])
    for row in rows:
        values = [getattr(row, item.name) for item in fields(Row)]
        writer.writerow(["" if value is None else str(value).lower() if isinstance(value, bool) else value for value in values])
    return buffer.getvalue()


def _runs(paths: Sequence[Path]) -> list[tuple[str, Path, int | None]]:
    found: list[tuple[str, Path, int | None]] = []
    for path in paths:
        if (path / SWEEP_NAME).exists():
            folder = read_sweep(path)
            found += [(point.name, folder.run_dir(point.name), point.num_steps) for point in folder.points]
        else:
            found.append((path.name or path.absolute().name, path, None))
    return found


def _peak_of(accelerator: str) -> Any:
    """Dense FLOP/s of one device for a precision; None without an accelerator."""
    if not accelerator:
        return lambda precision: None
    from surefoot.plan.hardware import accelerator as known

    return known(accelerator).peak_flops


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the folder of a run says. `last` is the row of its newest step."""

    config: RunConfig
    steps: Sequence[Mapping[str, Any]]
    last: Mapping[str, Any]
    standing: Standing


def _seen(name: str, run_dir: Path, *, num_steps: int | None) -> _Seen:
    from surefoot.config import load_config
    from surefoot.observe.metrics import read_steps
    from surefoot.observe.run_dir import CONFIG_NAME, require_run
    from surefoot.plan.fits.comparing import Standing

    require_run(run_dir)
    config = load_config(run_dir / CONFIG_NAME).config
    steps: list[dict[str, Any]] = read_steps(run_dir).to_pylist()
    if not steps:
        raise DataError("it has not finished a step", where=str(run_dir))
    last = max(steps, key=lambda row: (row["generation"], row["attempt"], row["step"]))
    share = float(last["lr"]) / config.optimizer.lr if config.optimizer.lr else 1.0
    final = config.schedule.final_ratio if config.schedule.kind != "constant" else 1.0
    wanted = num_steps or config.train.num_steps
    return _Seen(config, steps, last, Standing(name, config.schedule.kind, int(last["step"]), wanted, share, final))


def _row(seen: _Seen, *, peak_of: Any) -> Row:
    """Samples are what the loader counted: after a branch with another batch there is no other way to know."""
    from surefoot.data.manifest import load_manifest
    from surefoot.plan.sizing.laws import counted

    config, standing = seen.config, seen.standing
    if config.model.factory:
        what = f"its model is of {config.model.factory}, whose parameters and FLOPs are not counted here"
        raise DataError(what, where=standing.name, hint="write its row yourself: `surefoot fit` needs n, tokens or flops, and loss")
    if config.stage:
        what = "it has stages: its tokens, its rate and its text are not one thing throughout, as a law has them"
        raise DataError(what, where=standing.name, hint="compare runs without [[stage]]")
    sizes = resolve_sizes(config.model, load_manifest(config.data.path).tokenizer.vocab_size)
    evaluated = [row for row in seen.steps if row["val_loss"] is not None and row["step"] <= standing.step]
    if not evaluated:
        raise DataError("it has no held-out loss", where=standing.name, hint="data.heldout_fraction must leave some documents out")
    loss = float(evaluated[-1]["val_loss"])
    if not math.isfinite(loss):
        raise DataError("its loss is not a number: it diverged", where=standing.name)
    num_samples = int(seen.last["next_sample"])
    tokens = num_samples * config.data.seq_len
    tokens_per_s, flops_per_s = _pace(seen, sizes)
    peak = peak_of(config.train.precision)
    return Row(
        run=standing.name,
        n=sizes.num_parameters,
        n_without_embedding=sizes.num_body_parameters,
        n_body_and_head=int(counted(sizes, "without embedding")),
        n_flops_6=counted(sizes, "flops/6", seq_len=config.data.seq_len),
        tokens=tokens,
        flops=float(num_samples * sizes.flops_per_sequence(config.data.seq_len)),
        flops_6nd=6.0 * sizes.num_parameters * tokens,
        loss=loss,
        bits_per_byte=evaluated[-1]["bits_per_byte"],
        lr=config.optimizer.lr,
        batch_tokens=config.train.global_batch_size * config.data.seq_len,
        num_steps=standing.step,
        d_model=sizes.d_model,
        num_layers=sizes.num_layers,
        schedule=config.schedule.kind,
        finished=standing.is_finished,
        lr_share=standing.lr_share,
        tokens_per_s=tokens_per_s,
        flops_per_s=flops_per_s,
        mfu=flops_per_s / (peak * config.parallel.num_ranks) if flops_per_s and peak else None,
    )


def _pace(seen: _Seen, sizes: ModelSizes) -> tuple[float | None, float | None]:
    """(tokens/s, FLOP/s) of the whole run's devices together."""
    from surefoot.plan.rerun.measured_run import pace_of

    pace = pace_of(seen.steps)
    if pace is None:
        return None, None
    samples_per_s = seen.config.train.global_batch_size / pace.step_s
    return samples_per_s * seen.config.data.seq_len, samples_per_s * sizes.flops_per_sequence(seen.config.data.seq_len)
