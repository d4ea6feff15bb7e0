"""The guard around a small foreign loop in this process: no agent, no peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.object_store import ObjectStore
from surefoot.checkpoint.remote import copy_checkpoint
from surefoot.checkpoint.verify import extras_of
from surefoot.config import load_config
from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError, Incompatible, SurefootError, TrainingHalted
from surefoot.core.events import Event
from surefoot.core.records import HeldOutLoss, Leave
from surefoot.core.sections import AlertsSection, CheckpointSection, HealSection, OptimizerSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.guard.capabilities import missing_capabilities
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.metrics import read_steps


class Points:
    def __init__(self, *, noise: int = 0) -> None:
        self.next_sample = 0
        self._noise = noise

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 4
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.next_sample + self._noise))

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


@dataclass
class Loop:
    """Somebody's loop: a linear model, SGD with a schedule; `sick` steps have a gradient that is not finite."""

    config: RunConfig
    sick: tuple[int, ...] = ()
    with_schedule: bool = True
    stop_at: int = 1_000_000
    noise: int = 0
    at_step: Callable[[int], object] = lambda step: None
    stop_when: Callable[[], bool] = lambda: False
    rates: list[float] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    def run(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        points = Points(noise=self.noise)
        extra = {"schedule": schedule} if self.with_schedule else {}
        with Guard(self.config, model=model, optimizer=optimizer, data=points, extra=extra) as guard:
            guard.restore()
            while guard.begin():
                loss = model(next(points)).square().sum()
                loss.backward()
                if guard.step + 1 in self.sick and model.weight.grad is not None:
                    model.weight.grad.fill_(torch.nan)
                if guard.judge(loss, 4).proceeds:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(guard.clip_scale)
                    optimizer.step()
                    guard.applied()
                optimizer.zero_grad()
                schedule.step()
                self.rates.append(optimizer.param_groups[0]["lr"])
                self.actions.append(guard.finish().action)
                self.at_step(guard.step)
                if guard.step == self.stop_at or self.stop_when():
                    raise KeyboardInterrupt
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def config_of(run_dir: Path, *, num_steps: int = 20, max_grad_norm: float = 1.0) -> RunConfig:
    return RunConfig(
        run=RunSection(name="alone", dir=str(run_dir)),
        train=TrainSection(num_steps=num_steps),
        optimizer=OptimizerSection(max_grad_norm=max_grad_norm),
        checkpoint=CheckpointSection(interval_steps=5),
        heal=HealSection(
            rollback="off", rules=(("outlier_loss", "record"), ("outlier_loss_and_norm", "record"))
        ),  # a toy whose loss is no language's,
    )


def events(run_dir: Path) -> list[str]:
    return [entry.event for entry in read_ledger(run_dir / "ledger.jsonl")]


def test_a_schedule_handed_over_as_extra_goes_on_where_it_was(tmp_path: Path) -> None:
    undisturbed = Loop(config_of(tmp_path / "undisturbed"))
    weights = undisturbed.run()
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path / "run"), stop_at=12).run()
    resumed = Loop(config_of(tmp_path / "run"))
    again = resumed.run()
    assert resumed.rates == undisturbed.rates[10:]
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    whole, resumed_state = (monitor_state(tmp_path / name) for name in ("undisturbed", "run"))
    assert whole["detectors"]["signals"]  # the ratio of the update before the checkpoint is in it once
    assert resumed_state["detectors"] == whole["detectors"]
    assert resumed_state["late"] == whole["late"]


def monitor_state(run_dir: Path) -> dict[str, Any]:
    """Of the last checkpoint."""
    path = run_dir / "checkpoints" / fold_lineage(read_ledger(run_dir / "ledger.jsonl")).refs[-1].id
    monitor = extras_of(path, read_manifest(path))["monitor"]
    assert isinstance(monitor, dict)
    return monitor


def test_a_parameter_of_no_model_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(config_of(tmp_path), model=model, optimizer=optimizer, data=Points()) as guard:
        guard.restore()
        guard.begin()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
        with pytest.raises(Incompatible, match=r"1 parameters that the model had not .*\(3, 2\)"):
            guard.judge(model(torch.ones(1, 8)).sum(), 4)


