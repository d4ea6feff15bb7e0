"""`surefoot sweep probe`: the critical batch of a run, asked of the run itself by branches with larger batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.new_folder import refuse_taken
from surefoot.cli.sweep_fit import PROBE
from surefoot.cli.sweep_folder import Point, SweepFolder, write_sweep
from surefoot.cli.sweep_numbers import amount, whole_numbers
from surefoot.core.errors import ConfigError
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.stages import refuse_stages
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_count

if TYPE_CHECKING:
    from surefoot.core.sections import RunConfig
    from surefoot.plan.sweeps.batch_probe import Probe


def probe_(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose critical batch is wanted.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    tokens: Annotated[float, typer.Option("--tokens", help="What each branch trains: some hundred steps of the run's own batch.")],
    from_: Annotated[int, typer.Option("--from", metavar="STEP", help="A checkpoint's step; the newest when not given.")] = 0,
    factors: Annotated[str, typer.Option("--factors", help="Times the run's batch; 1 is what the others are compared with.")] = "1,2,4,8",
    tolerance: Annotated[float, typer.Option("--tolerance", help="Nats by which a larger batch may be worse.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan branches of RUN that train the same tokens under larger batches; `sweep run DIR` trains them, `sweep fit DIR` answers.

    Example: surefoot sweep probe runs/quickstart --from 200 --tokens 4e5 --out sweeps/batch
    """
    from surefoot.config import load_config
    from surefoot.data.manifest import load_manifest
    from surefoot.observe.run_dir import CONFIG_NAME, require_run
    from surefoot.plan.sweeps.batch_probe import probes

    amount(tokens, where="--tokens", hint="tokens of each branch, such as 4e5")
    amount(tolerance, where="--tolerance", hint="nats per token, such as 0.01")
    require_run(run)
    refuse_taken(out, option="--out")
    config = load_config(run / CONFIG_NAME).config
    refuse_stages(config, where=str(run))
    step = from_ or _newest_step(run)
    row = _row_at(run, step)
    batch = _batch_at(config, int(row["next_sample"]))
    seq_len = config.data.seq_len
    planned = probes(batch=batch, lr=float(row["lr"]), seq_len=seq_len, tokens=tokens, factors=whole_numbers(factors, where="--factors"))
    sizes = resolve_sizes(config.model, load_manifest(config.data.path).tokenizer.vocab_size)
    samples = planned[0].batch * planned[0].num_steps
    flops = float(samples * sizes.flops_per_sequence(seq_len))
    points = tuple(
        Point(
            name=f"batch-x{one.factor}",
            budget_flops=flops,
            flops=flops,
            trained_flops=flops,
            tokens=float(samples * seq_len),
            n=sizes.num_parameters,
            num_steps=step + one.num_steps,
            parent=str(run.absolute()),
            branch_step=step,
            overrides=_overrides(one, step=step, micro=config.train.micro_batch_size),
        )
        for one in planned
    )
    seen = float(row["next_sample"] * seq_len)
    about = {"run": str(run), "step": step, "tokens_seen": seen, "tokens_each": float(samples * seq_len), "tolerance": tolerance}
    write_sweep(SweepFolder(out, PROBE, points, about), {})
    cost = flops * len(points)
    if as_json:
        told = [{"batch": one.batch, "num_steps": one.num_steps, "lr": one.lr} for one in planned]
        say(dumps({"schema_version": 1, "kind": PROBE, **about, "trained_flops": cost, "branches": told}))
        return
    say(f"from step {step} of {run}, {show_count(seen)} tokens seen: {len(points)} branches of {show_count(samples * seq_len)} tokens each")
    for one in planned:
        say(f"  batch {one.batch} x {seq_len} tokens, lr {one.lr:.3g}: {one.num_steps} steps")
    say(f"they cost {cost:.3g} FLOPs; train them: surefoot sweep run {out} --max-flops {cost * 1.01:.3g}")


def _newest_step(run: Path) -> int:
    from surefoot.cli.checkpoint_find import lineage_of

    newest = lineage_of(run).newest()
    if newest is None:
        raise ConfigError("it has no checkpoint yet", where=str(run), hint="train it up to one first")
    return newest.step


def _row_at(run: Path, step: int) -> dict[str, Any]:
    """What the run did last at `step`: how many samples it had seen, and at which rate."""
    from surefoot.observe.metrics import read_steps

    rows: list[dict[str, Any]] = read_steps(run, steps=range(step, step + 1), columns=("next_sample", "lr")).to_pylist()
    if not rows:
        raise ConfigError(f"nothing is known of step {step}", where=str(run), hint="see `surefoot checkpoint list RUN`")
    return rows[-1]


def _batch_at(config: RunConfig, num_samples: int) -> int:
    """Of a ramp, what holds after `num_samples`."""
    return max((size for first, size in config.train.batch_ramp if first <= num_samples), default=config.train.global_batch_size)


def _overrides(one: Probe, *, step: int, micro: int) -> tuple[str, ...]:
    """A constant rate: what the batch costs must not mix with what a decay brings."""
    return (
        f"train.num_steps={step + one.num_steps}",
        f"train.global_batch_size={one.batch}",
        f"train.micro_batch_size={min(micro, one.batch)}",
        "train.batch_ramp=[]",
        "train.eval_interval_steps=0",
        f"optimizer.lr={one.lr!r}",
        "schedule.kind=constant",
        "schedule.warmup_steps=0",
        "schedule.decay_steps=-1",
        "checkpoint.keep_steps=[]",
        "checkpoint.interval_steps=0",
        "checkpoint.interval_s=600.0",
        "checkpoint.milestone_steps=0",
        "checkpoint.prove=false",
    )
