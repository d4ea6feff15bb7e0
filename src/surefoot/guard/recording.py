"""What happened, told: ledger and metrics on rank 0, one line every few steps, a beat at every phase."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry, StepReport
from surefoot.core.sections import RunConfig
from surefoot.core.units import show_count, show_duration
from surefoot.guard.contaminated import write_contamination
from surefoot.guard.incident import write_incident
from surefoot.guard.state import TrainState
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.tensors.world import World

if TYPE_CHECKING:
    from surefoot.observe.metrics import MetricsWriter

logger = logging.getLogger(__name__)
progress = logging.getLogger("surefoot.progress")


class Recorder:
    """Only rank 0 writes; on other ranks every call does nothing."""

    def __init__(self, state: TrainState, *, config: RunConfig, world: World, run_dir: Path, generation: int, clock: Clock) -> None:
        self._state = state
        self._config = config
        self._generation = generation
        self._run_dir = run_dir
        self._ledger = Ledger(run_dir / "ledger.jsonl", clock=clock, by="rank 0") if world.leads else None
        self._metrics = _open_metrics(run_dir, generation=generation) if world.leads else None
        self._recent_s: deque[float] = deque(maxlen=50)

    @property
    def position(self) -> tuple[int, str]:
        """(seq, hash) of the newest ledger entry, for the manifest; (0, "") on other ranks."""
        return self._ledger.position() if self._ledger else (0, "")

    def entries(self) -> list[LedgerEntry]:
        """The ledger so far; empty on other ranks."""
        return read_ledger(self._ledger.path) if self._ledger else []

    def rows(self, steps: range, *, columns: Sequence[str]) -> list[dict[str, Any]]:
        """These columns of what the metrics store holds about these steps, of whichever attempt; empty on other ranks."""
        if self._metrics is None:
            return []
        from surefoot.observe.metrics import read_steps

        rows: list[dict[str, Any]] = read_steps(self._run_dir, steps=steps, columns=columns).to_pylist()
        return rows

    def ledger(self, event: Event, *, rule: str = "", reason: str = "", fields: Mapping[str, object] | None = None) -> None:
        """Append one line about the present step and attempt. Raises CheckpointError when it cannot be made durable.

        A line that moves an episode renews the files of its incident.
        """
        if self._ledger:
            entry = self._ledger.append(
                event,
                generation=self._generation,
                attempt=self._state.attempt,
                step=self._state.step,
                rule=rule,
                reason=reason,
                fields=fields,
            )
            write_incident(self._ledger.path, entry)
            write_contamination(self._ledger.path, entry)

    def ledger_if_possible(self, event: Event, *, reason: str, fields: Mapping[str, object]) -> None:
        """For telling of a failure whose cause may hit the ledger too: a full disk. What cannot be written goes to the log."""
        try:
            self.ledger(event, reason=reason, fields=fields)
        except SurefootError as error:
            self.warn(f"{event} could not be ledgered: {error}")

    def tell(self, report: StepReport) -> None:
        """A finished step to the metrics store and, every few steps, the console. Never raises into the step."""
        if self._metrics is None:
            return
        self.write(report)
        self._recent_s.append(report.step_s - report.save_s - report.evaluate_s)
        if report.step % self._config.monitor.log_interval_steps == 0 or report.val_loss is not None or report.saved is not None:
            progress.info("%s", self._line(report))

    def write(self, report: StepReport) -> None:
        """A row of the metrics store; a later one of the same step takes its place."""
        if self._metrics is not None:
            self._metrics.write(report)

    def say(self, text: str) -> None:
        """One line on the console, from rank 0 only."""
        if self._ledger:
            progress.info("%s", text)

    def warn(self, text: str) -> None:
        """As `say`, and seen too where a foreign loop shows no more than warnings."""
        if self._ledger:
            progress.warning("%s", text)

    def close(self, *, in_order: bool) -> None:
        """End the segment of metrics; when the loop ended `in_order`, and nobody waits for a restart, put all of them into Parquet."""
        if self._metrics:
            self._metrics.close()
            if in_order:
                _compact_metrics(self._run_dir)

    def _line(self, report: StepReport) -> str:
        num_steps = self._config.train.num_steps
        step_s = median(self._recent_s)
        parts = [
            f"step {report.step}/{num_steps}",
            f"loss {report.loss:.4f}",
            f"{show_count(report.num_live_tokens / step_s)} tok/s" if step_s > 0 else "",
            f"eta {show_duration((num_steps - report.step) * step_s)}",
            f"lr {report.lr:.2e}",
            f"norm {report.grad_norm:.3f}",
            "healthy" if report.action == "proceed" else report.action,
        ]
        if report.val_loss is not None:
            parts.append(f"held-out {report.val_loss:.4f} ({report.bits_per_byte:.3f} bits/byte)")
        if report.saved is not None:
            parts.append(f"saved {report.saved}")
        return "  ".join(part for part in parts if part)


def _open_metrics(run_dir: Path, *, generation: int) -> MetricsWriter:
    """pyarrow starts threads when it is imported, so it must not be in the parent that ranks are forked from: here is after the fork."""
    from surefoot.observe.metrics import MetricsWriter

    return MetricsWriter(run_dir, generation=generation)


def _compact_metrics(run_dir: Path) -> None:
    from surefoot.observe.metrics import compact

    try:
        compact(run_dir)
    except (OSError, SurefootError) as error:
        logger.warning("metrics stay in their segments: %s", error)
