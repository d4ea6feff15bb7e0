"""Shared by tests that train on atoms made up on the spot: rows of several documents, and steps of uneven numbers of atoms."""

from __future__ import annotations

import torch

from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch

VOCAB_SIZE = 100  # 128 rows
ROWS = ((5, 7, 4), (2, 10, 4))
"""Lengths of the documents in each sample: no cut of the 16 positions falls on a boundary of both."""
SEQ_LEN = 16
ATOMS_PER_STEP = (4, 3, 5, 1, 2)
"""Uneven, growing and shrinking, one of them fewer than any pipeline has stages; then again from the first."""


def atom_of(step: int, index: int) -> Batch:
    """Atoms from the number of the step on are phantoms."""
    live = index < ATOMS_PER_STEP[step % len(ATOMS_PER_STEP)]
    doc_ids_BS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in ROWS])
    tokens_BS = torch.randint(0, VOCAB_SIZE, doc_ids_BS.shape, generator=torch.Generator().manual_seed(1000 * step + index))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[doc_ids_BS != doc_ids_BS.roll(-1, dims=1)] = IGNORED_LABEL
    if not live:
        tokens_BS, labels_BS = torch.zeros_like(tokens_BS), torch.full_like(labels_BS, IGNORED_LABEL)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        positions_BS=torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS]),
        doc_ids_BS=doc_ids_BS,
        sample_ids_B=torch.full((len(ROWS),), index if live else PHANTOM_SAMPLE),
        num_live_tokens=int((labels_BS != IGNORED_LABEL).sum()),
        atom=index,
    )


def atoms_of(step: int, *, data_rank: int, num_data_ranks: int) -> list[Batch]:
    num_micro_steps = -(-ATOMS_PER_STEP[step % len(ATOMS_PER_STEP)] // num_data_ranks)
    return [atom_of(step, micro_step * num_data_ranks + data_rank) for micro_step in range(num_micro_steps)]
