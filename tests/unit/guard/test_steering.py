"""The blocklist under the guard: a foreign loop in this process whose data port can leave samples out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.checkpoint.transplant import transplant
from surefoot.cli.checkpoint_find import find
from surefoot.cli.checkpoint_import import take_in
from surefoot.core.blocking import Block
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.errors import SHARD_LOSSES, DataError, SurefootError
from surefoot.core.events import Event
from surefoot.core.ports import SteerableData, TouchedData
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import CheckpointSection, HealSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.guard.quarantine import note_lost_shard
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.metrics import read_steps
from surefoot.observe.opening import open_ledger
from tests.steerable import BATCH, Ahead, KnowingPoints, Points, ask, mask, skip, taken


class PlainPoints:
    """A port that can leave nothing out."""

    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, int]:
        self.next_sample += BATCH
        return torch.ones(BATCH, 8), BATCH

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


@dataclass
class Loop:
    config: RunConfig
    points: Points | PlainPoints = field(default_factory=KnowingPoints)
    at_step: Callable[[int], object] = lambda step: None
    stop_at: int = 1_000_000
    clock: Ahead = field(default_factory=Ahead)
    actions: list[str] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Guard(self.config, model=model, optimizer=optimizer, data=self.points, clock=self.clock) as guard:
            guard.restore()
            while guard.begin():
                rows, num_live = next(self.points)
                loss = model(rows).square().sum()
                loss.backward()
                if guard.judge(loss, num_live).proceeds:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(guard.clip_scale)
                    optimizer.step()
                    guard.applied()
                optimizer.zero_grad()
                self.actions.append(guard.finish().action)
                self.states.append({name: tensor.clone() for name, tensor in [*model.state_dict().items(), *_moments(optimizer)]})
                self.clock.ahead_s += 2.0
                self.at_step(guard.step)
                if guard.step == self.stop_at:
                    raise KeyboardInterrupt
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _moments(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [(f"{index}.{name}", value) for index, state in optimizer.state_dict()["state"].items() for name, value in state.items()]


def config_of(run_dir: Path, *, num_steps: int = 12) -> RunConfig:
    return RunConfig(
        run=RunSection(name="alone", dir=str(run_dir)),
        train=TrainSection(num_steps=num_steps),
        checkpoint=CheckpointSection(interval_steps=4, keep_last=9),
        heal=HealSection(breaker_in_a_row=2),
    )


def entries(run_dir: Path, *events: str) -> list[LedgerEntry]:
    return [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event in events]


def test_the_ports_are_what_they_are_taken_for() -> None:
    assert isinstance(KnowingPoints(), SteerableData)
    assert isinstance(KnowingPoints(), TouchedData)
    assert not isinstance(Points(), TouchedData)
    assert not isinstance(PlainPoints(), SteerableData)


def test_a_wish_in_a_live_run_holds_from_the_next_sample_or_a_later_one(tmp_path: Path) -> None:
    def at_step(step: int) -> None:
        if step == 2:
            ask(tmp_path, mask(0, 14), mask(20, 21, name="later", effective_sample=18), skip(26, 29))

    loop = Loop(config_of(tmp_path), at_step=at_step)
    loop.run()
    # The third step carries the wish to all ranks; the fourth, from sample 12 on, is the first without it.
    assert taken(tmp_path) == [("document", 12, "eve"), ("later", 18, "eve"), ("26:29", 12, "eve")]
    assert isinstance(loop.points, Points)
    assert loop.points.seen == [sample for sample in range(51) if sample not in (12, 13, 20, 26, 27, 28)]
    assert read_steps(tmp_path).to_pydict()["next_sample"] == [4, 8, 12, 16, 20, 24, 31, *range(35, 52, 4)]
    log = fold_blocks(read_ledger(tmp_path / "ledger.jsonl"))
    assert not log.open
    assert (log.count, log.head) == loop.points.blocklist


def test_what_cannot_be_honoured_is_refused_with_its_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    def at_step(step: int) -> None:
        if step == 2:
            ask(tmp_path, mask(0, 9, name="unknown"), mask(0, 9, name="careless"), skip(4, 12), skip(40, 40), mask(20, 22))
            damaged = {"block": {"kind": "document", "effective_sample": "soon"}}
            ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="eve")
            ledger.append(Event.BLOCK_ASKED, generation=1, attempt=1, step=2, fields=damaged)
            ledger.append(Event.BLOCK_ASKED, generation=1, attempt=1, step=2, fields={"block": 5})

    Loop(config_of(tmp_path), at_step=at_step).run()
    assert taken(tmp_path) == [("document", 12, "eve")]
    reasons = [entry.reason for entry in entries(tmp_path, "block.refused")]
    wanted = (
        "no such document",
        "ValueError: a bug",
        "goes on at sample 12, which is behind them",
        "no samples from 40 to 40",
        "damaged",
        "damaged",
    )
    assert len(reasons) == len(wanted)
    assert all(part in reason for part, reason in zip(wanted, reasons, strict=True))
    assert not fold_blocks(read_ledger(tmp_path / "ledger.jsonl")).open
    assert entries(tmp_path, "run.finished")


def test_a_port_that_can_leave_nothing_out_refuses_and_a_run_that_needs_it_does_not_start_without(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(
            config_of(tmp_path), points=PlainPoints(), at_step=lambda step: ask(tmp_path, mask(0, 9)) if step == 2 else None, stop_at=5
        ).run()
    assert [entry.reason for entry in entries(tmp_path, "block.refused")] == ["the data port of this loop has no block and skip"]
    ask(tmp_path, mask(18, 19))
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=5).run()
    with pytest.raises(DataError, match="leaves out 1 things"):
        Loop(config_of(tmp_path), points=PlainPoints()).run()


def test_what_was_asked_between_two_starts_holds_from_where_the_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=6).run()
    ask(tmp_path, mask(0, 18))
    loop = Loop(config_of(tmp_path), stop_at=11)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert taken(tmp_path) == [("document", 16, "eve")]  # it went on from step 4
    (entry,) = entries(tmp_path, "block.taken")
    assert (entry.attempt, entry.step) == (2, 4)
    assert isinstance(loop.points, Points)
    assert loop.points.seen == list(range(18, 44))
    again = Loop(config_of(tmp_path))
    again.run()
    assert isinstance(again.points, Points)
    assert again.points.blocks == loop.points.blocks
    assert len(entries(tmp_path, "block.taken")) == 1


def outcomes(run_dir: Path) -> list[tuple[object, str]]:
    return [(entry.fields["num_steps"], entry.reason) for entry in entries(run_dir, "replay.verified", "replay.differed")]


@pytest.mark.parametrize(("points", "num_steps"), [(KnowingPoints, 1), (Points, 0)])
def test_a_replay_is_compared_up_to_the_first_step_that_holds_what_is_left_out(
    tmp_path: Path, points: Callable[[], Points], num_steps: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), points=points(), stop_at=7).run()
    ask(tmp_path, mask(21, 22))
    Loop(config_of(tmp_path), points=points()).run()
    ((found, reason),) = outcomes(tmp_path)
    assert found == num_steps
    assert reason.endswith("what follows was recorded with samples that are left out, or changed, by now")
    assert entries(tmp_path, "run.finished")


def test_without_a_new_entry_all_recorded_steps_are_compared_and_a_changed_one_is_seen(tmp_path: Path) -> None:
    """The control of the test above: an old entry cuts nothing, and a port that leaves out more than it says is found out."""
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), at_step=lambda step: ask(tmp_path, mask(21, 22)) if step == 1 else None, stop_at=7).run()
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=7).run()
    assert outcomes(tmp_path) == [(3, "the same bits")]

    class Careless(KnowingPoints):
        def _is_left_out(self, sample: int, mode: str) -> bool:
            return sample == 22 or super()._is_left_out(sample, mode)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        Loop(config_of(tmp_path), points=Careless(), stop_at=7).run()
    assert entries(tmp_path, "replay.differed")


def test_a_wish_during_a_replay_ends_the_comparison_where_it_begins_to_hold(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=11).run()
    (tmp_path / "checkpoints" / "s8-a1" / "manifest.json").unlink()
    Loop(config_of(tmp_path), at_step=lambda step: ask(tmp_path, skip(30, 34)) if step == 5 else None).run()
    ((found, reason),) = outcomes(tmp_path)
    assert found == 3  # steps 5, 6 and 7; the eighth takes the samples from 28 to 31 and jumps
    assert reason.startswith("the same bits; what follows was recorded with samples that are left out")


class Jumping(KnowingPoints):
    """Stands behind a range that is left out as soon as it comes to it: ours stays until the next batch."""

    def skip(self, block: Block) -> None:
        super().skip(block)
        self._jump()

    def seek(self, cursor: Mapping[str, Any]) -> None:
        super().seek(cursor)
        self._jump()

    def __next__(self) -> tuple[torch.Tensor, int]:
        batch = super().__next__()
        self._jump()
        return batch

    def _jump(self) -> None:
        while self._is_left_out(self.next_sample, "skip"):
            self.next_sample += 1


@pytest.mark.parametrize("points", [KnowingPoints, Jumping])
@pytest.mark.parametrize(("first", "num_steps"), [(28, 2), (25, 2), (24, 1), (21, 1), (20, 0), (16, 0)])
def test_a_range_that_is_skipped_cuts_a_replay_wherever_the_port_may_feel_it(
    tmp_path: Path, points: Callable[[], Points], first: int, num_steps: int
) -> None:
    """Recorded are the steps that end at samples 20, 24 and 28. The one that ends where the range begins may jump: it is not compared."""
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), points=points(), stop_at=7).run()
    ask(tmp_path, skip(first, first + 2))
    loop = Loop(config_of(tmp_path), points=points())
    loop.run()
    ((found, reason),) = outcomes(tmp_path)
    assert found == num_steps
    assert reason.endswith("what follows was recorded with samples that are left out, or changed, by now")
    assert isinstance(loop.points, Points)
    assert loop.points.seen == [sample for sample in range(16, 50) if sample not in (first, first + 1)]


def test_a_range_behind_what_was_recorded_cuts_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=7).run()
    ask(tmp_path, skip(29, 31))
    Loop(config_of(tmp_path)).run()
    assert outcomes(tmp_path) == [(3, "the same bits")]


@pytest.mark.parametrize("first", [15, 16])
def test_a_range_that_begins_behind_the_checkpoint_is_skipped_from_the_checkpoint_on(first: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=7).run()
    ask(tmp_path, skip(first - 2, first), skip(first, first + 2))
    loop = Loop(config_of(tmp_path))
    loop.run()
    assert isinstance(loop.points, Points)
    assert loop.points.seen[0] == first + 2
    assert len(entries(tmp_path, "block.refused")) == 1  # the one that ends where the run stands, or before


def test_an_entry_that_a_live_run_took_holds_earlier_when_it_is_asked_for_again_before_going_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), at_step=lambda step: ask(tmp_path, mask(18, 42)) if step == 6 else None, stop_at=11).run()
    assert taken(tmp_path) == [("document", 28, "eve")]
    fields = {"id": "s4-a1", "step": 4}
    Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="eve").append(
        Event.RESUME_ASKED, generation=1, attempt=1, step=11, fields=fields
    )
    ask(tmp_path, mask(18, 42))
    loop = Loop(config_of(tmp_path))
    loop.run()
    assert taken(tmp_path) == [("document", 28, "eve"), ("document", 16, "eve")]
    assert isinstance(loop.points, Points)
    assert loop.points.seen == [16, 17, *range(42, 48)]


def test_a_replay_of_an_attempt_that_knew_is_preferred(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=7).run()
    ask(tmp_path, mask(17, 18))
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=6).run()
    Loop(config_of(tmp_path)).run()
    assert outcomes(tmp_path)[-1][0] == 2  # the steps 5 and 6 of the second attempt, which left it out too


def test_a_ledger_that_was_cut_before_an_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), at_step=lambda step: ask(tmp_path, mask(9, 10)) if step == 1 else None, stop_at=7).run()
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    entry = next(number for number, line in enumerate(lines) if b"block.taken" in line)
    path.write_bytes(b"".join(lines[:entry]))
    with pytest.raises(SurefootError, match="the tail is cut: checkpoint s4-a1 was written at seq") as raised:
        Loop(config_of(tmp_path)).run()
    assert raised.value.exit_code == 5


def test_a_checkpoint_of_a_run_that_left_other_things_out_is_refused(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(ours), stop_at=6).run()
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(theirs), at_step=lambda step: ask(theirs, mask(9, 10)) if step == 1 else None, stop_at=6).run()
    last = read_ledger(ours / "ledger.jsonl")[-1]
    new = transplant(
        theirs / "checkpoints" / "s4-a1",
        ours / "checkpoints",
        checkpoint="s4-a0",
        run="alone",
        generation=last.generation,
        ledger_seq=last.seq,
        ledger_hash=last.hash,
    )
    ledger = Ledger(ours / "ledger.jsonl", clock=SystemClock(), by="eve")
    fields = {"id": new.id, "step": 4, "attempt": 0, "parent": None, "state_digest": new.state_digest}
    for event in (Event.CHECKPOINT_IMPORTED, Event.RESUME_ASKED):
        ledger.append(event, generation=last.generation, attempt=1, step=6, fields=fields)
    with pytest.raises(DataError, match="s4-a0: it was made with 1 entries of the blocklist, the ledger has 0"):
        Loop(config_of(ours)).run()


def test_a_checkpoint_that_is_imported_from_a_run_brings_its_log_along(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(ours), stop_at=2).run()
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(theirs), at_step=lambda step: ask(theirs, mask(9, 10)) if step == 1 else None, stop_at=6).run()
    take_in(find(theirs / "checkpoints" / "s4-a1"), ours, run="alone")
    log = fold_blocks(read_ledger(theirs / "ledger.jsonl"))
    assert log.count == 1
    assert fold_blocks(read_ledger(ours / "ledger.jsonl")).heads == log.heads
    loop = Loop(config_of(ours))
    loop.run()
    assert isinstance(loop.points, Points)
    assert tuple(loop.points.blocks) == log.blocks
    assert [entry.fields["checkpoint"] for entry in entries(ours, "run.resumed")] == ["s4-a0"]
    take_in(find(theirs / "checkpoints" / "s4-a1"), ours, run="alone")
    assert fold_blocks(read_ledger(ours / "ledger.jsonl")).heads == log.heads  # once


def test_a_batch_without_a_live_token_changes_nothing_and_is_no_sign_of_illness(tmp_path: Path) -> None:
    undisturbed = Loop(config_of(tmp_path / "undisturbed"))
    undisturbed.run()
    loop = Loop(config_of(tmp_path / "run"))

    def at_step(step: int) -> None:
        if step == 1:
            ask(tmp_path / "run", mask(12, 24))  # three whole batches: more in a row than bad ones may be

    loop.at_step = at_step
    loop.run()
    assert loop.actions == [*["proceed"] * 3, *["skip"] * 3, *["proceed"] * 6]
    before, *empty, after = loop.states[2:7]
    for state in empty:
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in state)
    assert not all(torch.equal(after[name], before[name]) for name in after)
    assert all(torch.isfinite(tensor).all() for state in loop.states for tensor in state.values())
    skipped = entries(tmp_path / "run", "update.skipped")
    assert [(entry.rule, entry.step) for entry in skipped] == [("no_live_tokens", step) for step in (4, 5, 6)]
    rows = read_steps(tmp_path / "run").to_pydict()
    assert rows["step"] == list(range(1, 13))
    assert rows["num_live_tokens"][3:6] == [0, 0, 0]
    assert rows["loss"][3:6] == [0.0, 0.0, 0.0]


class Lossy(KnowingPoints):
    """Storage does not give back what the seventh step needs."""

    def __init__(self, error: DataError) -> None:
        super().__init__()
        self.error = error

    def __next__(self) -> tuple[torch.Tensor, int]:
        if self.next_sample == 24:
            raise self.error
        return super().__next__()


def meet(run_dir: Path, **values: Any) -> list[LedgerEntry]:
    """What is ledgered when a run meets such an error."""
    with pytest.raises(DataError, match="it is lost"):
        Loop(config_of(run_dir), points=Lossy(DataError("it is lost", where="shard", **values))).run()
    return entries(run_dir, "shard.quarantined")


def test_a_damaged_shard_is_ledgered_once_by_whoever_meets_it(tmp_path: Path) -> None:
    meet(tmp_path, kind="damaged-block", shard="web/00001", block=3)
    (entry,) = meet(tmp_path, kind="damaged-block", shard="web/00001", block=3)
    assert (entry.fields["shard"], entry.fields["block"], entry.step, entry.by) == ("web/00001", 3, 6, "rank 0")
    assert [found.fields["block"] for found in meet(tmp_path, kind="damaged-block", shard="web/00001", block=4)] == [3, 4]


@pytest.mark.parametrize("kind", sorted(SHARD_LOSSES))
def test_so_is_one_that_is_lost_in_another_way(kind: str, tmp_path: Path) -> None:
    meet(tmp_path, kind=kind, shard="web/00001")
    (entry,) = meet(tmp_path, kind=kind, shard="web/00001")
    assert (entry.fields["kind"], entry.reason) == (kind, "it is lost")


@pytest.mark.parametrize("values", [{}, {"kind": "missing"}, {"kind": "unreachable", "shard": "web/00001"}])
def test_another_error_of_the_data_is_no_lost_shard(values: dict[str, str], tmp_path: Path) -> None:
    assert not meet(tmp_path, **values)


def test_on_another_node_than_the_first_a_lost_shard_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GROUP_RANK", "1")
    assert not meet(tmp_path, kind="missing", shard="web/00001")
    assert "rank 0 is not on node 0, so the ledger will not say it: shard web/00001: shard: it is lost" in caplog.text


def test_a_process_that_keeps_the_run_folder_does_not_keep_a_rank_from_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_ledger(tmp_path, clock=ManualClock(), by="test")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        error = DataError("it is lost", kind="missing", shard="web/00001")
        note_lost_shard(error, run_dir=tmp_path, rank=1, generation=1, attempt=1, step=3, clock=ManualClock())
    finally:
        os.close(fd)
    assert "web/00001 could not be ledgered as lost" in caplog.text
    assert "another process has held it for 5 s" in caplog.text


def test_a_port_that_miscounts_is_named(tmp_path: Path) -> None:
    class Deaf(KnowingPoints):
        def block(self, block: Block) -> None:
            """Says that it did, and did not."""

    with pytest.raises(SurefootError, match=r"holds 0 entries of the blocklist .* was handed 1"):
        Loop(config_of(tmp_path), points=Deaf(), at_step=lambda step: ask(tmp_path, mask(9, 10)) if step == 1 else None).run()
    assert not taken(tmp_path)
