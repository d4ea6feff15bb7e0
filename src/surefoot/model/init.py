"""What the transformer's parameters start from, by name."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.core.sections import ModelSection
from surefoot.model.mup import grows_with_width, width_factor
from surefoot.tensors.random import Constant, InitRule, Normal


def init_rules(section: ModelSection) -> Callable[[str], InitRule]:
    """fqn -> rule. Norms start at 1, matrices at N(0, init_std); under mup narrower inside blocks, as `model.mup` says.

    The matrices that write to the residual stream (wo, w2) are divided by sqrt(2 layers) more, so that the stream's variance does not grow
    with depth (GPT-2).
    """
    inside = section.init_std / width_factor(section) ** 0.5
    into_stream = Normal(inside / (2 * section.num_layers) ** 0.5)
    plain, outside = Normal(inside), Normal(section.init_std)

    def rule_for(fqn: str) -> InitRule:
        owner = fqn.split(".")[-2]
        if owner.endswith("norm"):
            return Constant(1.0)
        if not grows_with_width(fqn):
            return outside
        return into_stream if owner in ("wo", "w2") else plain

    return rule_for
