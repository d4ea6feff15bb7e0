"""Who computes which samples of a step: pure slot arithmetic, the same answer on every rank.

A step is `num_samples` consecutive global samples. An atom is `micro_batch_size` consecutive slots of it and is always computed in one
shape. How many ranks there are decides only who computes an atom and when, never what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Atom:
    """Slots [first_slot, first_slot + num_rows) of a step; `num_rows` may fall short of the micro-batch, and is 0 for a phantom."""

    index: int
    first_slot: int
    num_rows: int

    @property
    def is_phantom(self) -> bool:
        return self.num_rows == 0


def deal(num_samples: int, *, micro_batch_size: int, num_ranks: int, rank: int, rotation: int = 0) -> list[Atom]:
    """The atoms of `rank`, one per micro-step: atom k goes to micro-step k // R on rank (k + rotation) mod R.

    All ranks get the same number of micro-steps. Where atoms run out, a phantom keeps the rank in step with the others. `rotation` moves
    every atom to another rank without changing what is in it.
    """
    num_atoms = -(-num_samples // micro_batch_size)
    num_micro_steps = -(-num_atoms // num_ranks)
    atoms = []
    for micro_step in range(num_micro_steps):
        index = micro_step * num_ranks + (rank - rotation) % num_ranks
        first_slot = index * micro_batch_size
        atoms.append(Atom(index=index, first_slot=first_slot, num_rows=min(micro_batch_size, max(0, num_samples - first_slot))))
    return atoms


def slots_of(atoms: Sequence[Atom]) -> npt.NDArray[np.int64]:
    """The slots of the step that these atoms fill, in order."""
    spans = [np.arange(atom.first_slot, atom.first_slot + atom.num_rows, dtype=np.int64) for atom in atoms]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
