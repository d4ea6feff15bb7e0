"""Saves beside a loop: what they may not do to it, and what it learns of them."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.upload import Uploader
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import LedgerEntry, StepReport
from surefoot.core.sections import CheckpointSection, RunConfig, RunSection, ScheduleSection, TrainSection
from surefoot.guard import Guard
from surefoot.observe.ledger import read_ledger

WIDTH = 256  # 256 KiB of weights: too much to be copied at once


class Points:
    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 2
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(self.next_sample))

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


def no_hook(loop: Loop) -> None:
    pass


@dataclass
class Loop:
    """A loop with hooks at the places where something may go wrong; `step` is the one that is being made."""

    config: RunConfig
    fused: bool = True
    after_finish: Callable[[Loop], None] = no_hook
    after_judge: Callable[[Loop], None] = no_hook
    sick: tuple[int, ...] = ()
    on_model: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None
    reports: list[StepReport] = field(default_factory=list)

    def run(self) -> Loop:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=self.fused, foreach=not self.fused)
        self.on_model(self.model, self.optimizer)
        points = Points()
        with Guard(self.config, model=self.model, optimizer=self.optimizer, data=points) as guard:
            self.guard = guard
            guard.restore()
            while guard.begin():
                loss = self.model(next(points)).square().sum()
                loss.backward()
                if guard.step + 1 in self.sick:
                    self._gradient().fill_(torch.nan)
                if guard.judge(loss, 2).proceeds:
                    self.after_judge(self)
                    for parameter in self.model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(guard.clip_scale)
                    self.optimizer.step()
                    guard.applied()
                self.optimizer.zero_grad()
                self.reports.append(guard.finish())
                self.after_finish(self)
        return self

    def _gradient(self) -> torch.Tensor:
        gradient = self.model[0].weight.grad
        assert isinstance(gradient, torch.Tensor)
        return gradient

    def force_a_step(self) -> None:
        """What no loop should do between finish and judge; the guard is not told of it."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def digest(self) -> str:
        return str(self.entries("run.finished")[-1].fields["state_digest"])

    def entries(self, event: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(Path(str(self.config.run.dir)) / "ledger.jsonl") if entry.event == event]


def config_of(run_dir: Path, *, num_steps: int = 12, **checkpoint: Any) -> RunConfig:
    section: dict[str, Any] = {"interval_steps": 4, "keep_last": 20, "milestone_steps": 0, **checkpoint}
    return RunConfig(
        run=RunSection(name="saving", dir=str(run_dir)), train=TrainSection(num_steps=num_steps), checkpoint=CheckpointSection(**section)
    )


def digests(run_dir: Path) -> dict[str, str]:
    root = run_dir / "checkpoints"
    return {name: read_manifest(root / name).state_digest for name in published(root)}


