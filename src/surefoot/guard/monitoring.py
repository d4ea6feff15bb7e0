"""The detectors bound to the loop: from the gathered signals to findings, with windows that are saved and restored with the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from surefoot.core.hashing import sha256_json
from surefoot.core.identity import section_hashes
from surefoot.core.ports import CanaryPort, EvalPort
from surefoot.core.records import Asks, Finding, Signals
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_index, stages_of
from surefoot.guard.audit import Audit
from surefoot.guard.state import TrainState
from surefoot.monitor import detectors
from surefoot.monitor.canary import hear, margin_of
from surefoot.monitor.spikes import NUM_REBOUND, follow, open_watch, outcome, rebound

_TELL_EVERY_STEPS = 100
"""A rule that speaks at every step is told once in so many: the ledger is for people."""

_SHARE_OF_EXCESS, _SHARE_OF_LOSS = 0.25, 0.1
"""How much of a step's excess loss the canary must share to speak for ill weights; of its own loss where the step's has no number."""

_OF_RANKS = frozenset({"rank_norm", "rank_loss", "replica_norm_compare"})

_OPENS_WATCH = frozenset({"outlier_loss", "outlier_loss_and_norm", "sustained_loss", "sustained_loss_slow", "loss_n_sigma"})


class Monitoring:
    """One per guard, on every rank. All that outlives a step is in `TrainState.monitor`; what is looked at is the same on all ranks."""

    def __init__(self, state: TrainState, *, config: RunConfig, evaluation: EvalPort | None, audit: Audit) -> None:
        self._state = state
        self._config = config
        self._evaluation = evaluation if isinstance(evaluation, CanaryPort) else None
        self._audit = audit
        self._rules = _rules_of(config)
        self._thresholds = detectors.thresholds_of(config.monitor)
        self._stages = stages_of(config)
        self._seen: detectors.DetectorState | None = None
        self._findings: tuple[Finding, ...] = ()
        self._told: dict[str, int] = {}
        self._first_sample = 0
        self._is_anew = False
        self._resumed_at: int | None = None
        self._before: tuple[float, ...] = ()
        self._after: list[float] = []
        self.canary_loss: float | None = None  # of the step that was counted last, where it was asked for

    def get_ready(self) -> None:
        """Collective over the save group. After a restore."""
        self._audit.get_ready()
        self._forget_other_config()
        self._before, self._after = self._state.monitor.losses, []
        self._resumed_at = self._state.step if self._before else None

    def _forget_other_config(self) -> None:
        """Local. Under settings that somebody changed, and accepted, what was seen before is no measure."""
        word = sha256_json(section_hashes(self._config))
        monitor = self._state.monitor
        if monitor.config_word not in ("", word):
            monitor.detectors, monitor.watch, monitor.losses, monitor.canary_anew = detectors.DetectorState(), None, (), True
        monitor.config_word = word

    @property
    def has_findings(self) -> bool:
        """Whether the detectors had something to say of the step that was looked at last."""
        return bool(self._findings)

    # --- in a step ---

    def begin(self) -> None:
        """Local. Before the batch of a step is fetched: where it begins."""
        self._first_sample = self._state.data.next_sample
        self.canary_loss = None

    def look(self, signals: Signals) -> tuple[Finding, ...]:
        """Local. What the detectors say of this step, and what was found since the last. Nothing is remembered before `commit`."""
        self._is_anew = self._begins_anew()
        observation = detectors.observation_of(signals, step=signals.step + 1, rebased=self._is_anew)
        monitor = self._state.monitor
        self._seen, findings = detectors.observe(
            monitor.detectors, observation, self._rules, frozen=monitor.watch is not None and not self._is_anew, thresholds=self._thresholds
        )
        self._findings = (*monitor.pending, *findings)
        return self._findings

    def commit(self, signals: Signals) -> None:
        """Local. The computation that was looked at last is the one that counts."""
        monitor = self._state.monitor
        if self._seen is not None:
            monitor.detectors = self._seen
        self._seen = None
        monitor.pending = ()
        monitor.stage = stage_index(self._stages, self._first_sample)
        if self._is_anew:
            monitor.watch, monitor.canary_anew = None, True
            self._resumed_at = None
        self._watch(signals)
        self._look_for_rebound(signals)

    def ask_canary(self) -> bool | None:
        """Collective over the world. Whether the weights are as ill as the step looks; None where there is no canary, or no best yet.

        Weights that are ill show it on the frozen set too, and by about as much. Its own margin is for evaluations of one schedule, and a
        small set moves by more from one step to the next.
        """
        best = self._state.monitor.canary.best
        if self._evaluation is None or math.isnan(best) or not self._config.canary.interval_steps:
            return None
        told = self._evaluation.canary()
        if told is None or told.num_tokens != self._state.monitor.canary_tokens:
            return None
        excess = max((_excess(finding) for finding in self._findings), default=0.0)
        share = _SHARE_OF_EXCESS * excess if excess > 0.0 else _SHARE_OF_LOSS * best
        return not told.loss <= best + max(share, margin_of(self._state.monitor.canary, self._config.canary))

    def worth_telling(self, findings: Sequence[Finding], *, step: int) -> list[Finding]:
        """Local. Without what the same rule said a moment ago; what asks for action is always told."""
        told = []
        for finding in findings:
            last = self._told.get(finding.rule)
            if finding.asks in (Asks.RECORD, Asks.ALERT) and last is not None and 0 <= step - last < _TELL_EVERY_STEPS:
                continue
            self._told[finding.rule] = step
            told.append(finding)
        return told

    # --- between two steps ---

    def between_steps(self) -> None:
        """Collective over the world when an audit or a canary is due, else local. What it finds is judged with the next step."""
        step = self._state.step
        found: list[Finding] = []
        if self._canary_is_due(step):
            found += self._hear_canary(step)
        if any(finding.evidence.get("audit") for finding in found):
            self._audit.ask()
        if self._audit.due(step):
            found += self._audit.run(step)
        self._hear(found)

    def _hear(self, found: Sequence[Finding]) -> None:
        """Local. For the next judgement, as the rules are bound: what is off is not heard."""
        bound = [replace(finding, asks=self._rules[finding.rule]) for finding in found if finding.rule in self._rules]
        self._state.monitor.pending = (*self._state.monitor.pending, *bound)

    def _look_for_rebound(self, signals: Signals) -> None:
        """Local. The first losses after a start against the last ones before it, once there are enough of them."""
        if self._resumed_at is None or not signals.num_live_tokens:
            return
        self._after.append(signals.loss)
        if len(self._after) < NUM_REBOUND:
            return
        found = rebound(self._before, self._after, resume_step=self._resumed_at)
        self._resumed_at = None
        self._hear([found] if found is not None else [])

    def _canary_is_due(self, step: int) -> bool:
        interval_steps = self._config.canary.interval_steps
        return self._evaluation is not None and interval_steps > 0 and step % interval_steps == 0

    def _hear_canary(self, step: int) -> tuple[Finding, ...]:
        monitor = self._state.monitor
        told = self._evaluation.canary() if self._evaluation is not None else None
        if told is None:
            return ()
        self.canary_loss = told.loss
        monitor.canary, findings = hear(
            monitor.canary,
            step=step,
            loss=told.loss,
            section=self._config.canary,
            rebased=monitor.canary_anew or told.num_tokens != monitor.canary_tokens,
            loss_is_high=monitor.watch is not None,
            rules=self._rules,
        )
        monitor.canary_anew, monitor.canary_tokens = False, told.num_tokens
        return findings

    def _watch(self, signals: Signals) -> None:
        """Local. What becomes of a loss that rose: it is back, or it is a divergence, which asks for a roll-back."""
        monitor, step = self._state.monitor, signals.step + 1
        if not signals.num_live_tokens:
            return
        if monitor.watch is None:
            acting = (Asks.SKIP, Asks.ROLL_BACK)
            risen = next((found for found in self._findings if found.rule in _OPENS_WATCH and found.asks in acting), None)
            if risen is None:
                return
            age = max(0, step - risen.onset_step)
            before = monitor.losses[: len(monitor.losses) - age] if age else monitor.losses
            monitor.watch = open_watch(before, onset_step=risen.onset_step, rule=risen.rule)
        if monitor.watch is None:
            return
        monitor.watch = follow(monitor.watch, step=step, loss=signals.loss)
        became = outcome(monitor.watch, decide_steps=self._config.heal.decide_steps)
        if became == "open":
            return
        if became == "diverged":
            reason = f"the loss has not come back since step {monitor.watch.onset_step}, and does not return"
            evidence = {"level": monitor.watch.level, "tolerance": monitor.watch.tolerance, "rule": monitor.watch.rule}
            self._hear([Finding("diverged", Asks.ROLL_BACK, reason, monitor.watch.onset_step, evidence)])
        monitor.watch = None

    def _begins_anew(self) -> bool:
        """Whether a stage or a batch size begins with this step, so that what came before is no measure for it."""
        before, after = self._first_sample, self._state.data.next_sample
        if stage_index(self._stages, max(0, after - 1)) != stage_index(self._stages, max(0, before - 1)):
            return True  # its samples
        if self._state.monitor.stage not in (-1, stage_index(self._stages, before)):
            return True  # its rate, which is that of the stage in which a step begins
        ramp = self._config.train.batch_ramp
        # The first step at or behind an edge begins within one batch of the size before it.
        return any(edge <= before < edge + batch for (_, batch), (edge, _) in pairwise(ramp))


def _excess(finding: Finding) -> float:
    """By how many nats the loss stood above what was expected; 0 where the finding is not about that."""
    value, level = finding.evidence.get("value"), finding.evidence.get("level")
    is_loss = finding.rule.startswith(("outlier_loss", "sustained_loss"))
    return value - level if is_loss and isinstance(value, float) and isinstance(level, float) else 0.0


def _rules_of(config: RunConfig) -> Mapping[str, Asks]:
    """Where sums are exact no layout may change a bit: what hangs on who computes which sample is looked at only where a person asks."""
    rules = detectors.bindings(config.heal)
    if config.numerics.sums != "exact":
        return rules
    by_hand = {name for name, _ in config.heal.rules}
    return {name: asks for name, asks in rules.items() if name not in _OF_RANKS or name in by_hand}