def test_what_is_trained_only_later_is_of_its_own_group(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Guard(config_of(tmp_path), model=model, optimizer=optimizer, data=Points()) as guard:
        guard.restore()
        guard.begin()
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        loss = model(torch.ones(1, 8)).sum()
        loss.backward()
        assert guard.judge(loss, 4).proceeds
        report = guard.finish()
        assert all(norm > 0 for norm in report.group_norms.values())
        assert list(report.group_norms) == ["0", "1"]


def test_other_extra_than_was_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=7).run()
    with pytest.raises(Incompatible, match=r"\['schedule'\].*\[\]"):
        Loop(config_of(tmp_path), with_schedule=False).run()


def test_the_folder_of_a_foreign_loop_is_a_run(tmp_path: Path) -> None:
    Loop(config_of(tmp_path)).run()
    assert load_config(tmp_path).config.train.num_steps == 20
    assert events(tmp_path)[:2] == ["run.created", "attempt.started"]
    assert not (tmp_path / "lock").exists()


def test_the_breaker_holds_until_it_is_released_and_what_it_saved_is_suspect(tmp_path: Path) -> None:
    loop = Loop(config_of(tmp_path), sick=(7, 8, 9))
    with pytest.raises(SystemExit, match="6"):
        loop.run()
    assert loop.actions[-3:] == ["skip", "skip", "pause"]
    assert read_steps(tmp_path).to_pydict()["action"][-1] == "pause"
    refs = {ref.id: ref.suspect for ref in fold_lineage(read_ledger(tmp_path / "ledger.jsonl")).refs}
    assert refs == {"s5-a1": False, "s9-a1": True}
    with pytest.raises(TrainingHalted, match="halted at step 9 by breaker"):
        Loop(config_of(tmp_path)).run()
    entries = read_ledger(tmp_path / "ledger.jsonl")
    from surefoot.core.clock import SystemClock

    ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="a person")
    ledger.append(Event.RUN_RELEASED, generation=entries[-1].generation, attempt=1, step=8, reason="found it")
    Loop(config_of(tmp_path)).run()
    assert events(tmp_path)[-1] == "run.finished"
    resumed = [entry.fields["checkpoint"] for entry in read_ledger(tmp_path / "ledger.jsonl") if entry.event == "run.resumed"]
    assert resumed == ["s5-a1"]


def test_another_config_is_refused_whichever_checkpoint_loads(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=12).run()
    with pytest.raises(ConfigError, match=r"\[optimizer\]"):
        Loop(config_of(tmp_path, max_grad_norm=2.0)).run()
    manifest = tmp_path / "checkpoints" / "s10-a1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"s5-a1.*\[optimizer\]"):
        Loop(config_of(tmp_path, max_grad_norm=2.0)).run()


def test_methods_out_of_order_are_errors_that_say_so(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    with Guard(config_of(tmp_path), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=Points()) as guard:
        with pytest.raises(SurefootError, match="begin was called before restore"):
            guard.begin()
        guard.restore()
        guard.begin()
        with pytest.raises(SurefootError, match="finish was called before judge"):
            guard.finish()
        with pytest.raises(SurefootError, match="no clip scale"):
            _ = guard.clip_scale


def test_a_published_checkpoint_that_nobody_ledgered_is_adopted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=12).run()
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    said = next(number for number, line in enumerate(lines) if b"s10-a1" in line)
    assert b"checkpoint.committed" in lines[said]
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines[:said]))  # as if killed between publishing and saying so
    Loop(config_of(tmp_path)).run()
    entries = read_ledger(tmp_path / "ledger.jsonl")
    adopted = [entry.fields["id"] for entry in entries if entry.event == "checkpoint.adopted"]
    resumed = [entry.fields["checkpoint"] for entry in entries if entry.event == "run.resumed"]
    assert (adopted, resumed) == (["s10-a1"], ["s10-a1"])


def test_leaving_is_falsy_and_going_on_is_not() -> None:
    assert not Leave(75, "told to")


