"""What one rank computes at once: an atom of samples, packed, with its document boundaries.

Dim letters: B samples of the atom, S positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED_LABEL = -100
PHANTOM_SAMPLE = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One atom: `micro_batch_size` consecutive samples, always in this shape.

    A position whose label is `IGNORED_LABEL` is not live. `doc_ids_BS` numbers the documents inside a sample; attention never crosses
    them. Rows that no sample fills have `PHANTOM_SAMPLE` as id and no live label; an atom of such rows only is a phantom, computed so
    that no collective waits for a rank without work. `atom` is the atom's index in its step, the same for every number of ranks.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor
    doc_ids_BS: torch.Tensor
    sample_ids_B: torch.Tensor
    num_live_tokens: int
    atom: int

    @property
    def is_phantom(self) -> bool:
        return bool((self.sample_ids_B == PHANTOM_SAMPLE).all())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`. Local."""
        return Batch(
            tokens_BS=self.tokens_BS.to(device, non_blocking=True),
            labels_BS=self.labels_BS.to(device, non_blocking=True),
            positions_BS=self.positions_BS.to(device, non_blocking=True),
            doc_ids_BS=self.doc_ids_BS.to(device, non_blocking=True),
            sample_ids_B=self.sample_ids_B,
            num_live_tokens=self.num_live_tokens,
            atom=self.atom,
        )
