"""Which samples each step takes, against walking step by step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.steps import StepPlan

RANGES = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=2, unique_by=lambda entry: entry[0]),
    st.lists(st.integers(1, 80), max_size=3),
    RANGES,
)
def test_the_table_equals_walking(batch: int, later: list[tuple[int, int]], edges: list[int], ranges: list[tuple[int, int]]) -> None:
    skipped = [(first, first + length) for first, length in ranges]
    plan = StepPlan(global_batch_size=batch, later=later, edges=edges, skipped=skipped)
    taken: list[int] = []
    first = 0
    for step in range(60):
        samples = plan.samples(first).tolist()
        assert plan.span(step) == (samples[0], len(samples))
        assert {plan.step_at(sample) for sample in samples} == {step}
        assert not any(samples[0] < edge <= samples[-1] for edge in edges), "one forward has one shape"
        size = [size for start, size in sorted([(-1, batch), *later]) if start <= samples[0]][-1]
        assert len(samples) == size or any(samples[-1] < edge for edge in edges)
        taken += samples
        first = samples[-1] + 1
    left_out = {sample for start, end in skipped for sample in range(start, end)}
    assert taken == [sample for sample in range(first) if sample not in left_out]
