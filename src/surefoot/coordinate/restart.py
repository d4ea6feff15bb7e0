"""Whether to start the workers again after a fault: a pure function of what happened so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.coordinate.grades import Failure, Graded, NodeLoss, grade
from surefoot.core.errors import EXIT_FAILED, EXIT_RETRY, Deterministic
from surefoot.core.records import Fault, Grade, Instruction
from surefoot.core.sections import LaunchSection

MAX_WAIT_S = 300.0  # The upper bound of launch.restart_wait_s: doubling must not turn a pause into an outage.
_JITTER = 0.25  # of a wait, to both sides: jobs that one storage failed together must not come back to it together


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What counts of a run's past; `budget.fold_history` has it from the ledger, so neither a requeue nor a killed agent forgets it.

    `newest_step` is the highest step finished so far: re-doing old steps is no progress. `restarts_utc_s` are the newest ones.
    """

    newest_step: int = 0
    num_restarts: int = 0
    num_restarts_without_progress: int = 0
    leave_requested: bool = False
    restarts_utc_s: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    lost_nodes: tuple[NodeLoss, ...] = ()


def decide(history: RestartHistory, fault: Fault, limits: LaunchSection, *, draw: float = 0.5) -> tuple[Instruction, RestartHistory]:
    """What to do about `fault`, and the history to go on with. Of several faults of one generation pass the first.

    `draw`, from 0 to 1, shifts the wait. A node that joins is no fault: nobody asks here about it, and no budget pays for it.
    """
    history = with_checkpoint(with_progress(history, step=fault.step), step=fault.committed_step)
    what = f"{fault.reason} (step {fault.step if fault.step_known else 'not known'})"
    graded = grade(fault, failures=history.failures, lost_nodes=history.lost_nodes, limits=limits)
    history = with_fault(history, fault)
    stop = _stop(history, fault, graded, what, limits)
    return (stop, history) if stop is not None else _restart(history, fault, graded, what, limits, draw=draw)


def with_progress(history: RestartHistory, *, step: int) -> RestartHistory:
    """A new step starts the count of restarts without one again, never that of all restarts."""
    if step <= history.newest_step:
        return history
    return replace(history, newest_step=step, num_restarts_without_progress=0)


def with_checkpoint(history: RestartHistory, *, step: int) -> RestartHistory:
    """A checkpoint of a later step shows that what failed before it succeeds now; one from before the failure shows nothing."""
    standing = tuple(failure for failure in history.failures if failure.step >= step)
    return history if standing == history.failures else replace(history, failures=standing)


def with_fault(history: RestartHistory, fault: Fault) -> RestartHistory:
    """Remember what it is known by."""
    failures, lost = history.failures, history.lost_nodes
    if fault.fingerprint and fault.step_known:
        failures = tuple(dict.fromkeys((*failures, Failure(fault.step, fault.fingerprint))))
    lost = (*lost, *(NodeLoss(node, fault.utc_s) for node in fault.nodes))
    return replace(history, failures=failures, lost_nodes=lost)


def with_restart(history: RestartHistory, *, utc_s: float, window_s: float) -> RestartHistory:
    recent = (*(at_s for at_s in history.restarts_utc_s if at_s > utc_s - window_s), utc_s)
    in_a_row = history.num_restarts_without_progress + 1
    return replace(history, num_restarts=history.num_restarts + 1, num_restarts_without_progress=in_a_row, restarts_utc_s=recent)


def _stop(history: RestartHistory, fault: Fault, graded: Graded, what: str, limits: LaunchSection) -> Instruction | None:
    """The reasons not to start again, the gravest first; None when there is none."""
    last_code = EXIT_RETRY if fault.exit_code == EXIT_RETRY else EXIT_FAILED
    if graded.exit_code:
        return Instruction("stop", f"{what}: {graded.reason}", graded.grade, exit_code=graded.exit_code)
    if history.leave_requested:
        return Instruction("stop", f"{what} while leaving as asked", Grade.PLANNED, exit_code=EXIT_RETRY)
    if history.num_restarts_without_progress >= limits.no_progress_limit:
        reason = f"{what}: no step after {history.newest_step} was finished in {history.num_restarts_without_progress} restarts in a row"
        return Instruction("stop", reason, Grade.DETERMINISTIC, exit_code=Deterministic.exit_code)
    if history.num_restarts >= limits.max_restarts:
        return Instruction("stop", f"{what}: all {limits.max_restarts} restarts are used up", graded.grade, exit_code=last_code)
    recent = sum(at_s > fault.utc_s - limits.window_s for at_s in history.restarts_utc_s)
    if recent >= limits.window_restarts:
        reason = f"{what}: {recent} restarts in {limits.window_s:g} s, launch.window_restarts allows {limits.window_restarts}"
        return Instruction("stop", reason, graded.grade, exit_code=last_code)
    return None


def _restart(
    history: RestartHistory, fault: Fault, graded: Graded, what: str, limits: LaunchSection, *, draw: float
) -> tuple[Instruction, RestartHistory]:
    """The first restart after progress waits for nothing: a second of all ranks is dear, and nothing says yet that it will fail again."""
    in_a_row = history.num_restarts_without_progress
    wait_s = limits.restart_wait_s * 2 ** (in_a_row - 1) * (1 + _JITTER * (2 * draw - 1)) if in_a_row else 0.0
    after = with_restart(history, utc_s=fault.utc_s, window_s=limits.window_s)
    reason = f"{what}: restart {after.num_restarts} of {limits.max_restarts}"
    return Instruction("restart", reason, graded.grade, wait_s=min(MAX_WAIT_S, wait_s)), after
