"""Rotary positions (arXiv 2104.09864), in the half-split layout of Llama checkpoints.

Dim letters: B samples, S positions, H heads, E dims of a head, P = E / 2 rotated pairs.
"""

from __future__ import annotations

import torch
from torch import nn


class Rotary(nn.Module):
    """positions_BS -> the table of `rope_table`. A module of its own, without parameters, so that all pieces of a model turn by one `base`:
    a stage of the run may change it between two steps, by `set_rope_base`."""

    def __init__(self, *, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base

    def forward(self, positions_BS: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_table(positions_BS, head_dim=self.head_dim, base=self.base, dtype=dtype)


def set_rope_base(model: nn.Module, base: float) -> None:
    """Local. From the next forward on. A backward that computes blocks again turns by the table that their forward was given."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.base = base


def rope_table(
    positions_BS: torch.Tensor, *, head_dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local. (cos_BS1P, sin_BS1P) of the angles at `positions_BS`, in float32 whatever the precision; in float64 for `dtype` float64.

    Computed in each forward, once for all layers: under 0.1% of a small step, and there is no buffer to lose, save or cut.
    """
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exponents_P = torch.arange(0, head_dim, 2, dtype=dtype, device=positions_BS.device) / head_dim
    angles_BS1P = positions_BS[:, :, None, None].to(dtype) * base**-exponents_P
    return angles_BS1P.cos(), angles_BS1P.sin()


def rotate(x_BSHE: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Local. Turn each pair (x_p, x_{p + E/2}) by its angle, in the dtype of the table; the dtype of `x_BSHE` comes back."""
    cos_BS1P, sin_BS1P = table
    first_BSHP, second_BSHP = x_BSHE.chunk(2, dim=-1)
    turned = (first_BSHP * cos_BS1P - second_BSHP * sin_BS1P, second_BSHP * cos_BS1P + first_BSHP * sin_BS1P)
    return torch.cat(turned, dim=-1).type_as(x_BSHE)
