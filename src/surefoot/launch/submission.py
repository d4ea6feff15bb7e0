"""What a scheduler is asked for, whichever it is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from surefoot.core.errors import EXIT_RETRY

NEVER_AGAIN: Final = (1, 2, 3, 4, 5, 6, 7, 93)
"""Exit codes that no scheduler may start again: defects, bad input, what a person must look at, and what fails the same way twice."""
AGAIN: Final = EXIT_RETRY
_EARLY_S: Final = 60  # Slurm may deliver a signal before the end of a job this much early
_TIME = re.compile(r"(\d+-)?\d{1,6}(:\d{2}){0,2}")


@dataclass(frozen=True, slots=True)
class Submission:
    """One run on `num_nodes` machines, an agent on each.

    `config` is the TOML or the run folder, absolute; `program` what is called there, `surefoot` where it is on the PATH. `save_s`: the
    longest that a save is known to take; `grace_s`: `launch.grace_s`. `denied`: nodes that the run does not want. `made_by` is the command
    line that asked.
    """

    name: str
    config: str
    run_dir: str
    num_nodes: int
    version: str
    made_by: str
    program: str = "surefoot"
    overrides: Sequence[str] = ()
    save_s: float = 0.0
    grace_s: float = 60.0
    max_requeues: int = 100
    num_gpus: int = 0
    num_cpus: int = 0
    memory_bytes: int = 0
    denied: Sequence[str] = field(default=())

    @property
    def notice_s(self) -> int:
        """How long before the end of its time the run is told: what a save may take, what Slurm may be early by, and one."""
        return math.ceil(max(self.save_s, self.grace_s)) + _EARLY_S + 1

    def train_arguments(self) -> tuple[str, ...]:
        """What follows `surefoot`, the same on every node."""
        return ("train", self.config, *self.overrides)


def parse_time_s(text: str) -> int:
    """Seconds of what Slurm takes as a time: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s. Raises ValueError for anything else."""
    if not _TIME.fullmatch(text):
        raise ValueError(f"{text!r} is no time: 90 (minutes), 24:00:00 or 2-12:00:00")
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def header(submission: Submission) -> list[str]:
    """The first comment lines of a generated file: nothing in them depends on when or where it was made."""
    return [f"# Made by surefoot {submission.version}:", f"#   {submission.made_by}"]
