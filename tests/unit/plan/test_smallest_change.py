"""The nearest layout that can be run, where a given one cannot."""

from __future__ import annotations

from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.smallest_change import smallest_change
from surefoot.plan.records import BF16_MASTERS, Layout, Workload
from tests.unit.plan.models import LLAMA_8B

H100 = accelerator("h100")


def test_one_axis_is_changed_where_one_is_wrong() -> None:
    for wrong, right in (
        (Layout(ep=4, tp=8, pp=8, dp_shard=8), Layout(tp=8, pp=8, dp_shard=8)),
        (Layout(tp=16, pp=4, dp_shard=8), Layout(tp=8, pp=4, dp_shard=16)),
        (Layout(pp=64, dp_shard=8), Layout(pp=32, dp_shard=16)),
    ):
        (change,) = smallest_change(Workload(LLAMA_8B, 4096, 1024, BF16_MASTERS), H100, 512, layout=wrong)
        told = change.judged.layout
        assert (told.ep, told.tp, told.pp, told.dp_shard) == (right.ep, right.tp, right.pp, right.dp_shard), change.what