def test_what_a_loop_goes_without_is_said_line_by_line() -> None:
    model = nn.Linear(2, 2)
    config = RunConfig(alerts=AlertsSection(command="true"))
    lines = missing_capabilities(config, model=model, data=Points(), evaluation=None, extra={}, world_size=1, under_agent=False)
    assert [line.split(":")[0] for line in lines] == [
        "no held-out loss and no canary",
        "an ill step is skipped at once",
        "`surefoot replay` cannot do these steps again",
        "no document can be skipped, blocked or located",
        "learning-rate schedules and averages are not saved",
        "nobody outside this process watches it",
        "no alerts",
    ]
    able = missing_capabilities(
        RunConfig(), model=model, data=Points(), evaluation=HeldOut(), extra={"a": model}, world_size=1, under_agent=True, can_redo=True
    )
    assert [line.split(":")[0].split(",")[0] for line in able] == [
        "no canary",
        "`surefoot replay` cannot do these steps again",
        "no document can be skipped",
    ]
    has = {"model": model, "data": Points(), "evaluation": None, "extra": {}, "under_agent": True, "recompute": Recomputes()}
    said = {repeats: missing_capabilities(RunConfig(), **has, world_size=2, repeats_bits=repeats) for repeats in (True, False)}  # type: ignore[arg-type]
    assert [line for line in said[False] if line not in said[True]] == [
        "a rank that computes wrongly is not found where nothing is replicated: kernels may give other bits each time "
        "(numerics.deterministic = false), so audits compare no gradient"
    ]


class HeldOut:
    def held_out(self) -> HeldOutLoss | None:
        return None


class Half:
    """A port that somebody began."""

    def next_sample(self) -> int:
        return 0

    def __next__(self) -> None: ...

    def seek(self, cursor: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("handed", "says"),
    [
        ({"data": None}, r"data=.*NoneType has no method __next__ .*next_sample .*cursor .*seek "),
        (
            {"data": Half()},
            r"data=...\): Half has no attribute or property next_sample \(the global index.*no method cursor \(one small.*docs/guard",
        ),
        ({"evaluation": Half()}, r"evaluation=.*Half has no method held_out"),
        ({"recompute": Half()}, r"recompute=.*no method gradient_digest"),
        ({"gauges": Half()}, r"gauges=.*no method begin.*squared_local_norm.*times_s"),
        ({"scaler": Half()}, r"scaler=.*property scale .*at_minimum.*update.*state_dict"),
        ({"extra": {"average": Half()}}, r"extra\['average'\]=.*no method state_dict.*load_state_dict"),
    ],
    ids=["no data", "data", "evaluation", "recompute", "gauges", "scaler", "extra"],  # the same in every process
)
def test_what_lacks_a_part_is_refused_before_anything_is_written(tmp_path: Path, handed: dict[str, Any], says: str) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=says):
        Guard(config_of(tmp_path / "run"), **{"model": model, "optimizer": optimizer, "data": Points(), **handed})
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_nothing_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    with pytest.raises(ConfigError, match="optimizer has no parameters"):
        Guard(config_of(tmp_path / "run"), model=nn.Linear(8, 1), optimizer=optimizer, data=Points())
    assert not (tmp_path / "run").exists()


def test_a_skipped_step_is_said_and_that_no_rate_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "surefoot.progress")
    Loop(config_of(tmp_path), sick=(7,)).run()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and "skipped" in record.getMessage()] == [
        "step 7: the update was skipped (nonfinite): the gradient of 1 tensors is not finite"
    ]
    assert sum("judge is given no lr=" in record.getMessage() for record in caplog.records) == 1


class Recomputes:
    def gradient_digest(self, *, shift: int) -> int:
        return shift


