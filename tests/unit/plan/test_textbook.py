"""The textbook: every rule has its figures, they are the right ones, and the page is what the code says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from surefoot.plan.textbook import page as page
from surefoot.plan.textbook.memory import korthikanti_bytes
from surefoot.plan.textbook.recovery import device_hours
from surefoot.plan.textbook.row import Chapter, short
from surefoot.plan.textbook.stability import false_alarms_of_five, k_for, student_t_tails

ROWS = {row.key: row for row in page.textbook()}

# Worked out apart from this code: by hand, by another program, or printed by those who are cited.
FIGURES = [
    ("budget-of-a-month", "flops", 1.0258e24, 1e-3),
    ("budget-of-a-month", "mfu", 0.078, 0.01),
    ("budget-of-a-month", "devices", 195, 0.0),
    ("budget-of-a-month", "days", 5.85, 0.01),
    ("square-root-of-c-over-120", "n", 40.8e9, 0.01),
    ("square-root-of-c-over-120", "epoch_n", 42.3e9, 0.01),
    ("square-root-of-c-over-120", "epoch_loss", 2.007, 1e-3),
    ("seven-billion-on-2e23", "tokens", 4.762e12, 1e-3),
    ("seven-billion-on-2e23", "ratio", 680.3, 1e-3),
    ("seven-billion-on-2e23", "loss", 2.0468, 1e-3),
    ("seven-billion-on-2e23", "equal_flops", 6.9e22, 0.03),
    ("square-root-at-1e24", "n", 91.3e9, 1e-3),
    ("constants-of-approach-3", "rounded", 92.6, 0.01),
    ("constants-of-approach-3", "corrected", 17.9, 0.01),
    ("kaplan-ratio", "at_1e21", 2.8, 0.02),
    ("kaplan-ratio", "at_1e23", 0.33, 0.02),
    ("six-n-d-within-ten-per-cent", "s4096", 0.0797, 0.01),
    ("modern-ratios", "large", 38.5, 0.01),
    ("experts", "optimum", 96, 0.01),
    ("experts", "trained", 135, 0.01),
    ("critical-batch", "by_loss", 7.4e6, 0.01),
    ("critical-batch", "step_law", 10.0e6, 0.02),
    ("static-memory-of-7b", "bf16", 112e9, 0.0),
    ("static-memory-of-7b", "fp32", 126e9, 0.0),
    ("states-on-8x8x8", "weights", 218.75e6, 0.0),
    ("states-on-8x8x8", "optimizer", 164.0625e6, 0.0),
    ("activations-with-recomputation", "plain", 2.28e9, 0.01),
    ("activations-with-recomputation", "interleaved", 3.28e9, 0.01),
    ("activations-with-recomputation", "without_sequence_parallel", 6.98e9, 0.01),
    ("activations-with-recomputation", "full", 0.134e9, 0.01),
    ("activations-with-recomputation", "full_whole", 1.07e9, 0.01),
    ("footprint-on-8x8x8", "model", 3.1e9, 0.15),
    ("bubble", "of_ideal", 0.21875, 1e-9),
    ("bubble", "of_total", 0.1795, 1e-3),
    ("bubble-interleaved", "told", 0.09375, 1e-9),
    ("bubble-interleaved", "of_ideal", 0.109375, 1e-9),
    ("two-v-times-p-minus-one", "needed_v1", 40, 0.0),
    ("two-v-times-p-minus-one", "needed_v2", 20, 0.0),
    ("two-v-times-p-minus-one", "needed_v4", 10, 0.0),
    ("two-v-times-p-minus-one", "legal_v2", 24, 0.0),
    ("two-v-times-p-minus-one", "legal_v4", 16, 0.0),
    ("sharded-70b", "weights", 2.19e9, 0.01),
    ("sharded-70b", "states_low", 17.5e9, 0.01),
    ("sharded-70b", "states_high", 19.7e9, 0.01),
    ("million-tokens", "without", 106e9, 0.01),
    ("million-tokens", "with", 34.8e9, 0.01),
    ("million-tokens", "full", 164e9, 0.01),
    ("expert-ranks-multiply", "devices", 512, 0.0),
    ("failures-of-llama-3", "mtbf_h", 3.09, 0.01),
    ("shard-of-a-70b-checkpoint", "total", 980e9, 1e-9),
    ("shard-of-a-70b-checkpoint", "rebuilt_per_rank", 1.64e9, 0.01),
    ("flush-to-a-local-disk", "alone_s", 0.19, 0.01),
    ("flush-to-a-local-disk", "shared_s", 1.53, 0.01),
    ("flush-to-a-local-disk", "pcie5_s", 0.035, 0.01),
    ("flush-to-a-local-disk", "pcie4_s", 0.077, 0.01),
    ("flush-to-a-local-disk", "unpinned_s", 0.24, 0.01),
    ("three-generations", "peak", 3.92e12, 1e-9),
    ("rollback-of-300-steps", "hours", 54, 0.01),
    ("rollback-of-300-steps", "usd", 163, 0.01),
    ("the-checkpoint-of-step-8000", "needed", 5, 0.0),
    ("the-checkpoint-of-step-8000", "oldest_kept", 9000, 0.0),
    ("five-hundred-steps-in-dollars", "usd_7b", 44, 0.01),
    ("five-hundred-steps-in-dollars", "usd_70b", 442, 0.01),
    ("five-hundred-steps-in-dollars", "usd_405b", 2559, 0.01),
    ("five-hundred-steps-in-dollars", "size", 475e9, 0.01),
    ("ten-thousand-steps-of-13b", "hours_1m", 548, 0.01),
    ("ten-thousand-steps-of-13b", "hours_4m", 2191, 0.01),
    ("ten-thousand-steps-of-13b", "tokens", 146e3, 0.01),
    ("recompute-of-100-steps", "steps", 67, 0.0),
    ("cost-of-a-canary", "small_low", 0.00044, 0.01),
    ("cost-of-a-canary", "small_high", 0.00055, 0.01),
    ("cost-of-a-canary", "many_low", 0.007, 0.01),
    ("cost-of-a-canary", "many_high", 0.035, 0.01),
    ("resume-on-fewer-devices", "each", 42.67, 1e-3),
    ("interval-in-steps", "stall_1s", 151, 0.01),
    ("interval-in-steps", "stall_10s", 478, 0.01),
    ("canary-at-two-sigma", "five", 0.142, 0.01),
    ("canary-at-two-sigma", "known", 0.0455, 0.01),
    ("gradient-norm-leads", "lead", 3, 0.0),
    ("adam-is-twice-the-parameters", "bytes", 6, 0.0),
    ("gradient-over-five-means", "lifted", 29, 0.01),
    ("canary-in-its-own-window", "most", 1.789, 1e-3),
    ("canary-in-its-own-window", "most_population", 2.0, 1e-9),
    ("canary-in-its-own-window", "ramp", 1.897, 1e-3),
    ("canary-in-its-own-window", "k", 9.43, 1e-3),
    ("canary-worked-example", "implied", 0.028, 0.01),
    ("skip-while-over-six-sigma", "small", 4, 0.25),
    ("skip-while-over-six-sigma", "large", 4, 0.0),
    ("statistics-with-a-nan", "blind", 128, 0.0),
    ("z-score-with-itself", "most", 11.2, 0.01),
    ("ten-times-the-first-hundred", "threshold", 108, 0.01),
    ("global-norm-on-two-ranks", "difference", 0.0, 0.0),
    ("loss-and-norm-tell-corruption", "shift", 1.25e-4, 1e-3),
]


@pytest.mark.parametrize(("key", "name", "figure", "tolerance"), FIGURES)
def test_figures(key: str, name: str, figure: float, tolerance: float) -> None:
    assert ROWS[key].figures[name] == pytest.approx(figure, rel=tolerance)


def test_every_row_is_whole_and_has_its_own_key() -> None:
    rows = page.textbook()
    assert len(rows) == len(ROWS) == 60
    for row in rows:
        assert all((row.claim, row.right, row.why, row.source, row.figures)), row.key
        assert ("measured" in row.basis) == ("measured" in f"{row.right} {row.why}" or row.basis == "measured"), row.key


def test_the_page_is_current() -> None:
    written = (Path(__file__).parents[3] / "docs" / "textbook.md").read_text()
    assert written == page.markdown(), "run: python -m surefoot.plan.textbook > docs/textbook.md"


def test_a_changed_row_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = page.markdown()
    chapter = page.chapters()[0]
    changed = Chapter(chapter.title, (replace(chapter.rows[0], right="a | b <c>"), *chapter.rows[1:]))
    monkeypatch.setattr(page, "chapters", lambda: (changed, *page_chapters[1:]))
    assert page.markdown() != before
    assert "a \\| b &lt;c>" in page.markdown()


page_chapters = page.chapters()


def test_the_terminal_form_has_every_rule_and_fits() -> None:
    lines = list(page.terminal_lines())
    assert max(map(len, lines)) <= 120
    told = " ".join(" ".join(lines).split())
    assert all(" ".join(row.claim.split()) in told for row in page.textbook())
    assert lines[0].startswith("60 rules: ")


def test_student_t_with_four_degrees_of_freedom() -> None:
    """Printed quantiles: 2.776 at 5%, 4.604 at 1%, 8.610 at 0.1%, two-sided."""
    for t, tails in ((2.776, 0.05), (4.604, 0.01), (8.610, 0.001)):
        assert student_t_tails(t) == pytest.approx(tails, rel=1e-3)
    assert false_alarms_of_five(k_for(0.01)) == pytest.approx(0.01)


def test_activations_of_a_layer() -> None:
    """arXiv 2205.05198, table 2, without the scores: s b h (34 / t), s b h (10 + 24 / t), 2 s b h."""
    kept = partial(korthikanti_bytes, seq_len=2048, width=12_288, tp=8)
    assert kept() == 2048 * 12_288 * 34 / 8
    assert kept(sequence_parallel=False) == 2048 * 12_288 * 13
    assert kept(sequence_parallel=False, full_recompute=True) == 2048 * 12_288 * 2


def test_prices_are_linear() -> None:
    assert device_hours(2e9, tokens=3e9) == pytest.approx(6 * device_hours(1e9, tokens=1e9))


@pytest.mark.parametrize(("value", "text"), [(1.02e24, "1.02e+24"), (40.8e9, "40.8B"), (8.16e11, "816B"), (4.76e12, "4.76T"), (3.0, "3")])
def test_numbers_are_shown_short(value: float, text: str) -> None:
    assert short(value) == text
