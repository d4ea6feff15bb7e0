"""What repeated tokens are worth, and which size is best where unique ones run out. Pure.

Muennighoff et al. (arXiv 2305.16264): the loss surface holds with less data and fewer parameters than there are. Repetitions of U unique
tokens are worth U R* (1 - exp(-R / R*)) more; parameters beyond those that U tokens are best spent on wear off in the same way, and faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from surefoot.plan.surface_record import Surface

TOKEN_DECAY = 15.387756
"""R*_D of their appendix A: after so many repetitions a further one has lost 1 - 1/e of its worth."""

PARAMETER_DECAY = 5.309743
"""R*_N of the same fit."""

HARMLESS_EPOCHS = 4.0
"""Up to here repeated tokens were nearly as good as new ones; their abstract."""


class Losses(Protocol):
    def loss(self, n: float, tokens: float) -> float: ...


@dataclass(frozen=True, slots=True)
class LimitedData:
    """A surface where only `unique_tokens` exist: the surface itself for fresh tokens and models no larger than they are best for."""

    surface: Surface
    unique_tokens: float

    def loss(self, n: float, tokens: float) -> float:
        """Nats per token."""
        unique = min(tokens, self.unique_tokens)
        fitting = min(n, self.surface.n_for(unique))
        return self.surface.loss(_worth(n, fitting, PARAMETER_DECAY), _worth(tokens, unique, TOKEN_DECAY))


def effective_tokens(tokens: float, *, unique_tokens: float) -> float:
    """How many fresh tokens `tokens` of `unique_tokens` are worth."""
    return tokens if tokens <= unique_tokens else _worth(tokens, unique_tokens, TOKEN_DECAY)


def epochs_warning(tokens: float, *, unique_tokens: float) -> str:
    """Empty up to four passes over the data."""
    epochs = tokens / unique_tokens
    if epochs <= HARMLESS_EPOCHS:
        return ""
    worth = effective_tokens(tokens, unique_tokens=unique_tokens)
    return (
        f"{tokens:.3g} tokens are {epochs:.3g} passes over {unique_tokens:.3g} unique ones and worth about {worth:.3g} fresh ones; "
        f"up to {HARMLESS_EPOCHS:g} passes cost next to nothing (arXiv 2305.16264)"
    )


def _worth(amount: float, unique: float, decay: float) -> float:
    return unique + unique * decay * -math.expm1(-(amount / unique - 1.0) / decay)
