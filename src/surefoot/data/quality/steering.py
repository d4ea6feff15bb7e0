"""What a run makes of its data, for the report: the mixture that was planned beside the one it got, and what is blocked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.blocking import Block
from surefoot.core.stages import Stage
from surefoot.data.manifest import Manifest
from surefoot.data.provenance import merged
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
                "planned": _planned(stage, order=order),
                "realised": _shares(samples),
                "samples": samples,
            }
        )
    return {"next_sample": next_sample, "stages": told, "epochs": order.epochs_by(next_sample) if next_sample else {}}


def _planned(stage: Stage, *, order: RunOrder) -> dict[str, float]:
    """As the config gives them; without a word about sources each gives in proportion to what it held when the run began."""
    weights = dict(stage.weights) or dict(zip(order.names, map(float, order.segments.turns[0].weights), strict=True))
    return _shares({name: weights.get(name, 0.0) for name in order.names})


def blocks_report(blocks: Sequence[Block], *, order: RunOrder, manifest: Manifest, num_open: int) -> dict[str, Any]:
    """Tokens that several entries name count once; `num_open` wishes are not taken yet.

    Samples are those that no step of `order` takes: what a step had taken before the entry was known is not skipped.
    """
    masked = merged(span for block in blocks if block.mode == "mask" for span in block.spans)
    replaced = merged(span for block in blocks if block.mode == "replace" for span in block.spans)
    by_source: Counter[str] = Counter()
    for span in merged([*masked, *replaced]):
        by_source[span.source] += span.end - span.start
    totals = {name: entry.splits["train"].tokens for name, entry in manifest.sources.items()}
    return {
        "entries": len(blocks),
        "open": num_open,
        "by_kind": dict(Counter(block.kind for block in blocks)),
        "masked_tokens": sum(span.end - span.start for span in masked),
        "replaced_tokens": sum(span.end - span.start for span in replaced),
        "skipped_samples": sum(end - first for first, end in order.steps.skipped),
        "share_of_source": {name: by_source[name] / totals[name] for name in by_source if totals.get(name)},
        "newest": [{"kind": block.kind, "name": block.name, "mode": block.mode, "reason": block.reason} for block in blocks[-10:]],
    }


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total if total else 0.0 for name, amount in amounts.items()}
