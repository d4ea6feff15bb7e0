"""Runs with and without faults over one corpus, and what became of the faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, variance
from typing import Final

import pytest
from benchmarks.clean_runs import acted_on

from surefoot.core.records import LedgerEntry
from surefoot.core.sections import ParallelSection, RunConfig
from surefoot.observe.ledger import read_ledger
from surefoot.observe.metrics import read_steps
from tests.ranks.conftest import RanksFailed, WarmParent
from tests.ranks.injections.corpus import prepare_corpus
from tests.ranks.injections.drawing import Case
from tests.ranks.injections.faults import Fault
from tests.ranks.injections.outcomes import SAME_BITS, WITHIN, WORSE, Outcome, outcome_of, refused
from tests.ranks.injections.runs import NUM_RANKS, SAVE_STEPS, End, config_of, each_alone, injected

_LIMIT_S: Final = 110.0  # against a hang
OTHER_SEEDS: Final = (1, 2)
_NUM_POOLED: Final = 4
_T_POOLED: Final = 2.896  # 99%, of 8 degrees of freedom: 3 seeds, 4 times


class Bench:
    """Those without a fault are run once for each config."""

    def __init__(self, warm_parent: WarmParent, folder: Path) -> None:
        self._parent, self._folder = warm_parent, folder
        self._num_runs = 0
        self._ended: dict[tuple[Case, ...], tuple[RunConfig, End]] = {}
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

    @cached_property
    def clean(self) -> RunConfig:
        """Of a run without a fault, which has ended, and which nothing acted on. Shorter ones are its beginning."""
        config = config_of(self.data, self.run_dir())
        assert self.run(config) == End(0)
        assert not acted_on(entries_of(config))
        return config

    @cached_property
    def clean_ones(self) -> list[RunConfig]:
        """Of three seeds: the others on one rank each, which changes the last digits of sums."""
        others = [config_of(self.data, self.run_dir(), seed=seed) for seed in OTHER_SEEDS]
        alone = [replace(config, parallel=ParallelSection()) for config in others]
        ends = self._parent.run(each_alone, len(alone), timeout_s=_LIMIT_S, init=False, kwargs={"configs": alone})
        assert ends == [End(0)] * len(alone)
        assert not any(acted_on(entries_of(config)) for config in alone)
        return [self.clean, *alone]

    def together(self, cases: tuple[Case, ...]) -> tuple[RunConfig, End]:
        """A run with all these faults, once."""
        if cases not in self._ended:
            config = cases[-1].config(self.data, self.run_dir())
            if any(case.fault.kind == "lost-moments" for case in cases):
                self.crash(config, step=cases[-1].fault.step)
            self._ended[cases] = config, self.run(config, [case.fault for case in cases])
        return self._ended[cases]

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Of faults that share a run, in the order of their steps; the config is that of the last."""
        config, end = self.together(tuple(cases))
        entries, untils = entries_of(config), [*(case.first_step for case in cases[1:]), None]
        found = [outcome_of(case, entries, exit_code=end.exit_code, until_step=until) for case, until in zip(cases, untils, strict=True)]
        return [self.with_health(outcome, config) for outcome in found]

    def outcome(self, case: Case) -> Outcome:
        """Of a fault in a run of its own."""
        if case.fault.kind == "other-seed":
            _, end = self.together((case,))
            return refused(case, end.error, exit_code=end.exit_code)
        return self.outcomes([case])[0]

    def with_health(self, outcome: Outcome, config: RunConfig) -> Outcome:
        """With what the run ended as, beside those without a fault."""
        if outcome.exit_code:
            return outcome
        step = config.train.num_steps
        if digest_at(config, step) == digest_at(self.clean, step):
            return replace(outcome, healed=SAME_BITS)
        losses, loss = [held_out_losses(clean) for clean in self.clean_ones], held_out_losses(config)[step]
        told = f"loss {loss:.4f}, clean {min(one[step] for one in losses):.4f} to {max(one[step] for one in losses):.4f}"
        return replace(outcome, healed=f"{WITHIN if loss <= highest_of(losses, step) else WORSE}: {told}")


def highest_of(losses: Sequence[Mapping[int, float]], step: int) -> float:
    """One further run of the same kind in a hundred is above, after `step`: by Student's t, with a spread that is pooled over the newest
    evaluations, since at one of them a few seeds may be close by chance."""
    steps = sorted(known for known in losses[0] if known <= step)[-_NUM_POOLED:]
    pooled = fmean(variance([one[known] for one in losses]) for known in steps)
    return fmean(one[step] for one in losses) + _T_POOLED * math.sqrt(pooled * (1 + 1 / len(losses)))


def entries_of(config: RunConfig) -> list[LedgerEntry]:
    return read_ledger(Path(config.run.dir) / "ledger.jsonl")


def digest_at(config: RunConfig, step: int) -> str:
    """Of the newest checkpoint of a step: of weights and moments, whatever the number of ranks."""
    saved = [entry for entry in entries_of(config) if entry.event == "checkpoint.committed" and entry.fields["step"] == step]
    return str(saved[-1].fields["state_digest"])


def held_out_losses(config: RunConfig) -> dict[int, float]:
    """By step, of the newest attempt that made it."""
    return {row["step"]: float(row["val_loss"]) for row in read_steps(Path(config.run.dir)).to_pylist() if row["val_loss"] is not None}
