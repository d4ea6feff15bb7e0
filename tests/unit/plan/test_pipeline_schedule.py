from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.parallel.pipeline import num_scheduled as as_trained
from surefoot.plan.layouts.pipeline_schedule import closed_form, fewest_micro_batches, num_scheduled
from surefoot.plan.layouts.pipeline_timeline import PieceTimes, play_out, simulate
from surefoot.plan.records import PipelineSchedule

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved", "zero_bubble")


def equal(pp: int, chunks: int, *, forward: float, backward: float, weight: float = 0.0) -> tuple[PieceTimes, ...]:
    """The pieces of `pp` stages that take the given times whatever the number of chunks."""
    return (PieceTimes(forward / chunks, backward / chunks, weight / chunks),) * (pp * chunks)


def many_pipelines() -> Iterator[tuple[int, int, PipelineSchedule, int]]:
    for pp, rounds, schedule, chunks in product((2, 4, 8), (1, 2, 5), SCHEDULES[:2], (1, 2, 3)):
        if (schedule == "1f1b") == (chunks == 1):
            yield pp, pp * rounds, schedule, chunks


@pytest.mark.parametrize("backward", [0.5, 2.0, 3.0])
def test_a_schedule_played_out_idles_as_the_closed_form_says(backward: float) -> None:
    """Whatever a backward takes: (p - 1) / (v m) of the ideal, (p - 1) / (v m + p - 1) of the whole."""
    cases = list(many_pipelines())
    assert len(cases) == 27
    for pp, number, schedule, chunks in cases:
        played = simulate(equal(pp, chunks, forward=1.0, backward=backward), pp=pp, num_micro_batches=number, schedule=schedule)
        assert played.idle_of_ideal == pytest.approx((pp - 1) / (chunks * number), abs=1e-12)
        assert played.idle_of_total == pytest.approx((pp - 1) / (chunks * number + pp - 1), abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_of_each_schedule(schedule: PipelineSchedule) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    told = closed_form(8, num_micro_batches=32, chunks=chunks, schedule=schedule)
    played = simulate(equal(8, chunks, forward=1.0, backward=1.0, weight=1.0), pp=8, num_micro_batches=32, schedule=schedule)
    assert played.idle_of_ideal == pytest.approx(told.idle_of_ideal)
    assert played.idle_of_total == pytest.approx(told.idle_of_total)


def test_the_two_figures_of_8_stages_and_32_micro_batches() -> None:
    told = closed_form(8, num_micro_batches=32)
    assert (told.idle_of_ideal, told.idle_of_total) == pytest.approx((7 / 32, 7 / 39))
    assert closed_form(8, num_micro_batches=32, chunks=2, schedule="interleaved").idle_of_ideal == pytest.approx(7 / 64)


def test_zero_bubble_leaves_a_third() -> None:
    """Weight gradients fill up what 1F1B idles, but for (p - 1) (F + B - W)."""
    told = [closed_form(8, num_micro_batches=32, chunks=2, schedule=schedule).idle_of_ideal for schedule in SCHEDULES[1:]]
    assert told[1] == pytest.approx(told[0] / 3)


def test_uneven_stages_wait_for_the_slowest() -> None:
    """What no closed form of equal stages tells: one stage that takes half as long again costs each micro-batch as much."""
    times = (PieceTimes(1.0, 2.0), PieceTimes(1.5, 3.0), PieceTimes(1.0, 2.0), PieceTimes(1.0, 2.0))
    played = simulate(times, pp=4, num_micro_batches=32)
    assert played.total_s > 32 * 4.5
    assert played.idle_of_total > 2 * closed_form(4, num_micro_batches=32).idle_of_total


def test_what_passes_between_stages_takes_time() -> None:
    times = equal(4, 1, forward=1.0, backward=2.0)
    without, with_ = (simulate(times, pp=4, num_micro_batches=8, p2p_s=seconds).total_s for seconds in (0.0, 0.1))
    assert with_ - without >= 2 * 3 * 0.1 - 1e-9  # fills and drains the pipeline


def test_stages_keep_what_is_in_flight() -> None:
    """1F1B: p - s micro-batches on stage s (arXiv 2104.04473). Interleaved: 1 + (p - 1) / (p v) times p on the first (arXiv 2205.05198)."""
    played = simulate(equal(4, 1, forward=1.0, backward=2.0), pp=4, num_micro_batches=16)
    assert played.peak_in_flight == (4, 3, 2, 1)
    played = simulate(equal(4, 2, forward=1.0, backward=2.0), pp=4, num_micro_batches=16, schedule="interleaved")
    assert played.peak_in_flight[0] / 2 == pytest.approx(4 * (1 + 3 / 8))


def test_the_fewest_micro_batches_for_a_bubble_of_15_percent() -> None:
    """m >= (p - 1) (1 - f) / (f v), in the rounds that a runtime asks for."""
    told = [fewest_micro_batches(8, max_bubble=0.15, chunks=v, schedule="1f1b" if v == 1 else "interleaved") for v in (1, 2, 4)]
    assert told == [40, 20, 10]
    assert [fewest_micro_batches(8, max_bubble=0.15, chunks=v, of_stages=True) for v in (1, 2, 4)] == [40, 24, 16]
    assert fewest_micro_batches(1, max_bubble=0.15) == 1


@given(pp=st.integers(2, 16), chunks=st.integers(2, 8), percent=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_no_smaller_number_would_do(pp: int, chunks: int, percent: int) -> None:
    fewest = fewest_micro_batches(pp, max_bubble=percent / 100, chunks=chunks, schedule="interleaved")
    legal = [m for m in range(pp, fewest + 1) if num_scheduled(m, pp=pp, schedule="interleaved") == m]
    fitting = [m for m in legal if closed_form(pp, num_micro_batches=m, chunks=chunks).idle_of_total <= percent / 100 + 1e-9]
    assert fitting[:1] == [fewest]


def test_phantoms_are_counted_as_training_adds_them() -> None:
    for schedule, pp, number in product(SCHEDULES, range(2, 9), range(1, 40)):
        assert num_scheduled(number, pp=pp, schedule=schedule) == as_trained(number, num_stages=pp, order=schedule)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zero_bubble", 2)])
def test_a_full_pipeline_repeats_itself(schedule: PipelineSchedule, chunks: int) -> None:
    """To a hundredth, though its pieces take from 3 to 4 s."""
    times = tuple(PieceTimes(1.0 + 0.03 * piece, 2.0 - 0.05 * piece, 0.9) for piece in range(4 * chunks))
    whole = simulate(times, pp=4, num_micro_batches=60, schedule=schedule, p2p_s=0.02)
    short = play_out(times, pp=4, num_micro_batches=60, schedule=schedule, p2p_s=0.02)
    assert short.total_s == pytest.approx(whole.total_s, rel=0.01)
    assert short.peak_in_flight == whole.peak_in_flight
    assert sum(short.busy_s) == pytest.approx(sum(whole.busy_s))
