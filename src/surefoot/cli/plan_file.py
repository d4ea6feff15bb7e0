"""The file that `surefoot plan --out` writes: the config that trains, or the page. Whole or absent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from surefoot.core.config_text import told_text
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.plan.composed import Plan
from surefoot.plan.page import markdown_page
from surefoot.plan.run_config import Data, Decided, run_config, starter_data

_HEAD = """\
# Written by `surefoot plan`: `surefoot train {name}` runs it. Only what the plan decided stands here; all settings: docs/config.md
# {stamp}
"""


def write_plan(plan: Plan, out: Path, *, data: Path | None) -> str:
    """What was written, in a line. Raises ConfigError where it cannot be, or where surefoot cannot train the layout."""
    text = markdown_page(plan) if out.suffix == ".md" else plan_toml(plan, out, data=data)
    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write the plan: {error.strerror}", where=str(out), hint="name a place that you may write to") from error
    if out.suffix == ".md":
        return f"wrote {out}"
    hint = "" if data is not None else "; it trains on Python's own library: put your text under [[data.sources]] first"
    return f"wrote {out}: surefoot train {out}{hint}"


def plan_toml(plan: Plan, out: Path, *, data: Path | None) -> str:
    """The config, checked as `train` will check it."""
    name = out.stem
    folder = out.absolute().parent
    if plan.layout.untrainable:
        raise ConfigError(
            f"the layout is planned only: {plan.layout.untrainable}", where=str(out), hint="write the page instead: --out plan.md"
        )
    source = Data(str(data.absolute())) if data is not None else starter_data(name, plan.model.sizes.vocab_size)
    decided = Decided(
        name=name,
        data=replace(source, path=os.path.join(folder, source.path)),
        seq_len=plan.model.seq_len,
        sizes=plan.model.sizes,
        training=plan.training,
        layout=plan.layout.layout,
        precision=plan.request.cluster.dtype,
        interval_steps=plan.reliability.interval.steps,
        retention=plan.reliability.retention,
        promise=plan.promise,
    )
    config, told = run_config(decided)
    validated = "validated by a sweep" if plan.validated else "NOT VALIDATED: no sweep of your own runs stands behind it"
    stamp = f"Sized by `{plan.law.name}` ({plan.law.source}); {validated}."
    return _HEAD.format(name=out.name, stamp=stamp) + "\n" + told_text(config, told, folder=folder)
