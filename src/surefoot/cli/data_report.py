"""`surefoot data report`: what prepared data holds, what is odd in it, and what was odd about the data of some steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.data_report_page import lines
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.cli.run_data import RunData
    from surefoot.core.sections import RunConfig
    from surefoot.data.quality.rules import RuleSet
    from surefoot.data.quality.stored import Shelf

Answer = dict[str, Any]


def report(
    path: Annotated[Path, typer.Argument(metavar="PATH|RUN", help="A folder of prepared data, or the folder of a run.")],
    window: Annotated[int | None, typer.Option("--window", metavar="STEP", help="Compare the steps up to this one with the rest.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps that window has.")] = 4,
    documents: Annotated[int, typer.Option("--documents", min=10, help="Look at so many documents of each source.")] = 2000,
    rules: Annotated[Path | None, typer.Option("--rules", metavar="FILE", help="A rules file; only what is accepted in it counts.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write one page with plots.")] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where the run's prepared data lies now.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report on prepared data: totals, lengths, copies, broken rules and where they cluster; for a run also its mixture and blocklist.

    Totals are exact. What needs text is asked of documents spread over each source. --window names the documents of a few steps that
    stand out: the first thing to look at when a loss does.

    \b
    Examples:
      surefoot data report data/mine
      surefoot data report data/mine --html report.html --json
      surefoot data report runs/quickstart --window 120
    """
    from surefoot.cli.run_data import is_prepared, open_run_data
    from surefoot.data.quality.page import write_page
    from surefoot.data.quality.report import report as report_on
    from surefoot.data.quality.rules_file import rule_set
    from surefoot.data.quality.stored import Shelf

    run = None if is_prepared(path) else open_run_data(path, data=data)
    if run is None and window is not None:
        raise ConfigError("prepared data has no steps", where=str(path), hint="--window needs the folder of a run")
    rules_path = str(rules or (run.config.data.rules if run else "") or "")
    active = rule_set(rules_path)
    off = rules_off(run.config if run else None, rules=active)
    with Shelf(run.path if run else path, manifest=run.manifest if run else None) as shelf:
        answer = report_on(shelf, rules=active, off=off, limit=documents, rules_file=rules_path)
        if run is not None:
            answer |= _of_run(run)
        if run is not None and window is not None:
            answer["window"] = window_of(run, shelf, step=window, num_steps=steps, rules=active, off=off, limit=documents)
    if html is not None:
        write_page(html, answer)
    for line in [dumps(answer)] if json_output else lines(answer):
        say(line)


def rules_off(config: RunConfig | None, *, rules: RuleSet) -> Mapping[str, Collection[str]]:
    """By source. Raises ConfigError for a rule that is not there."""
    off = {source.name: source.rules_off for source in config.data.sources} if config else {}
    for name, ids in off.items():
        rules.refuse_unknown(ids, where=f"[[data.sources]] {name}: rules_off")
    return off


def window_of(
    run: RunData, shelf: Shelf, *, step: int, num_steps: int, rules: RuleSet, off: Mapping[str, Collection[str]], limit: int
) -> Answer:
    """The samples of the `num_steps` steps up to `step`, as they were taken, beside what is usual in their sources."""
    import numpy as np

    from surefoot.data.quality.look import baselines
    from surefoot.data.quality.window import window_report

    first_step = max(1, step - num_steps + 1)
    run.steps.of_step(step)  # names the steps that there are, before anything is read
    samples = np.concatenate([run.steps.of_step(number).samples for number in range(first_step, step + 1)])
    usual = baselines(shelf, seq_len=run.order.seq_len_at(int(samples[-1])), rules=rules, off=off, limit=limit)
    blocks = run.blocklist.blocks
    window = window_report(shelf, run.order, samples, rules=rules, off=off, usual=usual, blocks=blocks)
    return {"step": step, "first_step": first_step, **window}


def _of_run(run: RunData) -> Answer:
    from surefoot.data.quality.look_ahead import look_ahead_report
    from surefoot.data.quality.steering import blocks_report, mix_report

    step, next_sample = run.steps.newest
    blocks, order = run.blocklist.blocks, run.order
    ahead = look_ahead_report(run.run_dir, order, next_sample=next_sample, end_sample=run.steps.end_sample, blocks=blocks)
    return {
        "run": run.config.run.name,
        "step": step,
        "mix": mix_report(order, next_sample=next_sample),
        "blocks": blocks_report(blocks, order=order, manifest=run.manifest, num_open=len(run.blocklist.open)),
        "look_ahead": ahead,
    }
