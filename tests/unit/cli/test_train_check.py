"""Go or no-go: each reason alone is enough, and all of them are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.cli.train_check_page import Found, as_json, checks_of, kept_checkpoints, lines_of
from surefoot.core.sections import CheckpointSection, ParallelSection, RunConfig, TrainSection

GOOD = Found(
    RunConfig(parallel=ParallelSection(dp_replicate=2)),
    peaks={0: 1 << 30, 1: 1 << 30},
    step_s=0.5,
    first_step_s=2.0,
    exchange_s=0.01,
    checkpoint_bytes=1 << 20,
    write_bytes_per_s=1e8,
    free_bytes=1 << 30,
    versions={"torch": "2.13"},
    limits="worst-case detection: dead rank 0.2 s",
)


def test_a_run_that_can_start() -> None:
    checks = checks_of(GOOD)
    assert all(one.ok for one in checks)
    told = as_json(GOOD, checks)
    assert told["reasons"] == []
    assert told["storage"]["needed_bytes"] == kept_checkpoints(GOOD.config) << 20
    page = "\n".join(lines_of(GOOD, checks))
    assert "torch 2.13" in page
    assert "worst-case detection" in page
    assert "NO" not in page


@pytest.mark.parametrize(
    ("found", "name", "words"),
    [
        (replace(GOOD, problem="the run ended with 4: no text"), "steps", "no text"),
        (replace(GOOD, peaks={0: 1}), "ranks", "1 of 2 met"),
        (replace(GOOD, free_bytes=1000), "room", "1000 B are free"),
        (replace(GOOD, refused="Disk quota exceeded"), "room", "Disk quota exceeded"),
        (replace(GOOD, checkpoint_bytes=None), "room", "no checkpoint was committed"),
        (replace(GOOD, write_bytes_per_s=None), "writing", "could not be written"),
        (replace(GOOD, write_bytes_per_s=1000.0), "writing", "the limit is"),
    ],
)
def test_each_reason_alone_is_a_no_go(found: Found, name: str, words: str) -> None:
    checks = checks_of(found)
    (bad,) = [one for one in checks if not one.ok]
    assert bad.name == name
    assert words in bad.found
    assert bad.hint
    assert as_json(found, checks)["reasons"] == [f"{name}: {bad.found}"]
    assert bad.hint in "\n".join(lines_of(found, checks))


def test_what_is_kept_for_good_counts_too() -> None:
    kept = CheckpointSection(keep_last=3, milestone_steps=100, keep_steps=(5, 7))
    assert kept_checkpoints(RunConfig(train=TrainSection(num_steps=1000), checkpoint=kept)) == 3 + 1 + 10 + 2
    assert kept_checkpoints(RunConfig(checkpoint=replace(kept, milestone_steps=0, keep_steps=()))) == 4
