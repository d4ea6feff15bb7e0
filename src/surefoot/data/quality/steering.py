"""What a run makes of its data, for the report: the mixture that was planned beside the one it got, and what is blocked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.blocking import Block
from surefoot.core.stages import Stage
from surefoot.data.manifest import Manifest
from surefoot.data.recipe import RunOrder


def mix_report(order: RunOrder, *, next_sample: int) -> dict[str, Any]:
    """Stage by stage up to global sample `next_sample`: shares of samples as they were asked for, and as they are."""
    stages = [stage for stage in order.recipe.stages if stage.first_sample < next_sample]
    ends = [*(stage.first_sample for stage in stages[1:]), next_sample]
    told = []
    for stage, end in zip(stages, ends, strict=True):
        before, after = order.given(stage.first_sample), order.given(end)
        samples = {name: after[name] - before[name] for name in order.names}
        told.append(
            {
                "first_sample": stage.first_sample,
                "end_sample": end,
                "planned": planned_shares(stage, names=order.names),
                "realised": _shares(samples),
                "samples": samples,
            }
        )
    return {"next_sample": next_sample, "stages": told, "epochs": order.epochs_by(next_sample) if next_sample else {}}


def planned_shares(stage: Stage, *, names: Sequence[str]) -> dict[str, float]:
    """As the config gives them; without a word about sources all are alike."""
    weights = dict(stage.weights) or dict.fromkeys(names, 1.0)
    return _shares({name: weights.get(name, 0.0) for name in names})


def blocks_report(blocks: Sequence[Block], *, order: RunOrder, manifest: Manifest, num_open: int) -> dict[str, Any]:
    """`tokens` are of the spans that the entries name, counted once for each entry; `num_open` wishes are not taken yet.

    Samples are those that no step of `order` takes: what a step had taken before the entry was known is not skipped.
    """
    tokens: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    for block in blocks:
        for span in block.spans:
            tokens[block.mode] += span.end - span.start
            by_source[span.source] += span.end - span.start
    totals = {name: entry.splits["train"].tokens for name, entry in manifest.sources.items()}
    return {
        "entries": len(blocks),
        "open": num_open,
        "by_kind": dict(Counter(block.kind for block in blocks)),
        "masked_tokens": tokens["mask"],
        "replaced_tokens": tokens["replace"],
        "skipped_samples": sum(end - first for first, end in order.steps.skipped),
        "share_of_source": {name: by_source[name] / totals[name] for name in by_source if totals.get(name)},
        "newest": [{"kind": block.kind, "name": block.name, "mode": block.mode, "reason": block.reason} for block in blocks[-10:]],
    }


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total if total else 0.0 for name, amount in amounts.items()}
