"""When a run is audited, which ranks share an atom, and how long a finding is followed closely."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from surefoot.core.clock import ManualClock
from surefoot.core.events import Event
from surefoot.core.ports import RecomputePort
from surefoot.core.sections import MonitorSection, ParallelSection, RunConfig
from surefoot.guard.account import trusted_steps
from surefoot.guard.audit import CLOSER, Audit, bits_are_promised, data_places, watched_until
from surefoot.guard.state import TrainState
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.tensors.world import World
from tests.steerable import Points


def _audit(*, interval_steps: int, size: int = 4, device: str = "cpu", recompute: RecomputePort | None = None) -> Audit:
    model = nn.Linear(2, 2)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), data=Points())
    config = RunConfig(monitor=MonitorSection(audit_interval_steps=interval_steps))
    return Audit(state, config=config, world=World(0, size, torch.device(device)), recorder=None, recompute=recompute)


def test_audits_are_at_the_interval_or_where_they_are_asked_for() -> None:
    audit = _audit(interval_steps=20)
    assert [step for step in range(1, 61) if audit.due(step)] == [20, 40, 60]
    audit.ask()
    assert audit.due(7)


class Unasked:
    """What must not be asked to compute an atom."""

    def gradient_digest(self, *, shift: int) -> int:
        raise AssertionError(shift)


def test_no_gradient_is_compared_where_kernels_may_give_other_bits_each_time() -> None:
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            assert bits_are_promised(World(0, 4, torch.device("cuda"))) is is_deterministic
            assert bits_are_promised(World(0, 4, torch.device("cpu")))
            if not is_deterministic:
                assert _audit(interval_steps=20, device="cuda", recompute=Unasked()).compare_gradients().verdict == "agreed"
        finally:
            torch.use_deterministic_algorithms(False)


def test_one_rank_and_no_interval_are_never_audited() -> None:
    for audit in (_audit(interval_steps=20, size=1), _audit(interval_steps=0)):
        audit.ask()
        assert not any(audit.due(step) for step in range(1, 61))


def _found(ledger: Ledger, *, step: int, rule: str = "replica_differs", clean: int = 0) -> None:
    fields = {"rule": rule, "evidence": {"last_clean_step": clean} if rule != "cusum" else {}}
    ledger.append(Event.ANOMALY_FOUND, generation=1, attempt=1, step=step, rule=rule, fields=fields)


def test_a_finding_is_followed_closely_wherever_the_run_went_back_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    _found(ledger, step=5000, rule="cusum")
    assert watched_until(read_ledger(ledger.path), interval_steps=20) == 0
    _found(ledger, step=40, clean=20)
    ledger.append(Event.RUN_ROLLED_BACK, generation=1, attempt=2, step=20, fields={})
    assert watched_until(read_ledger(ledger.path), interval_steps=20) == 40 + CLOSER * 20


def test_what_leads_to_before_a_finding_is_kept_until_the_run_went_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=ManualClock(), by="rank 0")
    _found(ledger, step=9, rule="cusum")
    _found(ledger, step=40, clean=20)
    assert trusted_steps(read_ledger(ledger.path)) == {20}
    ledger.append(Event.RUN_ROLLED_BACK, generation=1, attempt=2, step=20, fields={})
    assert trusted_steps(read_ledger(ledger.path)) == frozenset()


def test_ranks_of_one_data_rank_differ_in_tp_cp_and_pp_alone() -> None:
    whole = data_places(ParallelSection(dp_replicate=2, dp_shard=2), world_size=4)
    assert [place.data_rank for place in whole] == [0, 1, 2, 3]
    parallel = ParallelSection(pp=2, dp_shard=2, tp=2)
    assert [place.data_rank for place in data_places(parallel, world_size=8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_loop_without_a_layout_has_samples_of_its_own_on_each_rank() -> None:
    assert [place.data_rank for place in data_places(ParallelSection(), world_size=3)] == [0, 1, 2]
