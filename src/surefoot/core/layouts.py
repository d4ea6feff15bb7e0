"""Which layouts can be trained, and the nearest one that can: pure functions over the config, asked before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from surefoot.core.sections import ModelSection, ParallelSection, RunConfig

Refusal = tuple[str, str, str]
"""(setting, what is wrong, what to do)"""

LAYOUT_AXES = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
"""Among equally near layouts, the one that has more of the first of these is proposed."""

MAX_RANKS_SEARCHED = 1 << 14
"""Products of axes are counted out: at 15120 ranks, the worst up to here, that takes a second. Beyond, the number is more likely a slip."""

VOCAB_MULTIPLE = 64
FF_MULTIPLE = 64


def feed_forward_width(model: ModelSection) -> int:
    """d_ff as given, or 8/3 of d_model rounded up."""
    return model.d_ff or -(-8 * model.d_model // (3 * FF_MULTIPLE)) * FF_MULTIPLE


def pipeline_chunks(parallel: ParallelSection) -> int:
    """Pieces of the model on each rank of a pipeline: as given, or the fewest that the schedule works with."""
    return parallel.pp_chunks or (1 if parallel.pp_schedule == "1f1b" else 2)


def topology(parallel: ParallelSection) -> dict[str, int]:
    """What manifests and the ledger say about a layout: its axes, the stage, which decides the order of gradient sums, and how many
    pieces of the model a rank has, which decides what of the norm it sums."""
    told = {name: int(getattr(parallel, name)) for name in ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "zero_stage")}
    return {**told, "pp_chunks": pipeline_chunks(parallel) if parallel.pp > 1 else 1}


def layout_facts(told: Mapping[str, int]) -> dict[str, int]:
    """What of a `topology` decides bits. An axis that is not told is 1, for layouts were once told by their data axes alone.

    Stages 2 and 3 give the same sums; without one, or with stage 1, gradients of sharded parameters were reduced once a step.
    """
    facts = {name: told.get(name, 1) for name in topology(ParallelSection()) if name != "zero_stage"}
    reduced_once = facts["dp_shard"] * facts["cp"] > 1 and told.get("zero_stage", 1) == 1
    return {**facts, "zero_stage": 1} if reduced_once else facts


def refusals(config: RunConfig) -> list[Refusal]:
    """Why this layout cannot be trained; empty when it can. Each hint ends with the nearest layout that can, where there is one."""
    found = list(_broken(config))
    nearest = nearest_legal(config) if found else None
    if nearest is None:
        return found
    way_out = f"nearest legal: {_shown(nearest, config.parallel)}"
    return [(setting, what, f"{hint}; {way_out}" if hint else way_out) for setting, what, hint in found]


def nearest_legal(config: RunConfig) -> ParallelSection | None:
    """The legal layout of the same number of ranks that changes the fewest settings, and those by the smallest factor. Deterministic.

    None when no layout helps: something else of the config refuses them all. None is looked for beyond `MAX_RANKS_SEARCHED`.
    """
    now = config.parallel
    if now.num_ranks > MAX_RANKS_SEARCHED:
        return None
    legal = [parallel for parallel in _candidates(now) if not any(_broken(replace(config, parallel=parallel)))]
    return min(legal, key=lambda parallel: _distance(parallel, now), default=None)


def doubts(config: RunConfig) -> list[str]:
    """What can be trained but is probably not meant, in one sentence each."""
    return [*_without_effect(config.parallel), *_idle_stages(config)]


def _broken(config: RunConfig) -> Iterator[Refusal]:
    yield from _foreign_model(config)
    if not config.model.factory:
        yield from _tensor_cut(config)
        yield from _context_cut(config)
        yield from _stages(config)
    yield from _pipeline_pieces(config.parallel)
    yield from _halved_backward(config.parallel)
    yield from _exact_sums(config)


def _foreign_model(config: RunConfig) -> Iterator[Refusal]:
    if not config.model.factory:
        return
    for axis in ("tp", "cp", "pp"):
        if (size := getattr(config.parallel, axis)) > 1:
            what = f"{axis} = {size}, but how to cut a model of model.factory inside a layer or between layers is not known"
            yield f"parallel.{axis}", what, "share its ranks out over dp_shard and dp_replicate"


def _tensor_cut(config: RunConfig) -> Iterator[Refusal]:
    """Each rank of `tp` has whole heads, whole columns, and its part of the positions (sequence parallel)."""
    model, tp, cp = config.model, config.parallel.tp, config.parallel.cp
    if tp == 1:
        return
    sizes = [("model.num_heads", model.num_heads), ("model.num_kv_heads", model.num_kv_heads or model.num_heads)]
    sizes.append(("model.d_ff" if model.d_ff else "the width of the feed-forward, model.d_ff", feed_forward_width(model)))
    if model.vocab_size:
        sizes.append(("model.vocab_size", model.vocab_size))
    elif VOCAB_MULTIPLE % tp:
        what = f"tp = {tp} may not divide the vocabulary, which is padded to a multiple of {VOCAB_MULTIPLE}"
        yield "parallel.tp", what, f"set model.vocab_size to a multiple of {tp}"
    for name, size in sizes:
        if size % tp:
            yield "parallel.tp", f"tp = {tp} does not divide {name} = {size}", "change either"
    for name, seq_len in _seq_lens(config):
        if seq_len % cp == 0 and seq_len // cp % tp:
            part = f"{name} / cp = {seq_len // cp}" if cp > 1 else f"{name} = {seq_len}"
            yield "parallel.tp", f"tp = {tp} does not divide {part}: its ranks share the positions between layers", "change either"


def _context_cut(config: RunConfig) -> Iterator[Refusal]:
    """Each rank of `cp` has two equal pieces of a sequence, one from its head and one from its tail."""
    cp = config.parallel.cp
    for name, seq_len in _seq_lens(config):
        if cp > 1 and seq_len % (2 * cp):
            what = f"cp = {cp} does not divide {name} = {seq_len} into two equal pieces for each of its ranks"
            yield "parallel.cp", what, "change either"


def _seq_lens(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Every length that a step's sequences may have, and the setting that says so."""
    yield "data.seq_len", config.data.seq_len
    yield from ((f"stage[{index}].seq_len", stage.seq_len) for index, stage in enumerate(config.stage) if stage.seq_len)


