"""The look-ahead: puts the samples that a run will take to the quality rules. `python -m surefoot.cli.look_ahead`, an aide.

It only reads, in time that nobody else wants and never for more than a quarter of one core. What it finds is in the run folder; it may be
killed at any time, and the next one goes on from there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from surefoot.cli.data_report import rules_off
from surefoot.cli.run_data import RunData, open_run_data
from surefoot.config import load_config
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import SurefootError
from surefoot.data.quality.look_ahead import Finding, LookAhead
from surefoot.data.quality.rules_file import rule_set
from surefoot.data.quality.stored import Shelf
from surefoot.launch.aide_duty import Duty
from surefoot.launch.process import run_when_idle
from surefoot.observe.ledger import LEDGER_NAME
from surefoot.observe.metrics import read_steps
from surefoot.observe.run_dir import CONFIG_NAME

logger = logging.getLogger(__name__)

# No settings: it is off unless asked for, and what it takes of a machine is bounded by these.
CPU_SHARE: Final = 0.25
_LOOK_INTERVAL_S: Final = 2.0
_REOPEN_INTERVAL_S: Final = 30.0
_RETRY_S: Final = 60.0


class View:
    """The run and its data, opened again when the ledger has grown: what is blocked, and which order the samples come in, stands there."""

    def __init__(self, run_dir: Path, *, clock: Clock) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._seen_bytes = (run_dir / LEDGER_NAME).stat().st_size
        self._opened_s = clock.monotonic_s()
        self.run: RunData = open_run_data(run_dir)
        self.shelf = Shelf(self.run.path, manifest=self.run.manifest)

    @property
    def is_old(self) -> bool:
        if self._clock.monotonic_s() - self._opened_s < _REOPEN_INTERVAL_S:
            return False
        return (self._run_dir / LEDGER_NAME).stat().st_size != self._seen_bytes

    def next_sample(self) -> int:
        """Where the run is, by its newest row; before the first one, where it began."""
        rows = read_steps(self._run_dir, newest=1, columns=("next_sample",))
        return int(rows.column("next_sample")[-1].as_py()) if rows.num_rows else self.run.steps.newest[1]

    def close(self) -> None:
        self.shelf.close()


def watch(duty: Duty, *, look_ahead: LookAhead, clock: Clock) -> None:
    """Until the run is over."""
    view = View(duty.run_dir, clock=clock)
    try:
        while not duty.is_over:
            if view.is_old:
                view.close()
                view = View(duty.run_dir, clock=clock)
            duty.wait(_pause_s(partial(_step, view, look_ahead)))
    finally:
        view.close()


def _step(view: View, look_ahead: LookAhead) -> bool:
    """Whether there was something to judge."""
    run = view.run

    def steps_of(samples: npt.NDArray[np.int64]) -> Sequence[int]:
        return run.steps.taking(samples)

    found = look_ahead.step(view.shelf, run.order, next_sample=view.next_sample(), end_sample=run.steps.end_sample, steps_of=steps_of)
    for finding in found or ():
        logger.warning("%s", words_of(finding))
    return found is not None


def words_of(finding: Finding) -> str:
    return (
        f"step {finding['step']}, sample {finding['sample']}: {finding['rule']} {finding['score']:.4g} (limit {finding['threshold']:g}) in "
        f"{finding['file']}:{finding['record']}, document {finding['hash']}"
    )


def _pause_s(work: Callable[[], bool]) -> float:
    """Do it, and say how long to rest so that it stays below its share of a core."""
    began_s = time.process_time()
    if not work():
        return _LOOK_INTERVAL_S
    return (time.process_time() - began_s) * (1.0 - CPU_SHARE) / CPU_SHARE


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.look_ahead")
    run_when_idle()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    while not duty.is_over:
        try:
            config = load_config(duty.run_dir / CONFIG_NAME).config
            rules = rule_set(config.data.rules)
            look_ahead = LookAhead(
                duty.run_dir, rules=rules, off=rules_off(config, rules=rules), num_samples=config.data.look_ahead_samples
            )
            watch(duty, look_ahead=look_ahead, clock=SystemClock())
        except (SurefootError, OSError) as error:  # whoever leaves is started again at once: it waits here instead
            logger.warning("nothing is looked at for %g s: %s", _RETRY_S, error)
            duty.wait(_RETRY_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
