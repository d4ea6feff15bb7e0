"""What settings must satisfy together. Each rule names the setting that a person would change first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from surefoot.config.stage_rules import broken_stages, questionable_stages
from surefoot.core.layouts import doubts, refusals
from surefoot.core.sections import RunConfig, TrainSection
from surefoot.core.tiers import DISK, BadTier, parse_tier

Broken = tuple[str, str, str]
"""(setting, what is wrong, what to do)"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def broken_rules(config: RunConfig) -> list[Broken]:
    """All rules that `config` breaks: it cannot be trained like this."""
    rules = (_names, _shapes, _parametrization, _batches, _loss_scale, broken_stages, _layouts, _schedules, _saves, _tiers)
    return [broken for rule in rules for broken in rule(config)]


def questionable(config: RunConfig) -> list[str]:
    """What can be trained but is probably not meant, in one sentence each."""
    warnings = []
    schedule, num_steps = config.schedule, config.train.num_steps
    num_decay = decay_steps(config) if schedule.kind == "wsd" else 0
    if schedule.warmup_steps + num_decay > num_steps:
        warnings.append(
            f"schedule.warmup_steps = {schedule.warmup_steps} and a decay of {num_decay} steps do not fit into "
            f"train.num_steps = {num_steps}: the decay begins before the warm-up ends, and is hidden by it"
        )
    if config.numerics.sums == "exact" and config.optimizer.factory:
        warnings.append("numerics.sums is exact: that holds only if the updates of optimizer.factory look at each element by itself")
    if config.data.sources and not config.data.path:
        warnings.append("data.sources are given but no data.path to prepare them into")
    return [*warnings, *questionable_stages(config), *doubts(config)]


def decay_steps(config: RunConfig) -> int:
    """The length of the WSD decay: as given, or a fifth of num_steps."""
    return config.schedule.decay_steps if config.schedule.decay_steps >= 0 else config.train.num_steps // 5


def _names(config: RunConfig) -> Iterator[Broken]:
    if not _NAME.fullmatch(config.run.name):
        yield "run.name", f'"{config.run.name}" does not suit as a folder name', "use letters, digits, '.', '_' and '-'"
    for setting, factory in (("model.factory", config.model.factory), ("optimizer.factory", config.optimizer.factory)):
        if factory and not _FACTORY.fullmatch(factory):
            yield setting, f'"{factory}" is not a factory', "write package.module:function"
    names = [source.name for source in config.data.sources]
    if len(names) != len(set(names)):
        yield "data.sources", f"two sources have one name: {', '.join(names)}", "give each its own name"
    for index, source in enumerate(config.data.sources):
        if not source.files:
            yield f"data.sources[{index}].files", f'source "{source.name}" has no files', "list files, folders or builtin:python-stdlib"
    if config.data.sources and not sum(source.weight for source in config.data.sources):
        yield "data.sources", "the weights of all sources are 0", "give at least one a weight above 0"


