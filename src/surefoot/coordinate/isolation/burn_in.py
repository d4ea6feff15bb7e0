"""A node shows for a time that it is well, before it serves again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.coordinate.isolation.policy import IsolationDecision, decide_readmission
from surefoot.core.clock import Clock


@dataclass(frozen=True, slots=True)
class BurnIn:
    """How long probes passed in a row, how many rounds that were, and what failed: the first failure ends it."""

    passed_for_s: float
    num_rounds: int
    failures: tuple[str, ...]

    def decide(self, *, burn_in_s: float, is_ours: bool) -> IsolationDecision:
        return decide_readmission(passed_for_s=self.passed_for_s, burn_in_s=burn_in_s, num_failed=len(self.failures), is_ours=is_ours)


def burn_in(probe: Callable[[], Sequence[str]], *, burn_in_s: float, every_s: float, clock: Clock) -> BurnIn:
    """Call `probe` again and again on this node until it has passed for `burn_in_s`; it returns what failed, in words.

    Each call is bounded by the probe's own deadline, so this ends after `burn_in_s`, a wait and one probe.
    """
    begun_s, num_rounds = clock.monotonic_s(), 0
    while True:
        failures = tuple(probe())
        num_rounds += 1
        passed_for_s = clock.monotonic_s() - begun_s
        if failures or passed_for_s >= burn_in_s:
            return BurnIn(passed_for_s, num_rounds, failures)
        clock.sleep(min(every_s, burn_in_s - passed_for_s))
