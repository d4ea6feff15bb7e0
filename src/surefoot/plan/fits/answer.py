"""What `surefoot fit` answers, as one object: the law with its bands, what it rests on, what it says, and what is wrong with it.

Everything that the page shows is read off this object, and so is a saved fit (`fitted`).
"""

from __future__ import annotations

import math
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.plan.fits.answer_parts import Question as Question
from surefoot.plan.fits.answer_parts import unfinished
from surefoot.plan.fits.isoflop_answer import isoflop_answer
from surefoot.plan.fits.surface_answer import surface_answer
from surefoot.plan.fits.table import Table
from surefoot.plan.fits.tuning_answer import tuning_answer

LAWS = ("parametric", "isoflop", "lr", "batch")


def answer_of(table: Table, *, law: str, question: Question | None = None) -> dict[str, Any]:
    """Raises DataError where the table does not determine the law, ConfigError where the question does not fit it."""
    asked = question or Question()
    for flops in asked.at:
        if not (math.isfinite(flops) and flops > 0):
            raise ConfigError(f"{flops:g} FLOPs is no budget", where="--at", hint="a number above 0, such as 1e24")
    if asked.drop_highest and law != "parametric":
        raise ConfigError(f"--law {law} drops no rows", where="--drop-highest", hint="it is for --law parametric")
    if law in ("lr", "batch"):
        found = tuning_answer(table, law=law, question=asked)
    else:
        found = (surface_answer if law == "parametric" else isoflop_answer)(table, question=asked)
    found["warnings"] += unfinished(table)
    return {"law": law, "table": str(table.path), **found}