def _shapes(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.factory:
        return
    d_head, rest = divmod(model.d_model, model.num_heads)
    if rest:
        yield "model.d_model", f"d_model = {model.d_model} is not a multiple of num_heads = {model.num_heads}", "change either"
    elif d_head % 2:
        yield "model.d_model", f"heads are {d_head} wide: rotary embeddings turn pairs", "make d_model / num_heads even"
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        what = f"num_kv_heads = {model.num_kv_heads} does not divide num_heads = {model.num_heads}"
        yield "model.num_kv_heads", what, "use a divisor, or 0 for as many as query heads"


def _batches(config: RunConfig) -> Iterator[Broken]:
    train = config.train
    if train.micro_batch_size > train.global_batch_size:
        what = f"micro_batch_size = {train.micro_batch_size} is above global_batch_size = {train.global_batch_size}"
        yield "train.micro_batch_size", what, "one atom cannot hold more samples than the step"
    for (first, batch), (next_first, next_batch) in pairwise(train.batch_ramp):
        if next_first <= first or next_batch <= batch:
            what = f"[{next_first}, {next_batch}] does not rise after [{first}, {batch}]"
            yield "train.batch_ramp", what, "order the entries by sample, each batch above the one before"
    for first, batch in train.batch_ramp:
        if first < 0 or batch < 1 or batch > train.global_batch_size:
            what = f"[{first}, {batch}] is outside 0 <= sample, 1 <= batch <= global_batch_size = {train.global_batch_size}"
            yield "train.batch_ramp", what, "the ramp leads up to global_batch_size"
    if train.batch_ramp and train.batch_ramp[0][0] != 0:
        yield "train.batch_ramp", f"the first entry begins at sample {train.batch_ramp[0][0]}", "begin with [0, batch]"
    if train.batch_ramp and train.batch_ramp[-1][1] != train.global_batch_size:
        what = f"the last entry has batch {train.batch_ramp[-1][1]}, global_batch_size is {train.global_batch_size}"
        yield "train.batch_ramp", what, "end with [first_sample, global_batch_size]: else nothing says when that size begins"


def _loss_scale(config: RunConfig) -> Iterator[Broken]:
    train, defaults = config.train, TrainSection()
    if train.precision != "fp16":
        for key in ("fp16_initial_scale", "fp16_min_scale", "fp16_growth_interval_steps", "fp16_hysteresis"):
            if getattr(train, key) != getattr(defaults, key):
                what = f"given, but train.precision is {train.precision}, whose range is float32's: there is nothing to scale the loss for"
                yield f"train.{key}", what, 'leave it out, or set train.precision = "fp16"'
        return
    for key in ("fp16_initial_scale", "fp16_min_scale"):
        if math.frexp(getattr(train, key))[0] != 0.5:
            what = f"{key} = {getattr(train, key):g} is not a power of two: scaling by it, and back, would round every gradient twice"
            yield f"train.{key}", what, "use one, such as 65536.0 or 0.5"
    if train.fp16_min_scale > train.fp16_initial_scale:
        what = f"fp16_min_scale = {train.fp16_min_scale:g} is above fp16_initial_scale = {train.fp16_initial_scale:g}"
        yield "train.fp16_min_scale", what, "the scale begins at the initial one, and never goes below the smallest"


def _layouts(config: RunConfig) -> Iterator[Broken]:
    yield from refusals(config)
    if config.numerics.sums == "exact":
        yield from _exact_sums(config)


def _exact_sums(config: RunConfig) -> Iterator[Broken]:
    """What would let the layout change a bit all the same, beside what `core.layouts` says of layouts. docs/exact.md says why."""
    if not config.numerics.deterministic:
        yield "numerics.deterministic", "exact sums of gradients that differ from run to run differ too", "leave it at true"
    if not config.optimizer.factory and config.optimizer.kernel == "fused":
        what = "the fused kernel rounds the last elements of a shard in another way, so its bits depend on where tensors are cut"
        yield "optimizer.kernel", what, 'set it to "foreach"'
    if not config.launch.threads_per_rank:
        what = "0 shares the cores out: another number of ranks has other threads, and those change bits inside a product of matrices"
        yield "launch.threads_per_rank", what, "set it, to 1 or what every machine has for each rank"


def _schedules(config: RunConfig) -> Iterator[Broken]:
    if config.schedule.decay_steps > config.train.num_steps:
        what = f"decay_steps = {config.schedule.decay_steps} is above train.num_steps = {config.train.num_steps}"
        yield "schedule.decay_steps", what, "-1 decays over the last fifth"
    for key in ("beta1", "beta2"):
        if getattr(config.optimizer, key) >= 1.0:
            yield f"optimizer.{key}", f"{key} = 1 never forgets", "keep it below 1"


def _saves(config: RunConfig) -> Iterator[Broken]:
    if not config.checkpoint.interval_steps and not config.checkpoint.interval_s:
        yield "checkpoint.interval_steps", "both interval_steps and interval_s are 0: nothing would be saved", "set one of them"


def _parametrization(config: RunConfig) -> Iterator[Broken]:
    """muP is about our own decoder under Adam: what a factory returns has its own initial values and its own groups of parameters."""
    model = config.model
    if model.parametrization != "mup":
        if model.mup_base_width or model.mup_base_head_dim:
            yield "model.mup_base_width", "given, but parametrization is not mup", 'set model.parametrization = "mup", or leave it out'
        return
    if not model.mup_base_width:
        yield "model.mup_base_width", "mup needs the d_model at which the learning rate was tuned", "set it to the d_model of that model"
    for key, factory in (("model.factory", model.factory), ("optimizer.factory", config.optimizer.factory)):
        if factory:
            yield key, "mup is known for our own decoder and AdamW only", 'use parametrization = "standard", or leave the factory out'


def _tiers(config: RunConfig) -> Iterator[Broken]:
    tiers = []
    for tier in config.checkpoint.tiers:
        try:
            tiers.append(str(parse_tier(tier)))
        except BadTier as error:
            yield "checkpoint.tiers", error.what, error.hint
    if DISK not in config.checkpoint.tiers:
        yield "checkpoint.tiers", f'"{DISK}" is not among them: it is where every checkpoint begins', f'add "{DISK}"'
    for tier in sorted({tier for tier in tiers if tiers.count(tier) > 1}):
        yield "checkpoint.tiers", f'"{tier}" stands there twice', "name each place once"