class HeldUp:
    """Holds each staging thread up where it begins, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def go_on(self) -> None:
        self.may_go_on.set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if threading.current_thread().name.startswith("surefoot-staging"):
            assert self.may_go_on.wait(60)
        sys.setprofile(None)  # once per thread


@pytest.fixture
def staging() -> Iterator[HeldUp]:
    held_up = HeldUp()
    threading.setprofile(held_up)
    yield held_up
    threading.setprofile(None)
    held_up.go_on()


def test_a_save_beside_the_loop_holds_the_bits_of_one_that_stops_it(tmp_path: Path) -> None:
    beside, waiting = Loop(config_of(tmp_path / "beside")).run(), Loop(config_of(tmp_path / "waiting", overlap=False)).run()
    assert digests(tmp_path / "beside") == digests(tmp_path / "waiting")
    assert beside.digest == waiting.digest
    assert list(digests(tmp_path / "beside")) == ["s4-a1", "s8-a1", "s12-a1"]
    assert all(verify(tmp_path / "beside" / "checkpoints" / name) == [] for name in digests(tmp_path / "beside"))


def test_saves_do_not_touch_what_is_trained(tmp_path: Path) -> None:
    often = Loop(config_of(tmp_path / "often", interval_steps=1)).run()
    never = Loop(config_of(tmp_path / "never", interval_steps=0)).run()
    assert often.digest == never.digest


def test_an_update_waits_until_nothing_reads_the_live_tensors(tmp_path: Path, staging: HeldUp) -> None:
    seen: dict[int, bool] = {}

    def let_it_go_on_in_a_while(loop: Loop) -> None:
        if loop.guard.step == 4:
            threading.Timer(0.5, staging.go_on).start()

    def look(loop: Loop) -> None:
        seen[loop.guard.step + 1] = staging.may_go_on.is_set()

    loop = Loop(config_of(tmp_path), after_finish=let_it_go_on_in_a_while, after_judge=look).run()
    assert (seen[4], seen[5]) == (False, True)
    assert loop.reports[4].save_s > loop.reports[5].save_s  # the wait is told as time of the save
    assert loop.entries("snapshot.torn") == []


def test_a_skipped_update_waits_for_nothing(tmp_path: Path, staging: HeldUp) -> None:
    def look(loop: Loop) -> None:
        if loop.guard.step == 5:
            assert not staging.may_go_on.is_set()
            staging.go_on()

    skipping = Loop(config_of(tmp_path / "skipping"), sick=(5, 9), after_finish=look).run()
    assert [report.action for report in skipping.reports if report.step in (5, 9)] == ["skip", "skip"]
    Loop(config_of(tmp_path / "alone", overlap=False), sick=(5, 9)).run()
    assert digests(tmp_path / "skipping") == digests(tmp_path / "alone")


def test_a_commit_is_told_in_the_row_of_the_step_that_learned_of_it(tmp_path: Path) -> None:
    loop = Loop(config_of(tmp_path, num_steps=60, interval_steps=20)).run()
    committed = {str(entry.fields["id"]): int(str(entry.fields["step"])) for entry in loop.entries("checkpoint.committed")}
    told = {report.saved: report.step for report in loop.reports if report.saved}
    assert told["s60-a1"] == 60
    assert all(told[name] > committed[name] for name in told if name != "s60-a1")


# --- storage that gives back something else ---


class FlipsBits:
    """Flips a bit of the checkpoints of one step just before they are read back, the first `times` times."""

    def __init__(self, *, step: int, times: int) -> None:
        self.step, self.left = step, times

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name != "verify_files" or not self.left:
            return
        folder = frame.f_locals["path"]
        if folder.name.startswith(f"s{self.step}-"):
            self.left -= 1
            file = folder / "__0_0.distcp"
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)


@pytest.fixture
def disturb_read_backs() -> Iterator[Callable[[FlipsBits], None]]:
    yield lambda flips: threading.setprofile(flips)
    threading.setprofile(None)


def test_a_last_save_that_comes_back_damaged_is_saved_again(tmp_path: Path, disturb_read_backs: Callable[[FlipsBits], None]) -> None:
    disturb_read_backs(FlipsBits(step=12, times=1))
    loop = Loop(config_of(tmp_path)).run()
    assert [entry.fields["id"] for entry in loop.entries("checkpoint.damaged")] == ["s12-a1"]
    assert loop.entries("run.finished")[-1].fields["checkpoint"] == "s12-a1-r1"
    assert verify(tmp_path / "checkpoints" / "s12-a1-r1") == []


def test_a_run_whose_last_saves_all_come_back_damaged_is_not_finished(
    tmp_path: Path, disturb_read_backs: Callable[[FlipsBits], None]
) -> None:
    disturb_read_backs(FlipsBits(step=12, times=99))
    with pytest.raises(CheckpointError, match="storage gave back other bytes"):
        Loop(config_of(tmp_path)).run()
    loop = Loop(config_of(tmp_path))
    assert loop.entries("run.finished") == []
    assert verify(tmp_path / "checkpoints" / "s8-a1") == []


# --- torn ---


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_a_torn_snapshot_is_named_and_taken_again(tmp_path: Path, fused: bool, staging: HeldUp) -> None:
    def step_at_the_wrong_time(loop: Loop) -> None:
        if loop.guard.step == 4:
            loop.force_a_step()
            staging.go_on()

    loop = Loop(config_of(tmp_path, num_steps=8), fused=fused, after_finish=step_at_the_wrong_time).run()
    (torn,) = loop.entries("snapshot.torn")
    assert torn.fields["id"] == "s4-a1"
    assert torn.step in (5, 6)  # the next step, or the one after when the vector of the next was already on its way
    assert "changed while it was copied" in torn.reason
    committed = [str(entry.fields["id"]) for entry in loop.entries("checkpoint.committed")]
    assert committed[0] == f"s{torn.step}-a1"  # at once, from the state at that time
    assert sorted(committed) == published(tmp_path / "checkpoints")
    assert loop.entries("save.failed") == []


def test_without_the_forced_step_nothing_is_torn(tmp_path: Path, staging: HeldUp) -> None:
    loop = Loop(config_of(tmp_path), after_finish=lambda loop: staging.go_on() if loop.guard.step == 4 else None).run()
    assert loop.entries("snapshot.torn") == []
    assert str(loop.entries("checkpoint.committed")[0].fields["id"]) == "s4-a1"


def test_an_optimizer_in_the_backward_is_seen_and_its_saves_stop_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    caplog.set_level("INFO", logger="surefoot.progress")

    def change(loop: Loop) -> None:
        if loop.guard.step == 4:
            loop.force_a_step()

    loop = Loop(config_of(tmp_path), on_model=hook, after_finish=change).run()
    assert "saves are not overlapped" in caplog.text
    assert loop.entries("snapshot.torn") == []
    assert str(loop.entries("checkpoint.committed")[0].fields["id"]) == "s4-a1"


# --- what the caller's own code raises ---


@dataclass
class Raises:
    """A hook of the model's state_dict with a bug that shows once, when it is told to."""

    armed: bool = False

    def on_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.register_state_dict_post_hook(self)  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        if self.armed:
            self.armed = False
            raise ZeroDivisionError("a bug of the caller")


