"""Which proxy runs there are, what they cost, and what of finished ones may be compared."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.sections import DataSection, ModelSection, OptimizerSection, RunConfig, ScheduleSection, TrainSection
from surefoot.plan.fits.answer import Question, answer_of
from surefoot.plan.fits.comparing import Standing, unequal
from surefoot.plan.fits.table import Table, read_table
from surefoot.plan.sizing.laws import Counted, Law, Power, Ratio
from surefoot.plan.sizing.published import law as law_named
from surefoot.plan.sweeps.batch_probe import ProbedLoss, judge, probes
from surefoot.plan.sweeps.moved import COLUMN_OF, compared, expected_exponent, moved, sentences
from surefoot.plan.sweeps.proxy_sizes import at_width, proxy
from surefoot.plan.sweeps.sweep import LEAST_STEPS, Design, Sweep, design_sweep
from surefoot.plan.tuning.rate_transfer import TriedRate, transfer

VOCAB = 512
FAMILY = ModelSection(num_layers=4, d_model=128, num_heads=8, num_kv_heads=4, d_ff=384)
BASE = RunConfig(
    model=FAMILY,
    data=DataSection(seq_len=128),
    train=TrainSection(num_steps=1000, global_batch_size=16, micro_batch_size=4),
    optimizer=OptimizerSection(lr=4e-3),
    schedule=ScheduleSection(warmup_steps=100),
)
BUDGETS = (1e12, 2e12, 4e12)


def designed(base: RunConfig = BASE, **changed: object) -> Sweep:
    return design_sweep(base, VOCAB, replace(Design(budgets=BUDGETS, law=law_named("ratio:20")), **changed))  # type: ignore[arg-type]


def count(sizes: ModelSizes) -> float:
    return float(sizes.num_parameters)


@pytest.mark.parametrize("n", [1e5, 1e6, 2e7, 3e8])
def test_a_proxy_is_of_its_base_s_family_and_near_the_size_asked_for(n: float) -> None:
    section = proxy(FAMILY, VOCAB, n=n, count=count)
    sizes = resolve_sizes(section, VOCAB)
    assert sizes.num_parameters == pytest.approx(n, rel=0.25 if n < 1e6 else 0.06)
    assert (sizes.head_dim, sizes.vocab_size) == (16, VOCAB)
    assert sizes.num_heads % sizes.num_kv_heads == 0
    assert section.d_ff == pytest.approx(3 * section.d_model, abs=64)
    aspect = section.d_model / section.num_layers
    assert 32 / 4 < aspect < 32 * 4


def test_a_family_member_of_its_base_s_width_is_its_base() -> None:
    assert at_width(replace(FAMILY, vocab_size=VOCAB), VOCAB, num_heads=8) == replace(FAMILY, vocab_size=VOCAB)
    assert at_width(FAMILY, VOCAB, num_heads=3).num_kv_heads == 3  # pairs of queries do not come out even


def test_each_budget_has_its_sizes_around_the_expected_one_and_equal_compute() -> None:
    sweep = designed()
    for budget in BUDGETS:
        group = [run for run in sweep.runs if run.budget_flops == budget]
        assert len(group) == 5
        expected = math.sqrt(budget / 120)
        sizes = sorted(run.sizes.num_parameters for run in group)
        assert sizes[1] < expected * 1.35
        assert sizes[3] > expected / 1.35
        for run in group:
            per_step = 16 * run.sizes.flops_per_sequence(128)
            assert run.flops == run.config.train.num_steps * per_step
            assert abs(run.flops - budget) <= per_step / 2
            assert run.tokens == run.config.train.num_steps * 16 * 128


def test_a_size_has_one_stable_phase_and_a_cooldown_for_each_smaller_budget() -> None:
    sweep = designed()
    first = {run.name: run for run in sweep.runs if not run.parent}
    branches = [run for run in sweep.runs if run.parent]
    assert branches
    for run in branches:
        parent = first[run.parent]
        assert parent.config.model == run.config.model
        assert parent.config.schedule.warmup_steps == run.config.schedule.warmup_steps
        assert run.branch_step in parent.config.checkpoint.keep_steps
        assert run.branch_step + run.config.schedule.decay_steps == run.config.train.num_steps
        stable = parent.config.train.num_steps - parent.config.schedule.decay_steps
        assert parent.config.schedule.warmup_steps <= run.branch_step < stable
        assert run.config.schedule.decay_steps == pytest.approx(run.config.train.num_steps / 5, abs=1)
        assert run.trained_flops < 0.25 * run.flops
        assert f"train.num_steps={run.config.train.num_steps}" in run.overrides
    assert sweep.trained_flops == sum(run.flops for run in first.values()) + sum(run.trained_flops for run in branches)
    assert sweep.trained_flops < sweep.flops_alone


def test_a_cosine_is_never_cut_short_each_point_is_a_run_of_its_own() -> None:
    sweep = designed(replace(BASE, schedule=ScheduleSection(kind="cosine")))
    assert not any(run.parent for run in sweep.runs)
    assert sweep.trained_flops == sweep.flops_alone
    assert not any(run.config.checkpoint.keep_steps for run in sweep.runs)


@pytest.mark.parametrize(("num_sizes", "low", "high"), [(5, 0.05, 0.0501), (7, 0.07, 0.0702)])
def test_at_a_hundredth_each_a_group_costs_as_many_hundredths_as_it_has_sizes(num_sizes: int, low: float, high: float) -> None:
    """Not 1%, as the textbook has it."""
    target = 1e15
    share = designed(budgets=(target / 100,), num_sizes=num_sizes).trained_flops / target
    assert low * 0.99 < share < high * 1.01


def test_the_warm_up_is_a_tenth_of_a_size_s_shortest_run_at_most() -> None:
    runs = designed().runs
    for run in runs:
        shortest = min(other.config.train.num_steps for other in runs if other.config.model == run.config.model)
        assert run.config.schedule.warmup_steps == min(100, math.ceil(shortest / 10))


def test_learning_rates_by_width_and_fixed() -> None:
    by_width = designed(rate_rule="1/width").runs
    assert [run.config.optimizer.lr * run.sizes.d_model for run in by_width] == pytest.approx([4e-3 * 128] * len(by_width))
    assert {run.config.optimizer.lr for run in designed().runs} == {4e-3}


def test_a_learning_rate_is_varied_at_every_size() -> None:
    runs = designed(varied="lr", values=(1e-3, 2e-3, 4e-3), num_sizes=1).runs
    assert len(runs) == 9
    assert {run.config.optimizer.lr for run in runs} == {1e-3, 2e-3, 4e-3}
    assert len({run.name for run in runs}) == 9


def test_rates_that_are_near_to_each_other_are_runs_of_their_own() -> None:
    runs = designed(varied="lr", values=(1e-3, 1.0001e-3), num_sizes=1, budgets=(4e12,)).runs
    assert sorted(run.name.split("-lr")[1] for run in runs) == ["0.001", "0.0010001"]


def test_a_batch_is_varied_with_the_root_in_the_learning_rate_and_equal_tokens() -> None:
    runs = designed(varied="batch", values=(8.0, 16.0, 32.0), num_sizes=1, budgets=(4e12,)).runs
    assert {(run.config.train.global_batch_size, round(run.config.optimizer.lr, 6)) for run in runs} == {
        (8, round(4e-3 / 2**0.5, 6)),
        (16, 4e-3),
        (32, round(4e-3 * 2**0.5, 6)),
    }
    assert max(run.tokens for run in runs) == pytest.approx(min(run.tokens for run in runs), rel=0.01)
    assert all(run.config.train.global_batch_size % run.config.train.micro_batch_size == 0 for run in runs)


def test_widths_are_trained_for_the_steps_of_the_base() -> None:
    runs = designed(budgets=(), widths=(32, 128), varied="lr", values=(1e-3, 2e-3, 4e-3)).runs
    assert {(run.sizes.d_model, run.sizes.num_layers, run.sizes.head_dim, run.config.train.num_steps) for run in runs} == {
        (32, 4, 16, 1000),
        (128, 4, 16, 1000),
    }
    assert len(runs) == len({run.name for run in runs}) == 6
    assert next(run for run in runs if run.sizes.d_model == 128).sizes == resolve_sizes(FAMILY, VOCAB)


@pytest.mark.parametrize("exponent", [0.0, -1.0])
def test_the_best_rate_is_followed_over_the_widths(exponent: float) -> None:
    def loss(width: int, lr: float) -> float:
        return 3.0 + 0.1 * math.log(lr / (2.2e-3 * (width / 64) ** exponent)) ** 2

    rates = [5e-4 * 2**place for place in range(8)]
    found = transfer([TriedRate(width, lr, loss(width, lr)) for width in (256, 64, 128) for lr in rates])
    assert [one.d_model for one in found.widths] == [64, 128, 256]
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    assert found.widths[0].best_lr == pytest.approx(2.2e-3)
    assert found.price_of_first[64] == 0.0
    assert (found.price_of_first[256] > 0.1) == (exponent != 0.0)


def test_a_best_rate_at_the_edge_says_so_and_decides_no_exponent() -> None:
    found = transfer([TriedRate(width, lr, lr) for width in (64, 128) for lr in (1e-3, 2e-3, 4e-3)])
    assert [one.is_inside for one in found.widths] == [False, False]
    assert found.exponent is None
    with pytest.raises(DataError):
        transfer([TriedRate(64, 1e-3, 3.0)])


def test_runs_of_a_few_steps_are_named() -> None:
    sweep = designed(budgets=(1e10, 2e10))
    assert min(run.config.train.num_steps for run in sweep.runs) < LEAST_STEPS
    assert any("fewer than" in note for note in sweep.notes)
    assert not designed().notes


def test_a_sweep_that_no_law_can_be_fitted_to_says_so() -> None:
    assert any("at least 4 sizes" in note for note in designed(num_sizes=2).notes)
    assert any("one budget" in note for note in designed(budgets=(4e12,)).notes)
    assert not designed(num_sizes=2, varied="lr", values=(1e-3, 2e-3, 4e-3)).notes


def test_what_is_too_short_for_a_stable_phase_branches_off_nothing() -> None:
    sweep = designed(budgets=(2e8, 8e8), num_sizes=1)
    assert len({run.sizes for run in sweep.runs}) == 1
    assert min(run.config.train.num_steps for run in sweep.runs) == 1
    assert not any(run.parent and run.branch_step < 1 for run in sweep.runs)
    assert all(0 not in run.config.checkpoint.keep_steps for run in sweep.runs)
    assert any("a single one" in note for note in sweep.notes)


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (BASE, {"budgets": ()}),
        (BASE, {"widths": (32, 64)}),
        (BASE, {"budgets": (), "widths": (40,)}),
        (BASE, {"budgets": (1e12, math.nan)}),
        (BASE, {"budgets": (1e12, 1.1e12)}),
        (BASE, {"num_sizes": 0}),
        (BASE, {"varied": "batch", "values": (8.5,)}),
        (BASE, {"varied": "batch", "values": (8.0, 1e300)}),
        (BASE, {"varied": "batch", "values": (8.0, math.inf)}),
        (BASE, {"varied": "lr", "values": (1e-3, math.inf)}),
        (BASE, {"varied": "lr", "values": (1e-3, 1e-3)}),
        (BASE, {"span": math.nan}),
        (BASE, {"span": math.inf}),
        (replace(BASE, model=ModelSection(factory="a:b")), {}),
        (replace(BASE, train=replace(BASE.train, batch_ramp=((0, 8), (100, 16)))), {}),
    ],
)
def test_what_is_no_sweep_is_refused(base: RunConfig, changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        designed(base, **changed)


def test_what_moved_is_said_for_each_budget_and_for_the_exponent() -> None:
    assumed = Law("assumed", Power(1.0, 0.5), counts="all", source="", corpus="")
    optima = [{"flops": flops, "n": 2 * flops**0.5, "tokens": flops / (12 * flops**0.5)} for flops in (1e12, 1e14)]
    rows = moved(assumed, optima)
    assert [row.factor for row in rows] == pytest.approx([2.0, 2.0])
    assert rows[0].tokens_per_parameter_expected == pytest.approx(4 * rows[0].tokens_per_parameter)
    assert expected_exponent(assumed, low=1e12, high=1e14) == pytest.approx(0.5)
    answer = {"optima": optima, "a": 0.5, "bands": {"a": [0.45, 0.55]}, "at": [{"flops": 1e14, "bands": {"n": [1.5e7, 2.5e7]}}]}
    told = " ".join(sentences(assumed, answer))
    assert "inside the band" in told
    assert "does not hold here" in told
    right = Law("right", Power(2.0, 0.5), counts="all", source="", corpus="")
    assert "right holds" in " ".join(sentences(right, answer))
    assert "outside of the band" in " ".join(sentences(Law("r", Power(1.0, 0.7), counts="all", source="", corpus=""), answer))
    assert isinstance(law_named("ratio:20").rule, Ratio)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Best sizes of sqrt(C / 120) in all parameters; the other counts are half and two thirds of those."""
    lines = ["n,n_without_embedding,n_body_and_head,n_flops_6,tokens,flops,loss"]
    for flops in (1e15, 4e15):
        for factor in (0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.3):
            n = factor * math.sqrt(flops / 120)
            loss = 3.0 - 0.05 * math.log10(flops) + 0.1 * math.log(factor) ** 2
            lines.append(f"{n},{n / 2},{n / 2},{n / 1.5},{flops / 6 / n},{flops},{loss}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_table(path)


@pytest.mark.parametrize(("counts", "share"), [("all", 1.0), ("body", 0.5), ("without embedding", 0.5), ("flops/6", 1 / 1.5)])
def test_what_was_found_is_compared_in_the_count_of_the_law_that_was_assumed(table: Table, counts: Counted, share: float) -> None:
    answer = answer_of(table, law="isoflop", question=Question(count="n"))
    for off, words in ((1.0, "assumed holds"), (1 / share if share < 1 else 2.0, "does not hold here")):
        told, assumed = compared(Law("assumed", Power(off * share / math.sqrt(120), 0.5), counts, source="", corpus=""), answer, table)
        assert words in told[-1]
        assert assumed["count"] == COLUMN_OF[counts]
        assert [one["n_found"] / one["n"] for one in assumed["optima"]] == pytest.approx([1 / off] * 2, rel=0.02)
    assert (counts in told[0]) == (counts != "all")


def test_no_verdict_is_given_where_a_count_has_no_minimum(table: Table) -> None:
    law = Law("assumed", Power(1.0, 0.5), "flops/6", source="", corpus="")
    flat = replace(table, columns={**table.columns, "n_flops_6": tuple("1000" for _ in table.lines)})
    told, assumed = compared(law, answer_of(table, law="isoflop"), flat)
    assert told[0].startswith("no verdict on assumed")
    assert (len(told), assumed["optima"]) == (1, [])


DONE = Standing("done", "cosine", step=100, num_steps=100, lr_share=0.0)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Standing("short", "cosine", step=60, num_steps=100, lr_share=0.4), "short stands at step 60 of 100"),
        (Standing("short", "cosine", step=60, num_steps=100, lr_share=0.4), "a cosine cut short"),
        (Standing("hot", "wsd", step=60, num_steps=100, lr_share=1.0), "cooldown is not over"),
        (Standing("flat", "constant", step=100, num_steps=100, lr_share=1.0, final_share=1.0), "flat ended at 100% of its peak"),
    ],
)
def test_a_run_that_was_cut_short_is_named_where_runs_are_compared(run: Standing, words: str) -> None:
    assert any(words in line for line in unequal([DONE, run]))


