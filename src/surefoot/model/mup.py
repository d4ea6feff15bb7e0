"""Maximal update parametrization of our decoder under Adam (Yang et al., arXiv 2203.03466, table 8): what depends on the width, and how.

With m = d_model / mup_base_width, against the standard parametrization at the base width, where both are the same model:

| what                           | initial std | learning rate | weight decay | in the forward              |
| ------------------------------ | ----------- | ------------- | ------------ | --------------------------- |
| embedding, norms, head         | as there    | as there      | as there     | what the head sees, over m  |
| matrices inside blocks         | / sqrt(m)   | / m           | x m          | attention logits / head_dim |

The weight decay of AdamW is multiplied by the rate, so the factor m keeps what a step forgets the same at every width; the authors' own
optimizer does so too. A tied head and one of its own are scaled alike: the factor stands in the forward, not in a matrix.

Adam's eps stays as it is. Gradients fall about as 1 / m, so eps grows beside them. In the model of the tests at width 512, 8 times its
base, the matrix with the least of them has a root mean square of 6e-6 at the first step and 9e-5 after four: the default of 1e-8 is 0.2%
and 0.01% of that. Far wider models want a smaller `optimizer.eps` (Everett et al., arXiv 2407.05872).
"""

from __future__ import annotations

from surefoot.core.sections import ModelSection


def width_factor(section: ModelSection) -> float:
    """m: how much wider than the base; 1 in the standard parametrization."""
    return section.d_model / section.mup_base_width if section.parametrization == "mup" else 1.0


def attention_scale(section: ModelSection, *, head_dim: int) -> float | None:
    """What queries times keys are multiplied by: None, that is 1 / sqrt(head_dim), unless heads are of another width than at the base.

    Queries and keys that are learned line up, so their product grows with head_dim and not with its root.
    """
    base = section.mup_base_head_dim if section.parametrization == "mup" else 0
    return None if base in (0, head_dim) else base**0.5 / head_dim


def grows_with_width(fqn: str) -> bool:
    """Whether both dims of this parameter do: the matrices inside blocks. Norms and the two vocabulary matrices have one that does."""
    return fqn.startswith("blocks.") and not fqn.split(".")[-2].endswith("norm")