def test_a_bug_in_a_state_dict_is_a_failed_save_and_the_next_one_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raises = Raises()

    def arm(loop: Loop) -> None:
        raises.armed = loop.guard.step + 1 == 4

    loop = Loop(config_of(tmp_path, num_steps=8), on_model=raises.on_model, after_judge=arm).run()
    (failed,) = loop.entries("save.failed")
    assert "ZeroDivisionError: a bug of the caller" in failed.reason
    assert "Traceback" in caplog.text
    assert published(tmp_path / "checkpoints") == ["s5-a1", "s8-a1"]


def test_a_cursor_that_has_no_json_form_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Points, "cursor", lambda self: {"next_sample": self.next_sample, "seen": object()})
    config = config_of(tmp_path, num_steps=1000, interval_steps=4, save_grace_s=0.0, max_failed_saves=1, max_save_tries=1)
    with pytest.raises(CheckpointError, match="TypeError"):
        Loop(config).run()


# --- slots: the test is the uploader ---


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Slot]]:
    slots = [Slot.create(rank=0, number=number) for number in range(2)]
    names = {f"SUREFOOT_SLOT_0_{slot.number}": str(os.dup(slot.fd)) for slot in slots}  # who is handed them closes them
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUREFOOT_SLOTS", json.dumps([[0, slot.number, f"SUREFOOT_SLOT_0_{slot.number}"] for slot in slots]))
    yield slots
    for slot in slots:
        slot.close()


