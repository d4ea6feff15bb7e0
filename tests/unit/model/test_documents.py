"""Attention never crosses a document: proven on logits and gradients, bit for bit, with a control that shows the proof can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from surefoot.core.sections import ModelSection
from surefoot.model.attention import DocumentMask
from surefoot.model.loss import loss_sum
from surefoot.model.transformer import Transformer
from surefoot.tensors.batch import IGNORED_LABEL, Batch

MakeModel = Callable[[ModelSection], Transformer]
MakeBatch = Callable[..., Batch]

FIRST, SECOND = slice(0, 5), slice(5, 12)


def logits_of(model: Transformer, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        logits_BSV: torch.Tensor = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    return logits_BSV


def with_other_tokens(batch: Batch, *, where: slice) -> Batch:
    tokens_BS = batch.tokens_BS.clone()
    tokens_BS[0, where] = (tokens_BS[0, where] + 1) % 100
    return replace(batch, tokens_BS=tokens_BS)


def test_changing_the_first_document_leaves_every_bit_of_the_second_ones_logits(
    kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(kind), make_batch()
    before, after = logits_of(model, batch), logits_of(model, with_other_tokens(batch, where=FIRST))
    assert not torch.equal(before[0, FIRST], after[0, FIRST])
    assert torch.equal(before[0, SECOND], after[0, SECOND])
    assert torch.equal(before[1], after[1])


def test_without_document_ids_the_second_document_does_change(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch()
    batch = replace(batch, doc_ids_BS=torch.zeros_like(batch.doc_ids_BS))
    before, after = logits_of(model, batch), logits_of(model, with_other_tokens(batch, where=FIRST))
    assert not torch.equal(before[0, SECOND], after[0, SECOND])


def test_changing_a_later_token_leaves_every_bit_of_earlier_logits(
    kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = make_model(kind), make_batch()
    before, after = logits_of(model, batch), logits_of(model, with_other_tokens(batch, where=slice(9, 12)))
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_a_packed_document_gets_the_logits_that_it_gets_alone(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch()
    packed = logits_of(model, batch)
    for where in (FIRST, SECOND):
        alone = Batch(
            tokens_BS=batch.tokens_BS[:1, where],
            labels_BS=batch.labels_BS[:1, where],
            positions_BS=batch.positions_BS[:1, where],
            doc_ids_BS=torch.zeros_like(batch.doc_ids_BS[:1, where]),
            sample_ids_B=batch.sample_ids_B[:1],
            num_live_tokens=0,
            atom=0,
        )
        # Other shapes are summed in another order: float32 rounding on logits of about 10.
        torch.testing.assert_close(packed[:1, where], logits_of(model, alone), atol=2e-4, rtol=0)


def test_the_loss_of_one_document_has_no_gradient_in_the_other(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch()
    tokens_BS, labels_BS = batch.tokens_BS.clone(), torch.full_like(batch.labels_BS, IGNORED_LABEL)
    tokens_BS[0, FIRST], tokens_BS[0, SECOND], tokens_BS[1] = torch.arange(0, 5), torch.arange(10, 17), 50
    labels_BS[0, 5:11] = tokens_BS[0, 6:12]
    embedded: list[torch.Tensor] = []

    def keep(_: nn.Module, __: object, x_BSD: torch.Tensor) -> None:
        x_BSD.retain_grad()
        embedded.append(x_BSD)

    model.get_submodule("embed").register_forward_hook(keep)
    torch.autograd.backward(loss_sum(model, replace(batch, tokens_BS=tokens_BS, labels_BS=labels_BS), z_loss=kind.z_loss).objective)
    grad_BSD = embedded[0].grad
    assert grad_BSD is not None
    assert not grad_BSD[0, FIRST].any()
    assert not grad_BSD[1].any()
    assert grad_BSD[0, 5:11].abs().amax(dim=-1).min() > 0


def mask_of(doc_ids: list[list[int]], *, window: int) -> torch.Tensor:
    doc_ids_BS = torch.tensor(doc_ids)
    index_S = torch.arange(doc_ids_BS.shape[1])
    mask_B1ST: torch.Tensor = DocumentMask(window=window)(doc_ids_BS, index_S, (doc_ids_BS, index_S))
    return mask_B1ST


def test_a_document_that_comes_back_later_under_the_same_id_is_one_document() -> None:
    mask_B1ST = mask_of([[0, 1, 0]], window=0)
    assert mask_B1ST[0, 0].tolist() == [[True, False, False], [False, True, False], [True, False, True]]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 7])
def test_the_mask_is_causal_and_windowed_inside_each_document(window: int) -> None:
    doc_ids = [[0, 0, 0, 1, 1], [2, 3, 3, 3, 3]]
    mask_B1ST = mask_of(doc_ids, window=window)
    assert mask_B1ST.shape == (2, 1, 5, 5)
    for row, ids in enumerate(doc_ids):
        for query in range(5):
            for key in range(5):
                wanted = key <= query and ids[key] == ids[query] and (window == 0 or query - key < window)
                assert mask_B1ST[row, 0, query, key].item() is wanted


def test_some_queries_among_keys_in_any_order_see_what_they_see_in_the_whole_sequence() -> None:
    doc_ids_BS, index_S = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2]]), torch.arange(6)
    mask = DocumentMask(window=3)
    whole_B1ST = mask(doc_ids_BS, index_S, (doc_ids_BS, index_S))
    here, order = torch.tensor([0, 5]), torch.tensor([0, 5, 1, 4, 2, 3])
    part_B1ST = mask(doc_ids_BS[:, here], here, (doc_ids_BS[:, order], order))
    assert torch.equal(part_B1ST, whole_B1ST[:, :, here][..., order])
