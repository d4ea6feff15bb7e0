"""Plans as a whole: the flagship, a small one, one that cannot be had, and that their parts add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.answer import answer_of
from surefoot.plan.compose import make_plan
from surefoot.plan.composed import Plan
from surefoot.plan.hardware import accelerator
from surefoot.plan.page import WIDTH, markdown_page, terminal_page
from surefoot.plan.request import Aim, Cluster, Request
from surefoot.plan.sizing.published import law

FLAGSHIP = Request(Cluster(accelerator("h100"), 1000), Aim(days=30, mfu=0.4, served_tokens=1e13))
SMALL = Request(Cluster(accelerator("cpu"), 2, dtype="fp32"), Aim(flops=2e13))


@pytest.fixture(scope="module")
def flagship() -> Plan:
    return make_plan(FLAGSHIP, law=law("epoch"))


@pytest.fixture(scope="module")
def small() -> Plan:
    return make_plan(SMALL, law=law("epoch"))


def test_a_thousand_devices_for_a_month_served_ten_trillion_tokens(flagship: Plan) -> None:
    answer = answer_of(flagship)
    assert answer["budget"]["flops"] == pytest.approx(1.0258e24, rel=1e-3)
    assert 0.95 < answer["budget"]["goodput"] < 0.99
    assert 27e9 < answer["choice"]["n"] < 50e9
    assert answer["choice"]["tokens"] == pytest.approx(4.0e12, rel=0.05)
    assert answer["choice"]["over_best"] == pytest.approx(0.0065, abs=0.001)
    assert 600e9 > answer["checkpoint"]["bytes"]["total"] > 400e9
    assert answer["checkpoint"]["interval_s"] == pytest.approx(604, rel=0.05)
    assert 13 < answer["reliability"]["failures"]["low"] < answer["reliability"]["failures"]["high"] < 27
    assert 6e6 < answer["training"]["batch_tokens"] < 11e6


def test_what_the_parts_say_adds_up(flagship: Plan) -> None:
    layout, budget = flagship.layout.layout, flagship.model.budget
    assert layout.num_devices + flagship.num_idle == budget.num_devices == 1000
    assert flagship.training.batch.batch % layout.data_ranks == 0
    assert flagship.model.cost.exact == pytest.approx(budget.flops, rel=0.01)
    assert 6 * flagship.model.frontier.choice.n * flagship.model.tokens == pytest.approx(flagship.model.law_flops, rel=1e-6)
    trained = flagship.training.num_steps * flagship.training.batch.batch * flagship.model.seq_len
    assert trained >= flagship.model.tokens * 0.999
    assert flagship.layout.memory.total < flagship.request.cluster.accelerator.memory_bytes
    assert flagship.layout.legal


def test_every_number_that_is_told_has_a_reason(flagship: Plan) -> None:
    model = ("budget.flops", "budget.mfu", "choice.n", "choice.tokens", "choice.loss", "layout", "layout.step_s", "layout.memory")
    training = ("training.global_batch_size", "training.lr", "training.warmup_steps")
    saves = ("checkpoint.interval_s", "checkpoint.retention", "checkpoint.bytes")
    for path in (*model, *training, *saves, "reliability.failures", "reliability.goodput", "reliability.cost"):
        assert flagship.reasons[path].why, path
        assert flagship.reasons[path].source, path


def test_a_plan_without_a_sweep_is_stamped(flagship: Plan) -> None:
    assert any("not validated" in warning for warning in flagship.warnings)
    validated = make_plan(FLAGSHIP, law=law("epoch"), validated=True)
    assert not any("not validated" in warning for warning in validated.warnings)
    assert validated.promise.validated


def test_nothing_said_of_serving_shows_both_answers() -> None:
    plan = make_plan(replace(FLAGSHIP, aim=replace(FLAGSHIP.aim, served_tokens=None)), law=law("epoch"))
    marks = [row["mark"] for row in answer_of(plan)["choice"]["alternatives"]]
    assert plan.model.frontier.choice.mark == "least loss"
    assert any("serving" in mark for mark in marks)


def test_a_toy_is_not_promised_a_loss_that_the_law_cannot_know(small: Plan) -> None:
    assert small.promise.loss == 0
    assert any("guessing" in warning for warning in small.warnings)
    assert small.training.lr < 0.02


def test_a_given_layout_is_judged_and_the_textbooks_too() -> None:
    given = make_plan(replace(FLAGSHIP, layout="tp=8,dp=125,zero_stage=1,recompute=full"), law=law("epoch"))
    assert (given.layout.layout.tp, given.layout.layout.data_ranks, given.num_idle) == (8, 125, 0)
    assert given.ranked.layouts
    recipe = make_plan(replace(FLAGSHIP, layout="recipe"), law=law("epoch"))
    assert recipe.recipe is not None
    assert recipe.layout.layout == recipe.recipe.judged.layout


def test_what_cannot_fit_names_the_smallest_change_that_does() -> None:
    request = Request(Cluster(accelerator("h100"), 8), Aim(flops=1e23, n=70e9), layout="tp=8")
    with pytest.raises(PlanInfeasible, match=r"needs .* GiB") as raised:
        make_plan(request, law=law("epoch"))
    assert "smallest change that fits" in raised.value.hint
    with pytest.raises(PlanInfeasible) as raised:
        make_plan(replace(request, layout=""), law=law("epoch"))
    assert "devices instead of 8" in raised.value.hint


@pytest.mark.parametrize(
    ("aim", "where"),
    [
        (Aim(days=30, mfu=1.2), "--mfu"),
        (Aim(days=-1), "--days"),
        (Aim(), "plan"),
        (Aim(flops=1e20, n=1e9, tokens=1e10), "plan"),
        (Aim(flops=1e20, num_experts=8, experts_per_token=9), "--experts"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused(aim: Aim, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(Request(Cluster(accelerator("h100"), 8), aim), law=law("epoch"))
    assert raised.value.where == where
    assert raised.value.hint


def test_more_than_the_peak_is_infeasible() -> None:
    with pytest.raises(PlanInfeasible, match="dense peak"):
        make_plan(Request(Cluster(accelerator("h100"), 8), Aim(flops=1e25, days=30)), law=law("epoch"))


def test_experts_are_planned_on_active_parameters() -> None:
    plan = make_plan(
        Request(Cluster(accelerator("h100"), 512), Aim(flops=1e22, num_experts=64, experts_per_token=8)), law=law("hunyuan-moe")
    )
    sizes = plan.model.sizes
    assert sizes.num_active_parameters == pytest.approx(plan.model.frontier.choice.n, rel=0.03)
    assert sizes.num_parameters > 2 * sizes.num_active_parameters
    assert "not trained" in plan.layout.untrainable


def test_the_page_is_the_same_in_a_terminal_and_in_markdown(flagship: Plan) -> None:
    terminal, markdown = terminal_page(flagship), markdown_page(flagship)
    for title in ("Budget", "What the budget buys", "Model", "Training", "Layout", "Checkpoints", "Failures", "Mind"):
        assert f"\n{title}\n" in terminal
        assert f"\n## {title}\n" in markdown
    assert sum(len(line) > WIDTH for line in terminal.splitlines()) < 20  # tables alone


def test_the_json_is_strict_and_whole(flagship: Plan, small: Plan) -> None:
    for plan in (flagship, small):
        answer = json.loads(strict_json.dumps(answer_of(plan)))
        assert "nonfinite" not in answer
        assert {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "memory", "bubble", "mfu", "step_s"} <= answer["layout"].keys()
        assert {"interval_s", "interval_steps", "retention", "bytes"} <= answer["checkpoint"].keys()
        assert {"failures", "goodput", "cost"} <= answer["reliability"].keys()


def test_a_plan_without_an_mfu_takes_the_time_that_there_is() -> None:
    """The layout's own MFU is that of the budget, so the steps take the days, whatever the size of the cluster."""
    for num_devices, days in ((64, 10.0), (1000, 30.0)):
        plan = make_plan(Request(Cluster(accelerator("h100"), num_devices), Aim(days=days)), law=law("epoch"))
        assert plan.run_s / 86_400 == pytest.approx(days, rel=0.02)
        assert plan.model.budget.mfu == pytest.approx(plan.layout.mfu, rel=0.02)