def _stages(config: RunConfig) -> Iterator[Refusal]:
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks = pipeline_chunks(parallel)
    if parallel.pp > 1 and parallel.pp * chunks > num_layers:
        pieces = f"pp = {parallel.pp}" + (f" with {chunks} chunks each" if chunks > 1 else "")
        yield "parallel.pp", f"{pieces} needs {parallel.pp * chunks} layers, model.num_layers = {num_layers}", "change either"


def _pipeline_pieces(parallel: ParallelSection) -> Iterator[Refusal]:
    chunks = parallel.pp_chunks
    if parallel.pp == 1 or not chunks:
        return
    if parallel.pp_schedule == "1f1b" and chunks != 1:
        yield "parallel.pp_chunks", f"1f1b has one piece per rank, not {chunks}", 'leave it at 0, or use pp_schedule = "interleaved"'
    if parallel.pp_schedule != "1f1b" and chunks == 1:
        yield "parallel.pp_chunks", f"{parallel.pp_schedule} needs at least 2 pieces per rank", 'leave it at 0, or use pp_schedule = "1f1b"'


def _halved_backward(parallel: ParallelSection) -> Iterator[Refusal]:
    """zero_bubble goes through a block's graph several times: for what enters the block, later for each group of its weights. Under "full"
    torch would compute the block again for each (7 to 13 times were counted), under "selective" it raises."""
    if parallel.pp > 1 and parallel.pp_schedule == "zero_bubble" and parallel.recompute != "none":
        what = f'recompute = "{parallel.recompute}" with zero_bubble, whose many backwards through a block would each compute it again'
        yield "parallel.recompute", what, 'use recompute = "none", or another pp_schedule'


def _exact_sums(config: RunConfig) -> Iterator[Refusal]:
    """Layouts that would change a bit although sums are exact. docs/exact.md says why, one by one."""
    parallel = config.parallel
    if config.numerics.sums != "exact":
        return
    for axis in ("tp", "cp"):
        if (size := getattr(parallel, axis)) > 1:
            what = f"{axis} = {size} changes the arithmetic inside a layer, so exact sums would not give the bits of other layouts"
            yield f"parallel.{axis}", what, 'share its ranks out over dp_shard, dp_replicate and pp, or use sums = "float"'
    if parallel.pp > 1 and parallel.pp_schedule == "zero_bubble":
        what = "zero_bubble computes gradients of parameters apart from the rest, past what makes their sums exact"
        yield "parallel.pp_schedule", what, 'use "1f1b" or "interleaved"'
    if parallel.pp > 1 and config.model.tie_embeddings and not config.model.factory:
        what = f"pp = {parallel.pp} puts the two uses of a tied embedding on two stages, where their gradients are added in float32"
        yield "model.tie_embeddings", what, "set it to false, or use pp = 1"


