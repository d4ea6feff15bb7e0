"""What a canary costs beside the training, and how large one may be for that."""

from __future__ import annotations

from surefoot.core.sections import CanarySection, TrainSection

FORWARDS_PER_STEP = 3
"""What a step computes per token, in forwards: its own, and a backward of two. Where activations are computed again it is more, and a
canary costs a smaller share."""


def canary_share(num_tokens: float, *, interval_steps: float, tokens_per_step: float) -> float:
    """The forward over `num_tokens` every `interval_steps`, as a share of the computing of the steps between."""
    return num_tokens / (FORWARDS_PER_STEP * interval_steps * tokens_per_step)


def canary_samples(canary: CanarySection, train: TrainSection, *, seq_len: int) -> int:
    """How many samples of `seq_len` the config wants, 0 where it wants none: whole atoms, and at least one.

    The number of ranks is not asked: a set that changed with it would be another set after a change of it. Ranks without an atom compute
    a phantom meanwhile, which takes as long.
    """
    if not canary.interval_steps or not canary.num_tokens:
        return 0
    affordable = canary.max_share * FORWARDS_PER_STEP * canary.interval_steps * train.global_batch_size * seq_len
    samples = int(min(canary.num_tokens, affordable) // seq_len)
    return max(samples // train.micro_batch_size, 1) * train.micro_batch_size


def canary_words(num_samples: int, canary: CanarySection, train: TrainSection, *, seq_len: int) -> str:
    """One line: what `num_samples` cost, and why they are not as many as were asked for."""

    def share(num_tokens: int) -> float:
        return canary_share(num_tokens, interval_steps=canary.interval_steps, tokens_per_step=train.global_batch_size * seq_len)

    num_tokens = num_samples * seq_len
    line = f"canary: {num_tokens:,} held-out tokens every {canary.interval_steps} steps, {share(num_tokens):.2%} of the computing"
    if num_samples < canary_samples(canary, train, seq_len=seq_len):
        return f"{line}; no more are held out"
    if num_tokens <= canary.num_tokens - seq_len * train.micro_batch_size:
        return f"{line}; the {canary.num_tokens:,} of canary.num_tokens would be {share(canary.num_tokens):.1%}"
    return line
