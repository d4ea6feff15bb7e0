from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import SurefootError
from surefoot.core.strict_json import canonical
from surefoot.monitor.probe_figures import probe_figures
from surefoot.monitor.ratios import late_from_json
from surefoot.monitor.vector import Flag, HostWords, Layout, encode, fold, fold_late

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


def words(
    host: HostWords,
    loss_sum: float = 250.0,
    squared_norm: float = 4.0,
    num_nonfinite: float = 0.0,
    local: float = 9.0,
    tail: Sequence[float] = (),
) -> torch.Tensor:
    values = [loss_sum, squared_norm, 0.0, 0.0, num_nonfinite, local, *tail]
    return encode(host, device_values=torch.tensor(values, dtype=torch.float64))


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
            encode(HOST, device_values=torch.tensor([0.0, *levels, 0.0, 0.0], dtype=torch.float64))
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
        ("layout_word", replace(HOST, layout_word=99)),
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


LAYOUT = Layout(groups=("embed", "blocks.0"), sums=("log_z_n:head", "log_z_sum:head"), maxima=("act_max:blocks.0",))
NO_UPDATE = (0.0,) * 4


def test_a_rank_keeps_its_own_norm_and_memory() -> None:
    rows = torch.stack((words(HOST), words(replace(HOST, memory_bytes=77), local=math.inf)))
    assert [(part.local_norm, part.memory_bytes) for part in fold(rows).ranks] == [(3.0, 0), (math.inf, 77)]
    assert math.isnan(fold(words(HOST, local=math.nan).unsqueeze(0)).ranks[0].local_norm)


def test_squares_of_a_group_are_added_over_ranks() -> None:
    rows = torch.stack((words(HOST, tail=(9.0, 0.0, 1e-6, 0.0, 2.0, 0.0)), words(HOST, tail=(16.0, math.inf, 3e-6, 0.0, 2.0, 0.0))))
    signals = fold(rows, layout=LAYOUT)
    assert signals.group_norms == {"embed": 5.0 / 200, "blocks.0": math.inf}
    assert signals.update_ratios == {"embed": pytest.approx(1e-3)}  # nobody has told of an update of the other
    assert signals.probes == {}


def test_probes_are_there_where_the_vector_is_longer() -> None:
    squares = (1.0, 1.0, *NO_UPDATE)
    rows = torch.stack((words(HOST, tail=(*squares, 3.0, 6.0, 0.5)), words(HOST, tail=(*squares, 1.0, 6.0, -math.inf))))
    assert fold(rows, layout=LAYOUT, figures=probe_figures).probes == {"log_z": 3.0, "act_max:blocks.0": 0.5}
    nowhere = torch.stack((words(HOST, tail=(*squares, 0.0, 0.0, -math.inf)),) * 2)
    assert fold(nowhere, layout=LAYOUT, figures=probe_figures).probes == {}
    lost = torch.stack((words(HOST, tail=(*squares, 3.0, 6.0, math.nan)), words(HOST, tail=(*squares, 1.0, 6.0, 1.0))))
    assert math.isnan(fold(lost, layout=LAYOUT, figures=probe_figures).probes["act_max:blocks.0"])


@pytest.mark.parametrize("num_words", [1, 5, 7, 8, 10])
def test_a_vector_of_another_length_is_refused(num_words: int) -> None:
    with pytest.raises(SurefootError, match="its layout"):
        fold(words(HOST, tail=(0.0,) * num_words).unsqueeze(0), layout=LAYOUT)


def test_layouts_of_other_names_have_other_words() -> None:
    others = [Layout(), replace(LAYOUT, groups=("embed",)), replace(LAYOUT, sums=LAYOUT.maxima, maxima=LAYOUT.sums), LAYOUT]
    assert len({layout.word for layout in others}) == len(others)
    assert all(0 <= layout.word < 2**63 for layout in others)


@pytest.mark.parametrize(
    ("told", "expected"), [((1.0, 0.5), 0.5), ((30.0, 0.5), 30.0), ((math.nan, 1.0), 1.0), ((1.0, 0.0), 0.0), ((math.inf, 0.5), math.inf)]
)
def test_of_applied_rates_the_one_furthest_from_what_was_told_counts(told: tuple[float, float], expected: float) -> None:
    rows = torch.stack([words(replace(HOST, lr=1e-3, lr_applied_ratio=ratio)) for ratio in told])
    assert fold(rows).lr_applied_ratio == fold(rows.flip(0)).lr_applied_ratio == expected
    assert fold(rows).lr == 1e-3


def test_an_order_is_heard_from_any_rank() -> None:
    assert not fold(torch.stack((words(HOST), words(HOST)))).order_requested
    assert fold(torch.stack((words(HOST), words(replace(HOST, flags=Flag.ORDER))))).order_requested


def test_of_many_ranks_each_figure_stays_with_its_rank_and_sums_are_rounded_once() -> None:
    hosts = [replace(HOST, num_live_tokens=rank, cpu_s=rank / 8, memory_bytes=rank) for rank in range(300)]
    losses = [1e16, 1.0, -1e16, *(0.1 * rank for rank in range(297))]
    signals = fold(
        torch.stack([words(host, loss_sum=loss, local=rank**2) for rank, (host, loss) in enumerate(zip(hosts, losses, strict=True))])
    )
    assert [(part.rank, part.num_live_tokens, part.cpu_s, part.local_norm, part.memory_bytes) for part in signals.ranks] == [
        (rank, rank, rank / 8, float(rank), rank) for rank in range(300)
    ]
    assert [part.loss_sum for part in signals.ranks] == losses
    assert signals.loss == math.fsum(losses) / signals.num_live_tokens


def test_what_is_saved_of_the_newest_update_folds_into_the_same_bits() -> None:
    """Of three ranks before, and of as many after: then rank 0 alone has it."""
    layout = Layout(groups=("embed", "blocks.0", "head"))
    moved_RX = torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moved_RX[:, [2, 5]] = 0.0  # nobody has told of the last group
    ratios = (math.nan, 0.97, 1.01)

    def folded(rows_RX: torch.Tensor, told: Sequence[float]) -> tuple[object, ...]:
        hosts = [replace(HOST, lr_applied_ratio=ratio) for ratio in told]
        rows = [words(host, tail=(1.0, 2.0, 3.0, *row_X.tolist())) for host, row_X in zip(hosts, rows_RX, strict=True)]
        signals = fold(torch.stack(rows), layout=layout)
        return signals.update_ratios, signals.lr_applied_ratio

    gathered = torch.cat((moved_RX, torch.tensor(ratios, dtype=torch.float64)[:, None]), dim=1).view(torch.int64)
    late = late_from_json(json.loads(canonical(fold_late(gathered, layout=layout, step=7).to_json())))
    after_RX = torch.zeros_like(moved_RX)
    after_RX[0] = torch.tensor(late.values(layout.groups), dtype=torch.float64)
    assert folded(after_RX, (late.lr_applied_ratio, math.nan, math.nan)) == folded(moved_RX, ratios)
    assert (late.step, late_from_json({}).step) == (7, -1)
