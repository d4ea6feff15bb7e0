"""The loss surface and the points it is fitted to, as records: what asks a surface needs none of what fits one. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Points:
    """Finished runs: parameters, tokens seen, final loss in nats per token. Equal lengths."""

    n: Floats
    tokens: Floats
    loss: Floats

    def __len__(self) -> int:
        return len(self.n)

    def take(self, rows: NDArray[np.intp]) -> Points:
        return Points(self.n[rows], self.tokens[rows], self.loss[rows])

    @property
    def flops(self) -> Floats:
        """6 N D."""
        return 6.0 * self.n * self.tokens


@dataclass(frozen=True, slots=True)
class Surface:
    """L = E + A / N^alpha + B / D^beta, of Hoffmann et al. (arXiv 2203.15556, approach 3). Nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def a(self) -> float:
        """The exponent of the best N in compute: N* ~ C^a."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, n: float, tokens: float) -> float:
        """Nats per token."""
        return float(self.E + self.A * n**-self.alpha + self.B * tokens**-self.beta)

    def losses(self, points: Points) -> Floats:
        result: Floats = self.E + self.A * points.n**-self.alpha + self.B * points.tokens**-self.beta
        return result

    def best_n(self, flops: float) -> float:
        """The N of the least loss where 6 N D = `flops`. Closed form of Hoffmann et al., equation 4."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / (self.alpha + self.beta))
        return float(ratio * (flops / 6.0) ** self.a)

    def n_for(self, tokens: float) -> float:
        """The N that `tokens` are the best number of tokens for."""
        return float((self.alpha * self.A / (self.beta * self.B) * tokens**self.beta) ** (1.0 / self.alpha))

    def tokens_for(self, n: float) -> float:
        """The tokens that `n` is the best size for."""
        return float((self.beta * self.B / (self.alpha * self.A) * n**self.alpha) ** (1.0 / self.beta))