class ByHand:
    """Uploads only when it is told to; the last save of a run, for which the loop waits, in a thread."""

    def __init__(self, run_dir: Path, slots: list[Slot]) -> None:
        self.committed: list[str] = []
        self._over = threading.Event()
        self._uploader = Uploader(
            run_dir / "checkpoints", slots, limit_s=60, on_committed=lambda done: self.committed.append(done.manifest.id),
            on_read_back=lambda found: None,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run)

    def work(self) -> None:
        while self._uploader.step():
            pass

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self.work()
            self._over.wait(0.002)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come to that")


def test_without_a_free_slot_a_save_is_put_off_and_no_slot_is_taken_twice(tmp_path: Path, slots: list[Slot]) -> None:
    hand = ByHand(tmp_path, slots)
    seen: dict[int, list[str]] = {}

    def look(loop: Loop) -> None:
        step = loop.guard.step
        if step in (2, 4):
            wait_for(lambda: slots[step // 2 - 1].state() is SlotState.STAGED)
        seen[step] = [header.id for slot in slots if (header := slot.header())]
        if step == 9:
            hand.work()
        if step == 15:
            hand.start()

    try:
        Loop(config_of(tmp_path, num_steps=16, interval_steps=2), after_finish=look).run()
    finally:
        hand.end()
    assert seen[4] == seen[9] == ["s2-a1", "s4-a1"]  # what is staged stays until it is uploaded, whatever is due
    assert hand.committed[:2] == ["s2-a1", "s4-a1"]
    assert "s10-a1" in seen[10] + seen[11]  # the first step at which there is one again
    assert hand.committed[-1] == "s16-a1"


@pytest.mark.parametrize(("milestone_steps", "warmup_steps"), [(10, 0), (0, 10)], ids=["milestone", "end of the warm-up"])
def test_a_save_of_a_step_that_is_kept_for_good_waits_for_a_slot(
    tmp_path: Path, slots: list[Slot], milestone_steps: int, warmup_steps: int
) -> None:
    """Slots are full since step 4, and the saves of 6 and 8 were put off; at 10 the loop waits until there is one again."""
    hand = ByHand(tmp_path, slots)

    def fill(loop: Loop) -> None:
        if loop.guard.step in (2, 4):
            wait_for(lambda: slots[loop.guard.step // 2 - 1].state() is SlotState.STAGED)

    def free(loop: Loop) -> None:
        if loop.guard.step + 1 == 10:  # what all ranks say of this step is said: no slot is free
            assert hand.committed == []
            hand.start()

    config = config_of(tmp_path, num_steps=12, interval_steps=2, milestone_steps=milestone_steps)
    config = replace(config, schedule=ScheduleSection(warmup_steps=warmup_steps))
    try:
        loop = Loop(config, after_finish=fill, after_judge=free).run()
    finally:
        hand.end()
    assert hand.committed == ["s2-a1", "s4-a1", "s10-a1", "s12-a1"]
    assert {report.saved for report in loop.reports if report.step == 10} == {"s10-a1"}
    assert loop.entries("save.failed") == []


def test_a_rank_hears_from_its_slot_that_the_uploader_failed(tmp_path: Path, slots: list[Slot]) -> None:
    hand = ByHand(tmp_path, slots)
    in_the_way = tmp_path / "checkpoints"
    in_the_way.write_text("")

    def look(loop: Loop) -> None:
        step = loop.guard.step
        if step == 4:
            wait_for(lambda: slots[0].state() is SlotState.STAGED)
            hand.work()
            in_the_way.unlink()
        if step == 5:
            assert [entry.step for entry in loop.entries("save.failed")] == [5]  # the very next step
            hand.start()

    try:
        loop = Loop(config_of(tmp_path, num_steps=8, interval_steps=4), after_finish=look).run()
    finally:
        hand.end()
    assert "File exists" in loop.entries("save.failed")[0].reason
    assert hand.committed[0] == "s5-a1"


def test_a_slot_is_not_filled_again_before_all_ranks_know_what_became_of_it(tmp_path: Path, slots: list[Slot]) -> None:
    """The second of two saves is committed first: what it was must not be forgotten over a third one."""
    first, second = ByHand(tmp_path, slots[:1]), ByHand(tmp_path, slots[1:])

    def look(loop: Loop) -> None:
        step = loop.guard.step
        if step in (2, 4):
            wait_for(lambda: slots[step // 2 - 1].state() is SlotState.STAGED)
        if step == 4:
            second.work()
        if step == 8:
            first.work()
        if step == 11:
            first.start()
            second.start()

    try:
        loop = Loop(config_of(tmp_path, num_steps=16, interval_steps=2), after_finish=look).run()
    finally:
        first.end()
        second.end()
    assert loop.entries("save.failed") == []
    assert {"s2-a1", "s4-a1"} <= {report.saved for report in loop.reports}


def test_a_run_does_not_go_on_unsaved_when_no_slot_comes_back(tmp_path: Path, slots: list[Slot]) -> None:
    """The uploader is gone for good, with all slots in its hands."""
    config = config_of(
        tmp_path, num_steps=1_000_000, interval_steps=4, upload_limit_s=1.0, save_grace_s=0.0, max_failed_saves=2, max_save_tries=2
    )
    began_s = time.monotonic()

    def look(loop: Loop) -> None:
        assert time.monotonic() < began_s + 20, "it goes on unsaved"

    with pytest.raises(CheckpointError, match="no slot is free"):
        Loop(config, after_finish=look).run()


def test_an_uploader_that_does_nothing_is_a_failed_save_after_the_limit(tmp_path: Path, slots: list[Slot]) -> None:
    config = config_of(
        tmp_path, num_steps=100_000, interval_steps=4, upload_limit_s=1.0, save_grace_s=0.0, max_failed_saves=1, max_save_tries=1
    )
    with pytest.raises(CheckpointError, match="not committed after 1 s"):
        Loop(config).run()


def test_damage_that_the_read_back_finds_asks_for_a_save_at_once(tmp_path: Path, slots: list[Slot]) -> None:
    hand = ByHand(tmp_path, slots)

    def look(loop: Loop) -> None:
        if loop.guard.step == 4:
            wait_for(lambda: slots[0].state() is SlotState.STAGED)
            while not hand.committed:
                hand._uploader.step()
            file = tmp_path / "checkpoints" / "s4-a1" / "__0_0.distcp"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
            hand.work()
            hand.start()

    try:
        loop = Loop(config_of(tmp_path, num_steps=12, interval_steps=1000), after_finish=look)
        loop.config = replace(loop.config, checkpoint=replace(loop.config.checkpoint, milestone_steps=4))
        loop.run()
    finally:
        hand.end()
    assert any(name in hand.committed for name in ("s6-a1", "s7-a1"))


# --- memory ---


def test_memory_does_not_grow_over_many_saves(tmp_path: Path) -> None:
    process = psutil.Process()
    used: dict[int, int] = {}

    def look(loop: Loop) -> None:
        used[loop.guard.step] = process.memory_info().rss

    Loop(config_of(tmp_path, num_steps=70, interval_steps=1, keep_last=2), after_finish=look).run()
    grown = used[69] - used[19]
    assert grown < 6 << 20, f"{grown} bytes in 50 saves"


def test_host_copies_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(ConfigError, match="host_fraction"):
        Loop(config_of(tmp_path)).run()


def test_one_slot_is_enough(tmp_path: Path) -> None:
    loop = Loop(config_of(tmp_path, num_steps=40, interval_steps=2, num_slots=1)).run()
    assert loop.entries("save.failed") == []
    assert len(loop.entries("checkpoint.committed")) > 1


def test_a_file_limit_of_the_shell_is_named_when_it_keeps_memory_away(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(CheckpointError, match="no memory for a host copy: File too large"):
            Loop(config_of(tmp_path, num_steps=8)).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert published(tmp_path / "checkpoints") == []
