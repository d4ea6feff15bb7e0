"""From a budget to a model: FLOPs that training gets, the point of the frontier, and a decoder of that size. Pure.

Laws count 6 N D; a machine's FLOPs are counted exactly, with attention and head. So what days buy is first divided by the ratio of the two,
which depends on the shape, which depends on the size: two rounds settle it to a per mille.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.records import Reason
from surefoot.plan.request import Aim, Cluster
from surefoot.plan.sizing.allocation import Serving
from surefoot.plan.sizing.budget import USUAL_MFU, Budget, TrainingCost, budget, training_cost
from surefoot.plan.sizing.frontier import Frontier, Wish, frontier
from surefoot.plan.sizing.laws import Law
from surefoot.plan.sizing.shapes import Experts, Shape, shape_for

NUM_ROUNDS = 2

VOCABULARIES = ((1.5e6, 320), (2e7, 8192), (1e9, 50304), (math.inf, 128256))
"""Up to which size which is taken: bytes with their special tokens, that of the quick start, of GPT-2 (rounded up to 64), of Llama 3."""

SEQ_LENS = ((1e7, 256), (1e8, 1024), (1e9, 2048), (math.inf, 4096))
"""The same for sequences: GPT-2 small had 1024, Llama 2 4096; shorter for toys."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """`budget` says what the devices do in the time, goodput included; `law_flops` is what of it a law spends as 6 N D."""

    budget: Budget
    law_flops: float
    frontier: Frontier
    shape: Shape
    seq_len: int
    cost: TrainingCost
    reasons: dict[str, Reason]

    @property
    def sizes(self) -> ModelSizes:
        return self.shape.sizes

    @property
    def tokens(self) -> float:
        return self.frontier.choice.tokens


def choose_model(cluster: Cluster, aim: Aim, *, law: Law, goodput: float, mfu: float | None) -> ModelChoice:
    """`mfu` replaces what was assumed, where something has been learnt since. Raises ConfigError and PlanInfeasible."""
    ratio, given = 1.0, _given_flops(aim, law)
    for _ in range(NUM_ROUNDS):
        if given is None:
            asked = budget(
                cluster.accelerator, num_devices=cluster.num_devices, days=aim.days, mfu=mfu, goodput=goodput, dtype=cluster.dtype
            )
            law_flops = asked.flops / ratio
        else:
            law_flops = given
        found = frontier(law, law_flops, wish=_wish(aim, law, law_flops))
        chosen = found.choice
        seq_len = aim.seq_len or usual_seq_len(chosen.n)
        shape = _shape(chosen.n, aim, law=law, seq_len=seq_len)
        cost = training_cost(shape.sizes, tokens=chosen.tokens, seq_len=seq_len)
        ratio = cost.exact / law_flops
    spent = budget(
        cluster.accelerator,
        num_devices=cluster.num_devices,
        days=aim.days,
        flops=None if given is None else cost.exact,
        mfu=None if given is not None and aim.days and cluster.num_devices else mfu,
        goodput=goodput,
        dtype=cluster.dtype,
    )
    return ModelChoice(spent, law_flops, found, shape, seq_len, cost, _reasons(aim, spent, ratio, shape, seq_len, given))


def usual_seq_len(n: float) -> int:
    """Of models of that size, in the years that laws were fitted in."""
    return next(seq_len for limit, seq_len in SEQ_LENS if n < limit)


def usual_vocabulary(n: float) -> int:
    """A vocabulary costs parameters and FLOPs, so it grows with the model (Tao et al., arXiv 2407.13623)."""
    return next(vocab_size for limit, vocab_size in VOCABULARIES if n < limit)


def _given_flops(aim: Aim, law: Law) -> float | None:
    """As the law counts, 6 N D for most; where they are given outright."""
    if aim.flops is not None:
        return aim.flops
    return law.cost.flops(aim.n, aim.tokens) if aim.n is not None and aim.tokens is not None else None


def _wish(aim: Aim, law: Law, flops: float) -> Wish:
    serving = Serving(aim.served_tokens, aim.serving_cost) if aim.served_tokens else None
    n = aim.n
    if n is None and aim.tokens is not None:
        n = (flops / aim.tokens - law.cost.per_token) / law.cost.per_parameter
    return Wish(serving=serving, unique_tokens=aim.unique_tokens, n=n)


def _shape(n: float, aim: Aim, *, law: Law, seq_len: int) -> Shape:
    experts = Experts(per_token=aim.experts_per_token, num=aim.num_experts) if aim.num_experts else None
    counts = law.counts_for(is_mixture=experts is not None)
    return shape_for(n, vocab_size=aim.vocab_size or usual_vocabulary(n), counts=counts, experts=experts, seq_len=seq_len)


def _reasons(aim: Aim, spent: Budget, ratio: float, shape: Shape, seq_len: int, given: float | None) -> dict[str, Reason]:
    exact = f"causal attention over {seq_len} tokens and the head included: {ratio:.4g} times what the law counts"
    reasons = dict(spent.reasons)
    reasons["budget.law_flops"] = Reason(
        f"as the law counts, 6 N D for most; what is executed is counted exactly, {exact}" if given is None else "as given", "arithmetic"
    )
    reasons["choice.exact_flops"] = Reason(exact, "arithmetic")
    reasons["choice.sizes"] = Reason(shape.why, "proportions of Llama 3 and GPT-2")
    vocabulary = (
        "given, in multiples of 64"
        if aim.vocab_size
        else "grows with the model (arXiv 2407.13623): that of the quick start, GPT-2 or Llama 3"
    )
    reasons["choice.vocab_size"] = Reason(vocabulary, "--vocab-size" if aim.vocab_size else "public models")
    reasons["choice.seq_len"] = Reason("given" if aim.seq_len else "usual for the size", "--seq-len" if aim.seq_len else "public models")
    return reasons


def assumed_mfu(aim: Aim) -> float:
    return aim.mfu if aim.mfu is not None else USUAL_MFU