def _without_effect(parallel: ParallelSection) -> Iterator[str]:
    """Not refused: a run that goes on with fewer ranks changes an axis, and should not have to change what else described the old one."""
    if parallel.zero_stage != 3 and not _shards(parallel):
        yield f"parallel.zero_stage = {parallel.zero_stage} has no effect: with dp_shard = 1 nothing is shared out"
    if parallel.pp == 1 and (parallel.pp_schedule != "1f1b" or parallel.pp_chunks):
        yield "parallel.pp_schedule and pp_chunks have no effect: with pp = 1 there is no pipeline"
    if parallel.pp > 1 and parallel.zero_stage == 2 and _shards(parallel):
        yield "parallel.zero_stage = 2 acts as 1: a pipeline reduces gradients once a step, and keeps those of its stage whole until then"


def _idle_stages(config: RunConfig) -> Iterator[str]:
    """A pipeline is full only while it has as many micro-batches as stages; phantoms fill up what is missing, and compute nothing."""
    parallel, train = config.parallel, config.train
    if parallel.pp == 1:
        return
    num_atoms = -(-train.global_batch_size // train.micro_batch_size)
    num_micro_batches = -(-num_atoms // (parallel.dp_replicate * parallel.dp_shard))
    if num_micro_batches < parallel.pp:
        filled = max(num_micro_batches, parallel.pp) * pipeline_chunks(parallel)
        idle = 1 - num_micro_batches * pipeline_chunks(parallel) / (filled + parallel.pp - 1)
        yield (
            f"a pipeline of parallel.pp = {parallel.pp} stages gets {num_micro_batches} micro-batches a step: "
            f"its ranks idle {idle:.0%} of the time; make train.micro_batch_size smaller or train.global_batch_size larger"
        )


def _shards(parallel: ParallelSection) -> bool:
    return parallel.dp_shard * parallel.cp > 1


def _candidates(now: ParallelSection) -> Iterator[ParallelSection]:
    """Every product of the axes that has as many ranks: under the schedule as it is, with its fewest pieces, under another with pieces, and
    under the default one; recomputing as now, and not at all."""
    schedules = {(now.pp_schedule, now.pp_chunks): None, (now.pp_schedule, 0): None, ("1f1b", 0): None}
    if now.pp_schedule == "zero_bubble":
        schedules |= {("interleaved", now.pp_chunks): None}
    recomputes = dict.fromkeys([now.recompute, "none"] if now.pp_schedule == "zero_bubble" else [now.recompute])
    for sizes in _factorizations(now.num_ranks, len(LAYOUT_AXES)):
        for recompute, (schedule, chunks) in product(recomputes, schedules):
            settings: dict[str, Any] = dict(zip(LAYOUT_AXES, sizes, strict=True))
            settings |= {"pp_schedule": schedule, "pp_chunks": chunks, "recompute": recompute}
            yield replace(now, **settings)


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    if num_factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, num_factors - 1):
            yield (first, *rest)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _distance(parallel: ParallelSection, now: ParallelSection) -> tuple[int, Fraction, tuple[int, ...]]:
    """Smaller is nearer: settings changed, then the product of the factors by which axes changed; ties are broken by `LAYOUT_AXES`."""
    num_changed = sum(getattr(parallel, field.name) != getattr(now, field.name) for field in fields(ParallelSection))
    factor = Fraction(1)
    for axis in LAYOUT_AXES:
        small, large = sorted((getattr(parallel, axis), getattr(now, axis)))
        factor *= Fraction(large, small)
    return num_changed, factor, tuple(-getattr(parallel, axis) for axis in LAYOUT_AXES)


def _shown(parallel: ParallelSection, now: ParallelSection) -> str:
    axes = [f"{axis} = {getattr(parallel, axis)}" for axis in LAYOUT_AXES if getattr(parallel, axis) > 1]
    others = [
        f"{setting} = {value!r}".replace("'", '"')
        for setting in ("pp_schedule", "pp_chunks", "recompute")
        if (value := getattr(parallel, setting)) != getattr(now, setting)
    ]
    return ", ".join([*axes, *others]) or "every axis 1"
