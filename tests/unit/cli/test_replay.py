from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.cli.replay_compare import compare_steps, rows_of_line
from surefoot.cli.replay_plan import read_original, refuse_other_config, script_for
from surefoot.cli.replay_words import first_nonfinite, heads_by_layer, lines_of
from surefoot.core.blocking import Block, next_head
from surefoot.core.clock import SystemClock
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.identity import section_hashes
from surefoot.core.sections import OptimizerSection, RunConfig
from surefoot.observe.blocks import taken_fields
from surefoot.observe.interventions import Segment
from surefoot.observe.ledger import Ledger

NAN = math.nan


def row(step: int, *, attempt: int = 1, generation: int = 1, loss: float = 2.5, **values: Any) -> dict[str, Any]:
    made = {"step": step, "attempt": attempt, "generation": generation, "loss": loss, "grad_norm": 1.0}
    return {**made, "next_sample": 4 * step, "num_live_tokens": 64, "action": "proceed", **values}


def by_step(*rows: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {found["step"]: found for found in rows}


def test_the_same_bits_are_the_same_and_one_other_bit_is_not() -> None:
    recorded = by_step(row(1), row(2), row(3))
    assert compare_steps(recorded, recorded, steps=range(1, 4), skipped=()).first is None
    other = compare_steps(recorded, by_step(row(1), row(2, loss=math.nextafter(2.5, 3)), row(3, loss=9.0)), steps=range(1, 4), skipped=())
    assert other.first is not None
    assert (other.first.step, other.first.what, other.num_differing, other.num_compared) == (2, "loss", 2, 3)
    assert other.first.relative == pytest.approx(1.8e-16, rel=0.1)


def test_nan_is_the_same_as_nan_and_infinitely_far_from_a_number() -> None:
    recorded = by_step(row(1, loss=NAN))
    assert compare_steps(recorded, recorded, steps=range(1, 2), skipped=()).first is None
    other = compare_steps(recorded, by_step(row(1)), steps=range(1, 2), skipped=())
    assert other.first is not None
    assert other.first.relative == math.inf


def test_a_step_that_is_skipped_by_order_may_have_other_figures_but_no_other_samples() -> None:
    recorded = by_step(row(1, loss=NAN, grad_norm=NAN, action="skip"))
    same = compare_steps(recorded, by_step(row(1, action="skip")), steps=range(1, 2), skipped={1})
    assert (same.first, same.gone) == (None, (1,))
    assert compare_steps(recorded, recorded, steps=range(1, 2), skipped={1}).gone == ()
    paused = by_step(row(1, loss=NAN, grad_norm=NAN, action="pause"))
    assert compare_steps(paused, recorded, steps=range(1, 2), skipped={1}).first is None
    for now in (row(1), row(1, action="skip", next_sample=5), row(1, action="skip", num_live_tokens=63)):
        assert compare_steps(recorded, by_step(now), steps=range(1, 2), skipped={1}).first is not None


def test_what_was_not_recorded_and_what_was_not_reached_is_said() -> None:
    found = compare_steps(by_step(row(1), row(3)), by_step(row(1), row(2)), steps=range(1, 4), skipped=())
    assert (found.missing, found.num_compared) == ((2,), 2)
    assert found.first is not None
    assert (found.first.step, found.first.what) == (3, "step")


def test_of_each_step_the_row_of_its_own_attempt_counts() -> None:
    line = (Segment(1, 1, 2), Segment(3, 3, None))
    rows = [row(1), row(2, loss=1.0), row(3), row(2, attempt=3), row(3, attempt=3, loss=7.0), row(3, attempt=3, generation=2, loss=8.0)]
    found = rows_of_line(rows, line)
    assert [(step, one["attempt"], one["loss"]) for step, one in found.items()] == [(1, 1, 2.5), (2, 1, 1.0), (3, 3, 8.0)]


# --- the plan ---


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., int]:
    """Entries of a run's ledger."""
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="rank 0")

    def tell(event: Event, step: int, fields: dict[str, Any] | None = None, *, attempt: int = 1, rule: str = "") -> int:
        return ledger.append(event, generation=1, attempt=attempt, step=step, rule=rule, fields=fields or {}).seq

    tell(Event.ATTEMPT_STARTED, 0, {"checkpoint": None, "config_hashes": section_hashes(RunConfig())})
    return tell