class FullDisk:
    """The checkpoints folder as a file: no save can be made."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "checkpoints"
        self.path.write_text("in the way")


def failed_saves(run_dir: Path) -> list[int]:
    """The number of each try at its save point."""
    return [int(str(entry.fields["retry"])) for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event == "save.failed"]


def test_one_save_point_may_fail_and_the_second_in_a_row_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FullDisk(tmp_path)
    config = config_of(tmp_path, num_steps=100_000)
    loop = Loop(replace(config, checkpoint=replace(config.checkpoint, save_grace_s=0.0)))
    with pytest.raises(SurefootError, match="File exists") as raised:
        loop.run()
    assert raised.value.exit_code == 5
    assert 5 < len(loop.actions) < 100_000
    assert failed_saves(tmp_path) == [0, 1, 2, 0, 1, 2]
    said = [record.getMessage() for record in caplog.records if record.name == "surefoot.progress"]
    assert sum("failed" in line and "File exists" in line for line in said) == 6  # once each, on the console


def test_a_ledger_that_takes_no_more_lines_ends_the_run_as_a_save_that_cannot_be_made(tmp_path: Path) -> None:
    """What a step decided must be in it; the next start goes on from the newest checkpoint."""

    def take_the_ledger_away(step: int) -> None:
        if step == 7:
            (tmp_path / "ledger.jsonl").rename(tmp_path / "kept")
            (tmp_path / "ledger.jsonl").mkdir()  # as good as a full disk

    with pytest.raises(SurefootError, match="could not open the ledger") as raised:
        Loop(config_of(tmp_path, num_steps=12), at_step=take_the_ledger_away).run()
    assert raised.value.exit_code == 5
    assert str(tmp_path / "ledger.jsonl") in str(raised.value)
    assert "check the disk" in str(raised.value)


def test_failed_saves_do_not_end_the_run_within_the_grace(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path)

    def free_the_disk(step: int) -> None:
        if disk.path.is_file() and len(failed_saves(tmp_path)) > 6:
            disk.path.unlink()

    loop = Loop(config_of(tmp_path, num_steps=100_000), at_step=free_the_disk, stop_when=lambda: "checkpoint.committed" in events(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert not disk.path.is_file()


def test_auto_measures_and_says_from_what_it_chose(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_steps=900)
    Loop(replace(config, checkpoint=CheckpointSection(interval_steps="auto", milestone_steps=0))).run()
    entries = read_ledger(tmp_path / "ledger.jsonl")
    saved = [entry.fields["id"] for entry in entries if entry.event == "checkpoint.committed"]
    assert saved == ["s500-a1", "s900-a1"]  # 500 until it has measured; then far less often, for a save costs milliseconds here
    (tuned,) = [entry for entry in entries if entry.event == "interval.tuned"]
    assert tuned.fields["before"] == 500
    assert int(str(tuned.fields["steps"])) > 900
    assert {"step_s", "stall_s", "write_s", "num_failures", "mtbf_s"} < tuned.fields.keys()


def test_a_number_is_never_tuned(tmp_path: Path) -> None:
    Loop(config_of(tmp_path)).run()
    assert "interval.tuned" not in events(tmp_path)


def test_a_foreign_loop_repeats_what_was_recorded(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=9).run()
    Loop(config_of(tmp_path)).run()
    entries = read_ledger(tmp_path / "ledger.jsonl")
    (verified,) = [entry for entry in entries if entry.event == "replay.verified"]
    assert (verified.fields["checkpoint"], verified.fields["num_steps"], verified.fields["mode"]) == ("s5-a1", 4, "bits")


def test_a_foreign_loop_goes_back_where_its_record_differs(tmp_path: Path) -> None:
    """Data that changed without its cursor telling: every replay differs beyond the tolerance, and a person must look."""
    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path), stop_at=14).run()
    with pytest.raises(SystemExit, match="6"):
        Loop(config_of(tmp_path), noise=5).run()
    entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry.fields["checkpoint"] for entry in entries if entry.event == "attempt.started"] == [None, "s10-a1", "s5-a1"]
    assert [entry.event for entry in entries if entry.event.startswith("replay.")] == ["replay.differed", "replay.differed"]
    assert entries[-1].event == "run.halted"
    assert "no checkpoint repeats" in entries[-1].reason


@pytest.mark.parametrize(("copied_from", "resumed_from"), [("run", "s10-a1"), ("other", "s5-a1")])
def test_a_damaged_one_is_mended_from_a_copy_of_it_and_of_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, copied_from: str, resumed_from: str
) -> None:
    for name, noise in (("run", 0), ("other", 1)):
        with pytest.raises(KeyboardInterrupt):
            Loop(config_of(tmp_path / name), stop_at=12, noise=noise).run()
    there = tmp_path / "there"
    there.mkdir()
    store = ObjectStore.open(f"file://{there}")
    copy_checkpoint(tmp_path / copied_from / "checkpoints" / "s10-a1", store)
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl", clock=SystemClock(), by="mirror")
    newest = read_ledger(ledger.path)[-1]
    ledger.append(
        Event.CHECKPOINT_COPIED,
        generation=newest.generation,
        attempt=1,
        step=12,
        fields={"id": "s10-a1", "tier": f"file://{there}"},
    )
    damaged = tmp_path / "run" / "checkpoints" / "s10-a1" / "manifest.json"
    damaged.write_bytes(b"damaged")

    with pytest.raises(KeyboardInterrupt):
        Loop(config_of(tmp_path / "run"), stop_at=13).run()
    resumed = [entry.fields["checkpoint"] for entry in read_ledger(ledger.path) if entry.event == "run.resumed"]
    assert resumed == [resumed_from]
    assert (f"s10-a1 is not taken from file://{there}" in caplog.text) == (copied_from == "other")
    assert (damaged.read_bytes() == b"damaged") == (copied_from == "other")
