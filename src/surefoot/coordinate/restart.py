"""Whether to start the workers again after a fault: a pure function of what happened so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.errors import EXIT_FAILED, EXIT_RETRY, Deterministic, error_for_exit_code
from surefoot.core.records import Fault, Grade, Instruction
from surefoot.core.sections import LaunchSection

MAX_WAIT_S = 300.0  # The upper bound of launch.restart_wait_s: doubling must not turn a pause into an outage.

# The same workers would end the same way: what these codes say can only be mended from outside.
_FINAL: Mapping[int, Grade] = {
    2: Grade.DETERMINISTIC,
    3: Grade.DETERMINISTIC,
    4: Grade.DETERMINISTIC,
    5: Grade.DETERMINISTIC,
    6: Grade.PLANNED,
    7: Grade.LARGE_SCALE,
    93: Grade.DETERMINISTIC,
}


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What one agent remembers. `newest_step` is the highest step finished so far: re-doing old steps is no progress."""

    newest_step: int = 0
    num_restarts: int = 0
    num_restarts_without_progress: int = 0
    leave_requested: bool = False


def decide(history: RestartHistory, fault: Fault, limits: LaunchSection) -> tuple[Instruction, RestartHistory]:
    """What to do about `fault`, and the history to go on with. Of several faults of one generation pass the first."""
    history = _with_progress(history, step=fault.step)
    what = f"{fault.reason} (step {fault.step})"
    code = fault.exit_code
    if code is not None and code in _FINAL:
        return _stop(code, f"{what} ({error_for_exit_code(code).__name__}): a restart would end the same way", _FINAL[code]), history
    if history.leave_requested:
        return _stop(EXIT_RETRY, f"{what} while leaving as asked", Grade.PLANNED), history
    if history.num_restarts_without_progress >= limits.no_progress_limit:
        reason = f"{what}: no step after {history.newest_step} was finished in {history.num_restarts_without_progress} restarts in a row"
        return _stop(Deterministic.exit_code, reason, Grade.DETERMINISTIC), history
    if history.num_restarts >= limits.max_restarts:
        last_code = EXIT_RETRY if code == EXIT_RETRY else EXIT_FAILED
        return _stop(last_code, f"{what}: all {limits.max_restarts} restarts are used up", Grade.PROCESS), history
    return _restart(history, what, limits)


def _with_progress(history: RestartHistory, *, step: int) -> RestartHistory:
    if step <= history.newest_step:
        return history
    return replace(history, newest_step=step, num_restarts_without_progress=0)


def _restart(history: RestartHistory, what: str, limits: LaunchSection) -> tuple[Instruction, RestartHistory]:
    in_a_row = history.num_restarts_without_progress
    wait_s = min(MAX_WAIT_S, limits.restart_wait_s * 2 ** (in_a_row - 1)) if in_a_row else 0.0
    after = replace(history, num_restarts=history.num_restarts + 1, num_restarts_without_progress=in_a_row + 1)
    reason = f"{what}: restart {after.num_restarts} of {limits.max_restarts}"
    return Instruction("restart", reason, Grade.PROCESS, wait_s=wait_s), after


def _stop(exit_code: int, reason: str, grade: Grade) -> Instruction:
    return Instruction("stop", reason, grade, exit_code=exit_code)