def test_what_was_decided_is_forced_but_for_what_is_left_out(tmp_path: Path, told: Callable[..., int]) -> None:
    first = told(Event.UPDATE_SKIPPED, 3, rule="nonfinite")
    told(Event.UPDATE_SKIPPED, 6, rule="outlier_loss")
    whole = read_original(tmp_path, from_step=0, num_steps=8, without=())
    assert whole.starts == (None,)
    assert {step: skip.rule for step, skip in script_for(whole, first_step=1, last_step=8).skips.items()} == {
        3: "nonfinite",
        6: "outlier_loss",
    }
    assert list(script_for(whole, first_step=4, last_step=5).skips) == []
    less = read_original(tmp_path, from_step=0, num_steps=8, without=(first,))
    assert list(script_for(less, first_step=1, last_step=8).skips) == [6]


def test_a_lowered_rate_can_be_left_out_and_then_the_one_before_it_holds(tmp_path: Path, told: Callable[..., int]) -> None:
    told(Event.CHECKPOINT_COMMITTED, 10, {"id": "s10-a1", "step": 10, "attempt": 1, "parent": None})
    seqs = []
    for attempt, factor in ((2, 0.5), (3, 0.25)):
        told(Event.ATTEMPT_STARTED, 10, {"checkpoint": "s10-a1"}, attempt=attempt)
        seqs.append(told(Event.RUN_ROLLED_BACK, 10, {"checkpoint": "s10-a1", "lr_factor": factor}, attempt=attempt))
    for without, wanted in (((), 0.25), ((seqs[1],), 0.5)):
        original = read_original(tmp_path, from_step=0, num_steps=12, without=without)
        script = script_for(original, first_step=1, last_step=12)
        assert [script.rate_factor(step) for step in (10, 11)] == [1.0, wanted]


def test_what_cannot_be_left_out_is_refused_with_what_can(tmp_path: Path, told: Callable[..., int]) -> None:
    skip = told(Event.UPDATE_SKIPPED, 3, rule="nonfinite")
    late = told(Event.UPDATE_SKIPPED, 9, rule="nonfinite")
    again = told(Event.STEP_RECHECKED, 4, {})
    for seq, words in ((1, "is no intervention"), (late, "begins at step 9"), (again, "changed no bit"), (99, "is no intervention")):
        with pytest.raises(ConfigError, match=words) as refused:
            read_original(tmp_path, from_step=0, num_steps=5, without=(seq,))
        assert f"{skip} (update.skipped at step 3)" in refused.value.hint
        assert f"{late} (" not in refused.value.hint


