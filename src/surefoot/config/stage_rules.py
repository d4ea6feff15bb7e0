"""What `[[stage]]` tables must satisfy among themselves and with the sections that they go on from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from surefoot.config.names import nearest
from surefoot.core.sections import RunConfig
from surefoot.core.stages import longest_seq_len, stages_of

Broken = tuple[str, str, str]
"""(setting, what is wrong, what to do)"""

_MIN_SEQ_LEN = 2


def broken_stages(config: RunConfig) -> Iterator[Broken]:
    yield from _order(config)
    yield from _weights(config)
    yield from _lengths(config)
    yield from _values(config)


def questionable_stages(config: RunConfig) -> Iterator[str]:
    if not config.stage:
        return
    end = _end_of_run(config)
    for index, stage in enumerate(config.stage):
        if stage.first_sample >= end:
            yield (
                f"stage[{index}] begins at sample {stage.first_sample}, after the last one: "
                f"train.num_steps = {config.train.num_steps} end before sample {end}"
            )
    weighted = {name for stage in stages_of(config) for name, weight in stage.weights if weight}
    for source in config.data.sources:
        if source.name not in weighted:
            yield f'source "{source.name}" has no weight in any stage: nothing of it is trained on'


def _order(config: RunConfig) -> Iterator[Broken]:
    for index, (before, stage) in enumerate(pairwise(config.stage), start=1):
        if stage.first_sample <= before.first_sample:
            what = f"{stage.first_sample} does not rise after {before.first_sample} of the stage before"
            yield f"stage[{index}].first_sample", what, "order the stages by the sample at which they begin, each at its own"


def _weights(config: RunConfig) -> Iterator[Broken]:
    """Which sources the prepared data holds is not known here; where the config names none, the data is asked when it is opened."""
    known = [source.name for source in config.data.sources]
    for index, stage in enumerate(config.stage):
        place = f"stage[{index}].weights"
        for name, weight in stage.weights:
            if known and name not in known:
                close = nearest(name, choices=known)
                hint = f"did you mean {close}?" if close else f"the sources are {', '.join(known)}"
                yield place, f'there is no source "{name}"', hint
            if weight < 0:
                yield place, f"{name} = {weight:g} is below 0", "0 or leaving it out gives it no share"
        if stage.weights and not any(weight > 0 for _, weight in stage.weights):
            yield place, "no weight is above 0", "give at least one, or leave weights out to keep those of the stage before"


def _lengths(config: RunConfig) -> Iterator[Broken]:
    """Samples are drawn in units of the longest sequence, so every other length must cut one evenly."""
    unit = longest_seq_len(config)
    name = "data.max_seq_len" if config.data.max_seq_len else "the longest of all stages"
    lengths = [("data.seq_len", config.data.seq_len)]
    lengths += [(f"stage[{index}].seq_len", stage.seq_len) for index, stage in enumerate(config.stage) if stage.seq_len]
    for place, seq_len in lengths:
        if seq_len < _MIN_SEQ_LEN:
            yield place, f"{seq_len} is below {_MIN_SEQ_LEN}", "a sample needs a token and the one that follows it"
        elif seq_len > unit:
            yield (
                place,
                f"{seq_len} is above {name} = {unit}",
                "raise data.max_seq_len before the run begins: a run keeps its unit",
            )
        elif unit % seq_len:
            yield place, f"{seq_len} does not divide {name} = {unit}: samples are drawn in units of that", "use a divisor"


def _values(config: RunConfig) -> Iterator[Broken]:
    micro_batch_size = config.train.micro_batch_size
    for index, stage in enumerate(config.stage):
        if 0 < stage.global_batch_size < micro_batch_size:
            what = f"global_batch_size = {stage.global_batch_size} is below train.micro_batch_size = {micro_batch_size}"
            yield f"stage[{index}].global_batch_size", what, "one atom cannot hold more samples than the step"
        if 0 < stage.rope_base < 1:
            yield f"stage[{index}].rope_base", f"{stage.rope_base:g} is below 1", "0 leaves the base as it was"
        if stage.rope_base and config.model.factory:
            what = "the model of model.factory has rotary embeddings of its own, if any"
            yield f"stage[{index}].rope_base", what, "leave it out"


def _end_of_run(config: RunConfig) -> int:
    """The sample before which `train.num_steps` end when every step is full; each that a stage cuts short ends it a little earlier."""
    train, sample, steps_left = config.train, 0, config.train.num_steps
    ramp = train.batch_ramp or ((0, train.global_batch_size),)
    edges = sorted({first for first, _ in ramp} | {stage.first_sample for stage in config.stage})
    stages = stages_of(config)
    while steps_left:
        batch = [stage.global_batch_size for stage in stages if stage.first_sample <= sample][-1]
        batch = batch or [size for first, size in ramp if first <= sample][-1]
        following = next((edge for edge in edges if edge > sample), None)
        num_steps = steps_left if following is None else min(steps_left, -(-(following - sample) // batch))
        sample += num_steps * batch
        steps_left -= num_steps
    return sample
