"""Small models of every kind, and packed batches for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, materialise
from surefoot.model.transformer import Transformer
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch

VOCAB_SIZE = 100
SMALL = ModelSection(num_layers=2, d_model=32, num_heads=4, d_ff=48)

KINDS: dict[str, ModelSection] = {
    "plain": SMALL,
    "untied": replace(SMALL, tie_embeddings=False),
    "grouped": replace(SMALL, num_kv_heads=2),
    "one-kv-head": replace(SMALL, num_kv_heads=1),
    "windowed": replace(SMALL, window=5),
    "qk-norm": replace(SMALL, qk_norm=True),
    "soft-caps": replace(SMALL, logit_soft_cap=15.0, attention_soft_cap=10.0, num_kv_heads=2),
    "z-loss": replace(SMALL, z_loss=1e-3),
    "everything": replace(
        SMALL,
        tie_embeddings=False,
        num_kv_heads=2,
        window=6,
        qk_norm=True,
        logit_soft_cap=20.0,
        attention_soft_cap=20.0,
        z_loss=1e-3,
    ),
}

MakeModel = Callable[[ModelSection], Transformer]
MakeBatch = Callable[..., Batch]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> ModelSection:
    """Each kind of model in turn."""
    return KINDS[request.param]


@pytest.fixture
def small() -> ModelSection:
    return SMALL


@pytest.fixture
def make_model() -> MakeModel:
    def make(section: ModelSection) -> Transformer:
        """With weights ten times the usual size: logits then differ by more than rounding."""
        model = build_model(replace(section, init_std=0.2), VOCAB_SIZE, seed=3)
        materialise(model, seed=3, device=torch.device("cpu"))
        assert isinstance(model, Transformer)
        return model

    return make


@pytest.fixture
def make_batch() -> MakeBatch:
    def make(*, rows: Sequence[Sequence[int]] = ((5, 7), (12,)), seed: int = 0, phantom_rows: Sequence[int] = ()) -> Batch:
        """Random tokens in documents of the given lengths. The last label of each document is not live."""
        doc_ids_BS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
        positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
        tokens_BS = torch.randint(0, VOCAB_SIZE, doc_ids_BS.shape, generator=torch.Generator().manual_seed(seed))
        labels_BS = tokens_BS.roll(-1, dims=1)
        labels_BS[doc_ids_BS != doc_ids_BS.roll(-1, dims=1)] = IGNORED_LABEL
        labels_BS[:, -1] = IGNORED_LABEL
        sample_ids_B = torch.arange(len(rows))
        for row in phantom_rows:
            tokens_BS[row] = positions_BS[row] = doc_ids_BS[row] = 0
            labels_BS[row] = IGNORED_LABEL
            sample_ids_B[row] = PHANTOM_SAMPLE
        return Batch(
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            positions_BS=positions_BS,
            doc_ids_BS=doc_ids_BS,
            sample_ids_B=sample_ids_B,
            num_live_tokens=int((labels_BS != IGNORED_LABEL).sum()),
            atom=0,
        )

    return make