def test_metrics_that_are_gone_are_named_as_what_is_missing(
    tmp_path: Path, told: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    told(Event.CHECKPOINT_COMMITTED, 10, {"id": "s10-a1", "step": 10, "attempt": 1, "parent": None})
    (tmp_path / "config.toml").write_text("")
    assert run(["replay", str(tmp_path), "--from", "10", "--steps", "5", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "steps up to 15 were asked for, and none of them is recorded: there is nothing to compare with"
    assert str(tmp_path / "metrics") in error["hint"]


def test_a_run_without_steps_and_one_whose_beginning_is_gone_are_refused(tmp_path: Path, told: Callable[..., int]) -> None:
    told(Event.CHECKPOINT_IMPORTED, 40, {"id": "s40-a0", "step": 40, "attempt": 0}, attempt=1)
    told(Event.ATTEMPT_STARTED, 40, {"checkpoint": "s40-a0"}, attempt=2)
    with pytest.raises(CheckpointError, match="begins with step 41"):
        read_original(tmp_path, from_step=45, num_steps=1, without=())
    empty = tmp_path / "empty"
    empty.mkdir()
    Ledger(empty / "ledger.jsonl", clock=SystemClock(), by="x").append(Event.RUN_CREATED, generation=0, attempt=0, step=0)
    with pytest.raises(ConfigError, match="has not begun"):
        read_original(empty, from_step=0, num_steps=1, without=())


def test_settings_that_are_gone_are_named_with_the_steps_that_need_them(tmp_path: Path, told: Callable[..., int]) -> None:
    original = read_original(tmp_path, from_step=0, num_steps=5, without=())
    refuse_other_config(original, RunConfig(), first_step=1, last_step=5)
    with pytest.raises(CheckpointError, match=r"steps 1 to 5 were computed under another \[optimizer\]"):
        refuse_other_config(original, RunConfig(optimizer=OptimizerSection(lr=1.0)), first_step=1, last_step=5)


def test_a_block_can_be_left_out(tmp_path: Path, told: Callable[..., int]) -> None:
    block = Block("samples", "8:12", "skip", samples=(8, 12), effective_sample=4)
    seq = told(Event.BLOCK_TAKEN, 1, taken_fields(block, asked=None, count=1, head=next_head(ZERO_HASH, block)))
    assert [one.seq for one in read_original(tmp_path, from_step=0, num_steps=5, without=(seq,)).left_out] == [seq]


# --- over ranks, and in words ---


def nonfinite(rank: int, direction: str, *, step: int = 5, atom: int | None = 0) -> dict[str, Any]:
    found = {"rank": rank, "direction": direction, "step": step, "atom": atom, "samples": [7], "module": "norm", "tensor": "output 0"}
    found |= {"dtype": "float32", "shape": [2, 3], "num_nan": 6, "num_inf": 0, "inputs_finite": True, "parameters_finite": True}
    return {"rank": rank, "first_nonfinite": found, "logits": []}


def test_the_rank_that_had_it_first_is_named_and_not_those_that_got_it_in_a_sum() -> None:
    summed, own = nonfinite(0, "parameter gradient", atom=None), nonfinite(1, "parameter gradient")
    backward, forward = nonfinite(2, "backward gradient"), nonfinite(3, "forward output")
    earlier = nonfinite(4, "parameter gradient", step=4)
    for seen, wanted in (((summed, own), 1), ((summed, own, backward), 2), ((forward, backward), 3), ((forward, earlier), 4)):
        found = first_nonfinite(seen)
        assert found is not None
        assert found["rank"] == wanted
    assert first_nonfinite([{"rank": 0, "first_nonfinite": None, "logits": []}]) is None


def test_heads_are_put_together_over_data_ranks_and_tensor_ranks() -> None:
    def rank(first_head: int, *heads: tuple[float | None, int]) -> dict[str, Any]:
        layer = {"step": 5, "module": "core", "first_head": first_head, "heads": [list(head) for head in heads]}
        return {"rank": 0, "first_nonfinite": None, "logits": [layer]}

    found = heads_by_layer([rank(2, (3.0, 8)), rank(0, (1.0, 4), (2.0, 5)), rank(0, (0.5, 6), (None, 7))])
    assert found == [{"step": 5, "module": "core", "logits": [1.0, None, 3.0], "samples": [4, 7, 8]}]


def test_the_answer_in_words() -> None:
    answer: dict[str, Any] = {
        "from": 4,
        "steps": 2,
        "start": {"checkpoint": "s4-a1", "step": 4},
        "interventions": [{"seq": 9, "event": "update.skipped", "step": 5, "rule": "nonfinite", "reason": "nan", "left_out": False}],
        **{"did_not_recur": [5], "notes": ["a note"], "not_recorded": [], "looked_for_nonfinite": True, "logits": []},
        **{"first_nonfinite": nonfinite(1, "forward output")["first_nonfinite"], "num_compared": 2, "num_differing": 0},
        "first_difference": None,
    }
    said = "\n".join(lines_of(answer))
    assert "as decided: entry 9, update.skipped at step 5 nonfinite: nan" in said
    assert "a fault that is over" in said
    assert "step 5, rank 1, atom 0, samples 7: forward output of norm" in said
    assert said.endswith("the same bits: 2 steps 5 to 6, from s4-a1")
    difference = {"step": 6, "attempt": 1, "what": "grad_norm", "recorded": 1.0, "replayed": 2.0, "relative": 1.0}
    said = "\n".join(lines_of({**answer, "first_difference": difference, "num_differing": 1}))
    assert said.endswith(
        "differs at step 6, and in 1 of 2 steps 5 to 6, from s4-a1: gradient norm was 1.0 in attempt 1, is 2.0 (relative difference 1)"
    )
