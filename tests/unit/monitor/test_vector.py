from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import SurefootError
from surefoot.monitor.vector import Flag, HostWords, encode, fold

HOST = HostWords(
    generation=3,
    attempt=2,
    step=41,
    flags=Flag(0),
    blocklist_word=0,
    num_live_tokens=100,
    data_wait_s=0.25,
    forward_backward_s=1.5,
    step_clock_s=9.0,
    cpu_s=4.0,
    save_clock_s=30.0,
    save_stall_s=0.5,
    save_slot_free=True,
)


def words(host: HostWords, loss_sum: float = 250.0, squared_norm: float = 4.0, num_nonfinite: float = 0.0) -> torch.Tensor:
    return encode(host, device_values=torch.tensor([loss_sum, squared_norm, 0.0, 0.0, num_nonfinite], dtype=torch.float64))


def test_a_vector_folds_into_what_went_in() -> None:
    signals = fold(words(HOST).unsqueeze(0))
    assert (signals.step, signals.attempt, signals.generation) == (41, 2, 3)
    assert signals.loss == 2.5
    assert signals.grad_norm == 2.0 / 100
    assert (signals.save_clock_s, signals.save_stall_s, signals.save_slot_free) == (30.0, 0.5, True)
    assert signals.ranks[0].data_wait_s == 0.25


def test_the_loss_is_divided_once_by_the_tokens_of_all_ranks() -> None:
    uneven = torch.stack((words(HOST, loss_sum=300.0), words(replace(HOST, num_live_tokens=20), loss_sum=60.0)))
    assert fold(uneven).loss == 360.0 / 120


def test_levels_and_ranks_are_added_without_rounding_in_between() -> None:
    coarse, fine = 2.0**60, 2.0**-40
    rows = torch.stack(
        [
            encode(HOST, device_values=torch.tensor([0.0, *levels, 0.0], dtype=torch.float64))
            for levels in ((coarse, fine, 0.0), (-coarse, 0.0, fine))
        ]
    )
    assert fold(rows).grad_norm == math.sqrt(2 * fine) / 200


def test_one_rank_asking_is_enough_and_silence_is_no_request() -> None:
    quiet = torch.stack((words(HOST), words(HOST)))
    assert not fold(quiet).leave_requested
    asked = torch.stack((words(HOST), words(replace(HOST, flags=Flag.LEAVE | Flag.SAVE))))
    assert fold(asked).leave_requested
    assert fold(asked).save_requested
    assert not fold(asked).block_requested
    assert fold(torch.stack((words(replace(HOST, flags=Flag.BLOCK)), words(HOST)))).block_requested


def test_no_live_token_anywhere_is_zero_and_not_nan() -> None:
    signals = fold(words(replace(HOST, num_live_tokens=0), loss_sum=0.0, squared_norm=0.0).unsqueeze(0))
    assert (signals.loss, signals.grad_norm) == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_rank_makes_the_whole_non_finite(value: float) -> None:
    rows = torch.stack((words(HOST), words(HOST, loss_sum=value, squared_norm=abs(value), num_nonfinite=2.0)))
    signals = fold(rows)
    assert math.isnan(signals.loss)
    assert not math.isfinite(signals.grad_norm)
    assert signals.num_nonfinite == 2


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("generation", replace(HOST, generation=99)),
        ("attempt", replace(HOST, attempt=99)),
        ("step", replace(HOST, step=99)),
        ("blocklist_word", replace(HOST, blocklist_word=99)),
    ],
)
def test_ranks_on_different_counters_or_blocklists_are_named(field: str, other: HostWords) -> None:
    rows = torch.stack((words(HOST), words(other)))
    with pytest.raises(SurefootError, match=f"disagree on {field}.*99"):
        fold(rows)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=2, max_size=6))
def test_the_sum_does_not_depend_on_the_order_of_ranks(losses: list[float]) -> None:
    rows = torch.stack([words(HOST, loss_sum=loss) for loss in losses])
    assert fold(rows).loss == fold(rows.flip(0)).loss