def test_runs_that_are_alike_are_compared_in_silence() -> None:
    flat = Standing("flat", "constant", step=100, num_steps=100, lr_share=1.0, final_share=1.0)
    assert unequal([DONE, replace(DONE, name="other", kind="wsd")]) == []
    assert unequal([flat, flat]) == []
    assert unequal([replace(DONE, lr_share=0.1, final_share=0.1)]) == []


@settings(max_examples=30)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=4), st.floats(1e4, 1e7))
def test_probes_train_equal_tokens_in_whole_steps(factors: list[int], tokens: float) -> None:
    found = probes(batch=16, lr=1e-3, seq_len=128, tokens=tokens, factors=(1, *factors))
    assert len({probe.batch * probe.num_steps for probe in found}) == 1
    assert [probe.lr / math.sqrt(probe.factor) for probe in found] == pytest.approx([1e-3] * len(found))


def test_the_critical_batch_is_the_last_before_the_loss_rises() -> None:
    losses = [ProbedLoss(4096, 3.020), ProbedLoss(1024, 3.000), ProbedLoss(2048, 3.004), ProbedLoss(8192, 3.001)]
    verdict = judge(losses, tolerance=0.01)
    assert (verdict.within_tokens, verdict.beyond_tokens) == (2048, 4096)
    assert judge(losses, tolerance=0.5).beyond_tokens is None
    assert judge(losses, tolerance=0.5).within_tokens == 8192
    assert judge([ProbedLoss(1, 3.0), ProbedLoss(2, 3.5)]).within_tokens == 1
    with pytest.raises(DataError):
        judge(losses[:1])


@pytest.mark.parametrize("factors", [(1,), (2, 4)])
def test_probes_need_the_run_s_own_batch_and_another(factors: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        probes(batch=16, lr=1e-3, seq_len=128, tokens=1e5, factors=factors)
