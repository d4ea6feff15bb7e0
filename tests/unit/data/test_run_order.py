"""The order of whole runs: stages at any sample, exhausted sources, blocks; every answer against counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot.data.source_order as source_order
from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.sections import SourceSection
from surefoot.core.stages import Stage
from surefoot.data.recipe import unit_of
from surefoot.data.run_order import RunOrder, Sample
from surefoot.data.segments import Recipe
from surefoot.data.steps import StepPlan

NAMES = ("web", "code", "books")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_order, "WINDOW_UNITS", 4)


def stage(first: int, weights: tuple[float, ...], seq_len: int = 8) -> Stage:
    return Stage(first, tuple(zip(NAMES, weights, strict=False)), seq_len, 1e4, 1e-3)


def order_of(
    recipe: Recipe, *, tokens: dict[str, int] | None = None, blocks: tuple[Block, ...] = (), skipped: tuple[tuple[int, int], ...] = ()
) -> RunOrder:
    steps = StepPlan(global_batch_size=4, skipped=skipped)
    return RunOrder(recipe, tokens=tokens or dict.fromkeys(NAMES, 200), steps=steps, blocks=blocks)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 150), max_size=3)))]
    weights = st.tuples(*[st.integers(0, 5)] * 3).filter(any)
    stages = tuple(stage(first, draw(weights), draw(st.sampled_from([2, 4, 8]))) for first in firsts)
    policies = {
        name: SourceSection(name=name, exhaustion=draw(st.sampled_from(["repeat", "redistribute"])), max_epochs=draw(st.integers(0, 2)))
        for name in NAMES
    }
    return Recipe(draw(st.integers(0, 99)), stages, policies, 8, draw(st.sampled_from([0.0, 0.1])))


TOKENS = st.fixed_dictionaries({name: st.integers(25, 240) for name in NAMES})
BLOCKS = st.lists(
    st.builds(
        lambda source, start, length, mode, sample: Block(
            "document", "d", mode, (TokenSpan(source, start, start + length),), effective_sample=sample
        ),
        st.sampled_from(NAMES),
        st.integers(0, 20),
        st.integers(1, 30),
        st.sampled_from(["mask", "replace"]),
        st.integers(0, 60),
    ),
    max_size=2,
)


def drawn(order: RunOrder, *, until: int = 200) -> list[Sample]:
    return order.at(np.arange(min(until, order.ends_at if order.ends_at is not None else until)))


@settings(max_examples=40, deadline=None)
@given(recipes(), TOKENS)
def test_nothing_is_repeated_and_counts_are_right_over_any_stages(recipe: Recipe, tokens: dict[str, int]) -> None:
    order = order_of(recipe, tokens=tokens)
    seen: set[tuple[str, int, int]] = set()
    counts: Counter[str] = Counter()
    for sample in drawn(order):
        assert order.given(sample.sample) == {name: counts[name] for name in NAMES}
        counts[sample.source] += 1
        for start, length in sample.spans:
            here = {(sample.source, sample.epoch, token) for token in range(start, start + length)}
            assert not here & seen
            seen |= here


@settings(max_examples=40, deadline=None)
@given(recipes(), TOKENS, BLOCKS, st.sampled_from(NAMES), st.integers(0, 20), st.integers(1, 40), st.integers(0, 60))
def test_when_a_token_comes_is_found_back(
    recipe: Recipe, tokens: dict[str, int], blocks: list[Block], source: str, start: int, length: int, first: int
) -> None:
    order = order_of(recipe, tokens=tokens, blocks=tuple(blocks))
    samples = drawn(order)
    wanted = [
        sample.sample
        for sample in samples
        if sample.sample >= first
        and sample.source == source
        and any(begin < start + length and begin + count > start for begin, count in sample.spans)
    ]
    assert order.holding(source, start, start + length, first=first, until=len(samples)).tolist() == wanted


@settings(max_examples=30, deadline=None)
@given(recipes(), TOKENS, st.integers(0, 150), st.tuples(*[st.integers(0, 5)] * 3).filter(any), st.sampled_from([2, 4, 8]))
def test_a_stage_that_is_added_moves_nothing_before_it(
    recipe: Recipe, tokens: dict[str, int], first: int, weights: tuple[int, ...], seq_len: int
) -> None:
    """In the middle of a block of the pattern, of a window, of an epoch."""
    first = max(first, recipe.stages[-1].first_sample + 1)
    more = replace(recipe, stages=(*recipe.stages, stage(first, weights, seq_len)))
    assert drawn(order_of(more, tokens=tokens), until=first) == drawn(order_of(recipe, tokens=tokens), until=first)


def test_a_stage_at_8000_repeats_nothing_and_keeps_the_shares() -> None:
    """Blocks of a fixed length that were shuffled whole repeated 165 samples at a stage that began inside one."""
    recipe = Recipe(3, (stage(0, (7, 2, 1), 2), stage(8000, (1, 1, 2), 2)), {}, 2)
    order = order_of(recipe, tokens=dict.fromkeys(NAMES, 40_001))
    given_before, given_after = order.given(8000), order.given(12_000)
    assert given_before == {"web": 5600, "code": 1600, "books": 800}
    assert {name: given_after[name] - given_before[name] for name in NAMES} == {"web": 1000, "code": 1000, "books": 2000}
    samples = order.at(np.arange(12_000))
    assert len({(sample.source, sample.epoch, sample.spans) for sample in samples}) == 12_000
    assert planned_and_realised(order, samples[:8000]) < 2


def planned_and_realised(order: RunOrder, samples: list[Sample]) -> float:
    counts = Counter(sample.source for sample in samples)
    return max(abs(counts[name] - share * len(samples)) for name, share in order.planned_shares(0).items())


def test_a_stage_that_changes_only_rates_leaves_the_order_alone() -> None:
    base = stage(0, (7, 2, 1))
    rate = replace(base, first_sample=33, lr=1e-4)
    assert drawn(order_of(Recipe(3, (base, rate), {}, 8))) == drawn(order_of(Recipe(3, (base,), {}, 8)))


@pytest.mark.parametrize(("exhaustion", "ends_at"), [("repeat", None), ("redistribute", None), ("stop", 50)])
def test_a_source_that_is_used_up_takes_its_policy(exhaustion: str, ends_at: int | None) -> None:
    code = SourceSection(name="code", exhaustion=exhaustion, max_epochs=0)  # type: ignore[arg-type]  # parametrized by its words
    order = order_of(Recipe(3, (stage(0, (1, 1, 0)),), {"code": code}, 8))  # 24 samples each
    assert (order.ends_at is None) == (ends_at is None)
    if order.ends_at is not None:
        assert order.ended_by == "code"
        assert 46 <= order.ends_at <= 50
        with pytest.raises(DataError, match="code used up"):
            order.at([order.ends_at])
        return
    later = Counter(sample.source for sample in order.at(np.arange(60, 100)))
    assert (later["code"] > 0) == (exhaustion == "repeat")
    assert order.planned_shares(60)["web"] == (0.5 if exhaustion == "repeat" else 1.0)


def test_a_blocked_sample_is_replaced_from_the_reserve_and_nothing_else_moves() -> None:
    recipe = Recipe(3, (stage(0, (1, 1, 1)),), {}, 8, reserve_fraction=0.1)
    before = drawn(order_of(recipe))
    victim = before[40]
    start = victim.spans[0][0] + 3
    block = Block("document", "d", "replace", (TokenSpan(victim.source, start, start + 1),), effective_sample=30)
    after = drawn(order_of(recipe, blocks=(block,)))
    changed = [sample for sample, other in zip(before, after, strict=True) if sample != other]
    assert {(sample.source, sample.spans) for sample in changed} == {(victim.source, victim.spans)}
    assert all(sample.sample >= 30 for sample in changed)
    for sample in changed:
        drawn_then = {other.spans for other in before if (other.source, other.epoch) == (sample.source, sample.epoch)}
        assert after[sample.sample].spans not in drawn_then, "the reserve is text that is not drawn"


def test_skipped_samples_are_in_no_total() -> None:
    order = order_of(Recipe(3, (stage(0, (1, 1, 1)), stage(50, (1, 1, 1), 4)), {}, 8), skipped=((20, 30), (45, 55)))
    assert order.tokens_before(20) == order.tokens_before(30) == 160
    assert order.tokens_before(60) == (20 + 15) * 8 + 5 * 4


def test_lengths_that_do_not_divide_and_lengths_beyond_the_unit_are_refused() -> None:
    stages = (stage(0, (1,), 8), stage(10, (1,), 16))
    assert unit_of(stages, max_seq_len=0) == 16
    assert unit_of(stages, max_seq_len=32) == 32
    assert unit_of(stages[:1], max_seq_len=0, begun_with=16) == 16
    with pytest.raises(ConfigError, match="does not divide 24"):
        unit_of(stages, max_seq_len=24)
    with pytest.raises(ConfigError, match="draws its samples in units of 8"):
        unit_of(stages, max_seq_len=0, begun_with=8)


def test_a_stage_over_a_source_that_is_not_there_is_refused() -> None:
    wrong = Stage(40, (("web", 1.0), ("wiki", 1.0)), 8, 1e4, 1e-3)
    with pytest.raises(DataError, match="no source 'wiki'") as caught:
        order_of(Recipe(3, (stage(0, (1, 1, 1)), wrong), {}, 8))
    assert caught.value.where == "[[stage]] at sample 40"
