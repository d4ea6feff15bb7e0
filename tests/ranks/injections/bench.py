"""Runs with and without faults over one corpus, and what became of the faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from benchmarks.clean_runs import acted_on

from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import read_ledger
from surefoot.observe.metrics import read_steps
from tests.ranks.conftest import RanksFailed, WarmParent
from tests.ranks.injections.corpus import prepare_corpus
from tests.ranks.injections.drawing import Case
from tests.ranks.injections.faults import Fault
from tests.ranks.injections.outcomes import Outcome, outcome_of, refused
from tests.ranks.injections.runs import NUM_RANKS, SAVE_STEPS, End, config_of, injected

_LIMIT_S: Final = 110.0  # against a hang
CLEAN_SEEDS: Final = (0, 1, 2)


class Bench:
    """Those without a fault are run once for each config."""

    def __init__(self, warm_parent: WarmParent, folder: Path) -> None:
        self._parent, self._folder = warm_parent, folder
        self._num_runs = 0
        self._clean: dict[tuple[bool, int, int], RunConfig] = {}
        self._ended: dict[Case, tuple[RunConfig, End]] = {}
        self.data = prepare_corpus(folder)

    def run_dir(self) -> Path:
        self._num_runs += 1
        return self._folder / f"run{self._num_runs:03d}"

    def run(self, config: RunConfig, faults: Sequence[Fault] = ()) -> End:
        """How it ended, the same on all ranks but for words."""
        ends: list[End] = self._parent.run(
            injected, NUM_RANKS, timeout_s=_LIMIT_S, init=False, kwargs={"config": config, "faults": tuple(faults)}
        )
        assert len({end.exit_code for end in ends}) == 1
        return ends[0]

    def crash(self, config: RunConfig, *, step: int, saved: int | None = None, faults: Sequence[Fault] = ()) -> None:
        """kill -9 of all ranks after a step, when `saved`, the last one that is saved before it, is on disk."""
        saved = saved if saved is not None else step // SAVE_STEPS * SAVE_STEPS
        kwargs = {"config": config, "faults": tuple(faults), "crash_at": step, "saved": saved}
        with pytest.raises(RanksFailed, match="died"):
            self._parent.run(injected, NUM_RANKS, timeout_s=_LIMIT_S, init=False, kwargs=kwargs)

    def clean(self, *, num_steps: int, sharded: bool = False, seed: int = 0) -> RunConfig:
        """Of a run without a fault, which has ended, and which nothing acted on."""
        key = (sharded, num_steps, seed)
        if key not in self._clean:
            config = config_of(self.data, self.run_dir(), sharded=sharded, seed=seed, num_steps=num_steps)
            assert self.run(config) == End(0)
            assert not acted_on(entries_of(config))
            self._clean[key] = config
        return self._clean[key]

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Of faults that share a run, in the order of their steps."""
        config = replace(cases[-1], num_steps=max(case.num_steps for case in cases)).config(self.data, self.run_dir())
        end = self.run(config, [case.fault for case in cases])
        entries, untils = entries_of(config), [*(case.first_step for case in cases[1:]), None]
        found = [outcome_of(case, entries, exit_code=end.exit_code, until_step=until) for case, until in zip(cases, untils, strict=True)]
        return [self.with_health(outcome, config) for outcome in found]

    def outcome(self, case: Case) -> Outcome:
        """Of a fault in a run of its own."""
        config, end = self.run_of(case)
        if case.fault.kind == "other-seed":
            return refused(case, end.error, exit_code=end.exit_code)
        return self.with_health(outcome_of(case, entries_of(config), exit_code=end.exit_code), config)

    def run_of(self, case: Case) -> tuple[RunConfig, End]:
        """A run with this fault alone, once for each case."""
        if case not in self._ended:
            config = case.config(self.data, self.run_dir())
            if case.fault.kind == "lost-moments":
                self.crash(config, step=case.fault.step)
            self._ended[case] = config, self.run(config, [case.fault])
        return self._ended[case]

    def with_health(self, outcome: Outcome, config: RunConfig) -> Outcome:
        """With what the run ended as, beside those without a fault."""
        if outcome.exit_code:
            return outcome
        num_steps, case = config.train.num_steps, outcome.case
        if final_digest(config) == final_digest(self.clean(num_steps=num_steps, sharded=case.sharded)):
            return replace(outcome, healed="the same bits")
        losses = [final_loss(self.clean(num_steps=num_steps, seed=seed)) for seed in CLEAN_SEEDS]
        loss, highest = final_loss(config), max(losses) + (max(losses) - min(losses))
        return replace(outcome, healed="within the spread" if loss <= highest else f"loss {loss:.4f}, clean ones up to {max(losses):.4f}")


def entries_of(config: RunConfig) -> list[LedgerEntry]:
    return read_ledger(Path(config.run.dir) / "ledger.jsonl")


def final_digest(config: RunConfig) -> str:
    return next(str(entry.fields["state_digest"]) for entry in reversed(entries_of(config)) if entry.event == "run.finished")


def final_loss(config: RunConfig) -> float:
    """Held-out, after the last step."""
    return float(read_steps(Path(config.run.dir), newest=1).to_pylist()[-1]["val_loss"])