def test_where_the_days_are_not_what_the_steps_take_it_is_said_first() -> None:
    plan = make_plan(Request(Cluster(accelerator("h100"), 1000), Aim(days=30, n=7e9, tokens=1e12)), law=law("epoch"))
    assert "not 30" in plan.warnings[0]
    assert plan.run_usd < 0.1 * 1000 * 30 * 24 * 3.0


def test_the_layouts_that_are_told_are_under_the_batch_and_model_of_the_plan(flagship: Plan) -> None:
    (same,) = [one for one in flagship.ranked.layouts if one.layout == flagship.layout.layout]
    assert (same.step_s, same.memory) == (flagship.layout.step_s, flagship.layout.memory)
    assert all(one.legal for one in flagship.ranked.layouts)
    assert [one.step_s for one in flagship.ranked.layouts] == sorted(one.step_s for one in flagship.ranked.layouts)


def test_no_plan_takes_a_layout_that_does_not_fit() -> None:
    for num_devices, flops in ((16, 3e20), (24, 1e21), (64, 1e22), (512, 3e23)):
        for mfu in (None, 0.6):
            plan = make_plan(Request(Cluster(accelerator("h100"), num_devices), Aim(flops=flops, mfu=mfu)), law=law("epoch"))
            assert plan.layout.fits
            assert plan.layout.memory.total < plan.request.cluster.accelerator.memory_bytes


def test_the_batch_is_even_on_every_number_of_replicas_that_the_run_may_shrink_to() -> None:
    cluster = Cluster(accelerator("h100"), 512, min_devices=384)
    request = Request(cluster, Aim(n=7e9, tokens=1e12, seq_len=4096), layout="tp=8,pp=8,dp=8")
    plan = make_plan(request, law=law("epoch"))
    assert set(plan.training.batch.waste) == {6, 7, 8}
    assert plan.training.batch.worst_waste == 0
    fixed = make_plan(replace(request, aim=replace(request.aim, global_batch_size=256)), law=law("epoch"))
    assert fixed.training.batch.waste[6] == pytest.approx(1 - 256 / 258)
    assert any("phantoms" in warning for warning in fixed.warnings)
