from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.core import strict_json
from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.holder import Holder, LockRecord, this_process
from surefoot.core.records import StepReport
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.live import LiveRecord, RankLive, write_live
from surefoot.observe.metrics import MetricsWriter, compact
from surefoot.report.status import status_of

SPEC_KEYS = {
    *("run", "phase", "step", "attempt", "tokens", "loss", "val_loss", "state_digest", "finished", "verdict"),
    *("last_checkpoint", "last_step_age_s", "goodput", "mfu", "eta_s", "last_exercised"),
}


class Run:
    """A run folder that is filled by the parts that fill a real one."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = ManualClock()
        self._ledger = Ledger(run_dir / "ledger.jsonl", clock=self.clock, by="rank 0")
        self.generation = 1
        self.attempt = 1
        self.step = 0
        self._metrics = MetricsWriter(run_dir, generation=1, clock=self.clock)
        (run_dir / "config.toml").write_text('[run]\nname = "quick"\n[train]\nnum_steps = 100\n')
        self.tell(Event.GENERATION_STARTED, world_size=2)
        self.tell(Event.ATTEMPT_STARTED, checkpoint=None)

    def tell(self, event: Event, **fields: object) -> None:
        self._ledger.append(event, generation=self.generation, attempt=self.attempt, step=self.step, fields=fields)

    def train(self, last: int, **given: object) -> None:
        """Steps up to `last`, one every two seconds."""
        while self.step < last:
            self.step += 1
            self.clock.sleep(2.0)
            self._metrics.write(make_report(self.step, attempt=self.attempt, generation=self.generation, **given))

    def commit(self, parent: str | None) -> str:
        name = f"s{self.step}-a{self.attempt}"
        fields = {"id": name, "step": self.step, "attempt": self.attempt, "parent": parent, "state_digest": f"d-{name}", "num_bytes": 1}
        self.tell(Event.CHECKPOINT_COMMITTED, **fields)
        return name

    def resume(self, checkpoint: str, *, step: int) -> None:
        self.generation, self.attempt, self.step = self.generation + 1, self.attempt + 1, step
        self._metrics = MetricsWriter(self.run_dir, generation=self.generation, clock=self.clock)
        self.tell(Event.GENERATION_STARTED, world_size=2)
        self.tell(Event.ATTEMPT_STARTED, checkpoint=checkpoint)
        self.tell(Event.RUN_RESUMED, checkpoint=checkpoint)

    def hold(self, holder: Holder | None = None, *, phase: str = "step") -> None:
        """As a live agent would."""
        holder = holder or this_process()
        lock = LockRecord("j", holder, self.generation, self.clock.utc(), 30.0)
        (self.run_dir / "lock").write_text(strict_json.dumps(lock.as_json()))
        ranks = tuple(RankLive(rank, 100 + rank, phase, self.step, 0.1) for rank in range(2))
        write_live(
            self.run_dir,
            LiveRecord(holder.pid, holder.host, self.generation, self.attempt, phase, self.step, ranks, self.clock.utc(), 0),
        )

    def status(self) -> dict[str, Any]:
        return status_of(self.run_dir, clock=self.clock)


def make_report(step: int, **given: object) -> StepReport:
    values: dict[str, object] = {
        **dict.fromkeys(("clip_scale", "step_s", "data_wait_s", "forward_backward_s", "exchange_s", "update_s", "save_s"), 0.0),
        **dict.fromkeys(("evaluate_s", "tokens_per_s", "cpu_s", "grad_norm", "lr"), 0.0),
        **{"step": step, "loss": 5.0 - step / 100, "num_live_tokens": 10, "tokens": 10 * step, "action": "proceed", "next_sample": step},
    }
    return StepReport(**{**values, **given})  # type: ignore[arg-type]  # values are given by name


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_live_run(run: Run) -> None:
    run.train(20, val_loss=None)
    run.train(21, val_loss=4.9)
    run.commit(None)
    run.train(40)
    run.hold()
    run.clock.sleep(3.0)
    status = run.status()
    assert set(status) >= SPEC_KEYS
    assert (status["run"], status["phase"], status["step"], status["attempt"], status["tokens"]) == ("quick", "step", 40, 1, 400)
    assert (status["loss"], status["val_loss"], status["verdict"], status["finished"]) == (pytest.approx(4.6), 4.9, "healthy", False)
    assert status["state_digest"] == "d-s21-a1"
    looks = {"read_back": False, "damaged": False}
    assert status["last_checkpoint"] == {"id": "s21-a1", "step": 21, "rung": "committed", **looks, "suspect": False}
    assert (status["last_step_age_s"], status["eta_s"]) == (pytest.approx(3.0), pytest.approx(120.0))
    assert (status["goodput"], status["mfu"], status["last_exercised"]) == (None, None, None)
    assert (status["pid"], status["host"], status["num_restarts"]) == (os.getpid(), os.uname().nodename, 0)
    assert status["ranks"][1] == {"rank": 1, "pid": 101, "phase": "step", "step": 40, "age_s": 0.1}
    assert status["problems"] == []


def test_a_killed_run_is_stopped_and_keeps_its_last_step(run: Run) -> None:
    run.train(30)
    here = this_process()
    run.hold(replace(here, pid_start_time=here.pid_start_time + 1))
    status = run.status()
    assert (status["phase"], status["step"], status["pid"], status["eta_s"], status["ranks"]) == ("stopped", 30, None, None, [])
    assert (status["state_digest"], status["last_checkpoint"]) == (None, None)


def test_a_run_on_another_host_is_live_while_its_lease_lasts(run: Run) -> None:
    run.train(5)
    run.hold(replace(this_process(), host="elsewhere"))
    assert (run.status()["phase"], run.status()["host"]) == ("step", "elsewhere")
    run.clock.sleep(31.0)
    assert run.status()["phase"] == "stopped"


def test_a_resume_goes_back_to_the_step_of_its_checkpoint(run: Run) -> None:
    run.train(20)
    name = run.commit(None)
    run.train(35)
    run.resume(name, step=20)
    status = run.status()
    assert (status["step"], status["attempt"], status["tokens"], status["num_restarts"]) == (20, 2, 200, 1)
    assert status["last_checkpoint"]["rung"] == "loadable"
    run.train(22, loss=1.0)
    status = run.status()
    assert (status["step"], status["loss"], status["tokens"]) == (22, 1.0, 220)


def test_while_ranks_restore_the_step_is_not_theirs_yet(run: Run) -> None:
    run.train(20)
    name = run.commit(None)
    run.resume(name, step=20)
    run.step = 0
    run.hold(phase="restore")
    assert (run.status()["phase"], run.status()["step"]) == ("restore", 20)


def test_the_digest_is_that_of_the_line_and_not_of_the_highest_step(run: Run) -> None:
    run.train(10)
    first = run.commit(None)
    run.train(20)
    run.commit(first)
    run.attempt, run.step = 2, 10
    run.tell(Event.RUN_ROLLED_BACK, checkpoint=first)
    assert run.status()["state_digest"] == "d-s10-a1"


def test_a_finished_run(run: Run) -> None:
    run.train(100)
    run.commit(None)
    run.tell(Event.RUN_FINISHED, state_digest="d-s100-a1", checkpoint="s100-a1")
    status = run.status()
    assert (status["finished"], status["phase"], status["step"], status["eta_s"]) == (True, "stopped", 100, 0.0)


def test_a_finished_run_that_goes_on_is_not_finished(run: Run) -> None:
    run.train(100)
    name = run.commit(None)
    run.tell(Event.RUN_FINISHED)
    run.resume(name, step=100)
    assert run.status()["finished"] is False


def test_a_halted_run_is_bad_until_it_is_released(run: Run) -> None:
    run.train(10)
    run.tell(Event.RUN_HALTED)
    assert run.status()["verdict"] == "bad"
    run.tell(Event.RUN_RELEASED)
    assert run.status()["verdict"] == "healthy"


def test_a_halted_run_says_so(run: Run) -> None:
    run.train(10)
    assert run.status()["halted"] is None
    run.tell(Event.RUN_HALTED)
    halted = run.status()["halted"]
    assert (halted["step"], set(halted)) == (10, {"state", "step", "rule", "by", "reason", "time_utc"})
    run.tell(Event.RUN_RELEASED)
    assert run.status()["halted"] is None


def test_a_pause_is_bad_where_policy_paused_and_not_where_a_person_did(run: Run) -> None:
    run.train(10)
    run.tell(Event.RUN_PAUSED, by="ada@host")
    assert (run.status()["verdict"], run.status()["halted"]["step"]) == ("healthy", 10)
    run.tell(Event.RUN_RELEASED)
    run.tell(Event.RUN_PAUSED)
    assert run.status()["verdict"] == "bad"


def test_an_open_episode_is_suspect(run: Run) -> None:
    run.train(10)
    run.tell(Event.EPISODE_OPENED, onset_step=8, rule="sustained_loss")
    episode = run.status()["episode"]
    assert (run.status()["verdict"], episode["onset_step"], episode["rule"]) == ("suspect", 8, "sustained_loss")
    assert episode["id"].startswith("e")
    run.tell(Event.EPISODE_CLOSED, episode=episode["id"])
    assert (run.status()["verdict"], run.status()["episode"]) == ("healthy", None)


def test_mfu_is_the_median_of_the_newest_steps_of_this_attempt(run: Run) -> None:
    run.train(10, mfu=0.1)
    name = run.commit(None)
    assert run.status()["mfu"] == 0.1
    run.resume(name, step=10)
    run.train(13, mfu=0.4)
    run.train(14, mfu=0.01)
    assert run.status()["mfu"] == 0.4
    run.resume(name, step=10)
    run.train(11)
    assert run.status()["mfu"] is None


def test_a_retired_checkpoint_is_never_named(run: Run) -> None:
    run.train(10)
    first = run.commit(None)
    run.train(20)
    second = run.commit(first)
    run.tell(Event.CHECKPOINT_RETIRED, id=second)
    assert (run.status()["last_checkpoint"]["id"], run.status()["state_digest"]) == (first, f"d-{first}")
    run.tell(Event.CHECKPOINT_RETIRED, id=first)
    assert (run.status()["last_checkpoint"], run.status()["prover"]["newest_loaded"]) == (None, None)


def test_the_lag_of_the_prover(run: Run) -> None:
    assert run.status()["prover"] == {"newest_loaded": None, "newest_proven": None, "lag_checkpoints": 0, "lag_steps": None}
    names: list[str] = []
    for last in (10, 20, 30):
        run.train(last)
        names.append(run.commit(names[-1] if names else None))
    assert run.status()["prover"] == {"newest_loaded": None, "newest_proven": None, "lag_checkpoints": 3, "lag_steps": None}
    run.tell(Event.CHECKPOINT_PROVEN, id=names[0])
    run.tell(Event.CHECKPOINT_LOADED, id=names[1])
    assert run.status()["prover"] == {"newest_loaded": names[1], "newest_proven": names[0], "lag_checkpoints": 1, "lag_steps": 10}


def test_a_skipped_update_is_suspect(run: Run) -> None:
    run.train(10)
    run.train(11, action="skip", loss=float("nan"))
    assert run.status()["verdict"] == "suspect"
    assert "NaN" not in strict_json.dumps(run.status())


def test_compacted_metrics_tell_the_same(run: Run) -> None:
    run.train(20)
    name = run.commit(None)
    run.resume(name, step=20)
    before = run.status()
    compact(run.run_dir)
    assert run.status() == before


def test_a_run_that_is_being_made(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    status = status_of(tmp_path, clock=ManualClock())
    assert set(status) >= SPEC_KEYS
    assert (status["run"], status["phase"], status["step"], status["attempt"], status["tokens"]) == (tmp_path.name, "stopped", 0, 0, 0)
    assert (status["loss"], status["finished"], status["last_step_age_s"]) == (None, False, None)


@pytest.mark.parametrize(("folder", "words"), [("gone", "no such run folder"), (".", "not a run")])
def test_what_is_no_run_is_bad_usage(tmp_path: Path, folder: str, words: str) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=words) as caught:
        status_of(tmp_path / folder)
    assert caught.value.hint


def test_a_pause_of_a_live_run_says_who_and_is_no_halt(run: Run) -> None:
    run.train(10)
    run.tell(Event.RUN_PAUSED, by="ada@host")
    run.hold(phase="stopped")
    assert (run.status()["phase"], run.status()["halted"]["state"], run.status()["halted"]["by"]) == ("stopped", "paused", "ada@host")
    run.tell(Event.RUN_HALTED, by="ada@host")
    assert run.status()["halted"]["state"] == "halted"


def test_a_wish_to_go_back_is_told_until_a_start_has_met_it(run: Run) -> None:
    run.train(10)
    first = run.commit(None)
    run.tell(Event.RUN_FINISHED)
    assert run.status()["next_start"] is None
    run.tell(Event.RESUME_ASKED, id=first)
    assert run.status()["next_start"] == {"checkpoint": first, "step": 10, "by": "rank 0"}
    run.resume(first, step=10)
    assert run.status()["next_start"] is None


def test_a_ledger_that_lacks_what_the_checkpoints_know_is_suspect(run: Run) -> None:
    run.train(10)
    name = run.commit(None)
    written = read_ledger(run.run_dir / "ledger.jsonl")[-2]
    folder = run.run_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    position = {"ledger_seq": written.seq, "ledger_hash": written.hash, "id": name}
    (folder / "manifest.json").write_text(strict_json.dumps(position))
    assert (run.status()["verdict"], run.status()["problems"]) == ("healthy", [])
    lines = (run.run_dir / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run.run_dir / "ledger.jsonl").write_bytes(b"".join(lines[: written.seq - 1]))
    status = run.status()
    assert status["verdict"] == "suspect"
    assert f"the tail is cut: checkpoint {name} was written at seq {written.seq}, the ledger ends at 1" in status["problems"][0]


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: (d / "ledger.jsonl").write_bytes((d / "ledger.jsonl").read_bytes().replace(b"checkpoint.committed", b"\n", 1)), "line"),
        (lambda d: (d / "config.toml").write_text("[run"), "config.toml"),
        (lambda d: (d / "metrics" / "steps-g1-1.arrows").write_bytes(b"\xff" * 5000), ""),
        (lambda d: (d / "metrics" / "steps-2.parquet").write_bytes(b"PAR1"), ""),
        (lambda d: (d / "live.json").write_text("{"), ""),
        (lambda d: (d / "lock").write_text("{"), ""),
        (lambda d: (d / "ledger.jsonl").unlink(), ""),
    ],
)
def test_a_damaged_folder_still_tells_what_it_can(run: Run, damage: Damage, problem: str) -> None:
    run.train(20)
    run.commit(None)
    run.train(25)
    run.hold()
    damage(run.run_dir)
    status = run.status()
    assert set(status) >= SPEC_KEYS
    assert len(status["problems"]) == bool(problem)
    assert problem in "".join(status["problems"])
