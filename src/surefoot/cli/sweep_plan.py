"""`surefoot sweep plan`: which proxy runs, at what price, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surefoot.cli.console import say
from surefoot.cli.sweep_fit import TRANSFER
from surefoot.cli.sweep_folder import SweepFolder, law_of, points_of, write_sweep
from surefoot.cli.sweep_numbers import flops, numbers, whole_numbers
from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.core.sections import RunConfig
from surefoot.core.stages import refuse_stages
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.plan.sweeps.sweep import Varied


def plan_(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The TOML of the family: data, batch, schedule, learning rate.")],
    budgets: Annotated[str, typer.Option("--budgets", metavar="FLOPS,...", help="Compute of one run of each group: 1e18,2e18,4e18.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder to make; without it the plan is only shown.")] = None,
    num_sizes: Annotated[int | None, typer.Option("--sizes", help="Model sizes for each budget: 5, or 3 with --over.")] = None,
    law: Annotated[
        str, typer.Option("--law", help="Expects the best sizes: a law by name, ratio:R tokens per parameter, or a fit.json.")
    ] = "chinchilla-20",
    span: Annotated[float, typer.Option("--span", help="Largest over smallest size of a budget.")] = 8.0,
    over: Annotated[str, typer.Option("--over", metavar="lr=...|batch=...", help="Vary this at every size: lr=1e-3,2e-3,4e-3.")] = "",
    widths: Annotated[
        str, typer.Option("--widths", metavar="D_MODEL,...", help="In place of budgets: these widths, for the steps of BASE, over lr.")
    ] = "",
    lr_rule: Annotated[
        Literal["auto", "fixed", "1/width"],
        typer.Option("--lr-rule", help="A size's learning rate from that of BASE; auto: fixed under mup, else 1/width."),
    ] = "auto",
    target: Annotated[float, typer.Option("--target", metavar="FLOPS", help="The large run, to show the sweep's share of it.")] = 0.0,
    max_flops: Annotated[float, typer.Option("--max-flops", metavar="FLOPS", help="Refuse a sweep that trains more than this.")] = 0.0,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="over BASE, for example train.seed=2")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which runs a sweep would train and what they cost, before anything is trained; with --out, write it down.

    \b
    Examples:
      surefoot sweep plan examples/sweep.toml --budgets 1e12,2e12,4e12 --law ratio:40 --out sweeps/first
      surefoot sweep plan run.toml --budgets 1e18,2e18,4e18 --sizes 7 --target 2e21
      surefoot sweep plan run.toml --budgets 1e18,4e18 --over lr=1e-3,2e-3,4e-3 --out sweeps/lr
      surefoot sweep plan run.toml --widths 64,128,256 --over lr=2e-3,4e-3,8e-3 --out sweeps/transfer
    """
    from surefoot.cli.sweep_page import about_of, page_of, run_told
    from surefoot.config import load_config
    from surefoot.plan.sweeps.sweep import Design, design_sweep

    config = load_config(base, tuple(overrides or ())).config
    refuse_stages(config, where=str(base))
    flops(target, where="--target")
    flops(max_flops, where="--max-flops")
    varied, values = _over(over)
    if widths and varied != "lr":
        raise ConfigError(
            "widths without learning rates", where="--widths", hint="what moves with the width is the best rate: add --over lr=..."
        )
    design = Design(
        budgets=numbers(budgets, where="--budgets"),
        law=law_of(law),
        num_sizes=num_sizes if num_sizes is not None else (3 if varied else 5),
        span=span,
        varied=varied,
        values=values,
        rate_rule=("fixed" if config.model.parametrization == "mup" else "1/width") if lr_rule == "auto" else lr_rule,
        widths=whole_numbers(widths, where="--widths"),
    )
    vocab_size, prepared_tokens = _data_of(config)
    planned = design_sweep(config, vocab_size, design)
    kind = TRANSFER if widths else varied or "isoflop"
    asked = str(Path(law).absolute()) if law.endswith(".json") else law  # `sweep fit` may be asked from elsewhere
    about = about_of(planned, law=asked, max_flops=max_flops, target=target, prepared_tokens=prepared_tokens)
    about["parametrization"] = config.model.parametrization
    if max_flops and planned.trained_flops > max_flops:
        raise PlanInfeasible(
            f"the sweep trains {planned.trained_flops:.3g} FLOPs, the limit is {max_flops:.3g}",
            where="--max-flops",
            hint="take smaller budgets, fewer of them, or fewer sizes; without --out and --max-flops the plan is shown",
            got=planned.trained_flops,
            limit=max_flops,
        )
    if out is not None:
        write_sweep(SweepFolder(out, kind, points_of(planned), about), {run.name: run.config for run in planned.runs if not run.parent})
    if as_json:
        say(dumps({"schema_version": 1, "kind": kind, **about, "runs": [run_told(run) for run in planned.runs]}))
        return
    say("\n".join(page_of(planned, about)))
    if out is not None:
        agreed = "" if max_flops else f" --max-flops {planned.trained_flops * 1.01:.3g}"
        say(f"\nwritten to {out}; train it: surefoot sweep run {out}{agreed}")


def _over(text: str) -> tuple[Varied, tuple[float, ...]]:
    if not text:
        return "", ()
    name, _, values = text.partition("=")
    if name not in ("lr", "batch"):
        raise ConfigError(f"{name!r} cannot be varied", where="--over", hint="lr=1e-3,2e-3 or batch=8,16,32")
    tried = sorted(set(numbers(values, where="--over")))
    if len(tried) < 3:
        raise ConfigError(f"{len(tried)} values of {name}", where="--over", hint="a best value lies between others: give at least 3")
    return ("lr" if name == "lr" else "batch"), tuple(tried)


def _data_of(config: RunConfig) -> tuple[int, int | None]:
    """(vocabulary size, tokens prepared for training). Where nothing is prepared, what the recipe says, and None."""
    from surefoot.data.manifest import MANIFEST_NAME, load_manifest
    from surefoot.data.tokenizer import bpe_size

    if config.data.path and (Path(config.data.path) / MANIFEST_NAME).exists():
        manifest = load_manifest(config.data.path)
        return manifest.tokenizer.vocab_size, sum(source.splits["train"].tokens for source in manifest.sources.values())
    size = config.model.vocab_size or bpe_size(config.data.tokenizer) or (257 if config.data.tokenizer == "bytes" else 0)
    if not size:
        what = f"the vocabulary of {config.data.tokenizer!r} is not known before the data is prepared"
        raise ConfigError(what, where="[data] path", hint="`surefoot data prepare INPUT --out DIR` first, or set model.vocab_size")
    return size, None
