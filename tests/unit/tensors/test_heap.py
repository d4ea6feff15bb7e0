"""Freed pages stay: seen by the number of page faults of a fresh process, not by a clock."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import resource, sys, torch
from surefoot.tensors.heap import keep_freed_pages
torch.set_num_threads(1)
kept = keep_freed_pages() if sys.argv[1] == "keep" else None
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    return float((torch.full((10 << 20,), 2.0) * 3).sum())
for _ in range(10):
    use()  # small blocks between large ones: it takes some rounds until every size has a place
before = faults()
total = sum(use() for _ in range(10))
print(kept, faults() - before, total)
"""


def faults_and_total(mode: str) -> tuple[str, int, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    kept, faults, total = done.stdout.split()
    return kept, int(faults), float(total)


def test_freed_pages_are_used_again_and_no_value_changes() -> None:
    kept, kept_faults, kept_total = faults_and_total("keep")
    _, plain_faults, plain_total = faults_and_total("plain")
    assert kept == "True"
    assert kept_total == plain_total
    # Ten rounds of two tensors of 40 MiB, above any threshold that glibc adapts to by itself: 204,800 pages of 4 KiB.
    assert kept_faults < plain_faults / 5
