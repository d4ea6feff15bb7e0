"""The loss as a sum over live tokens, phantoms included, in float32 and bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from surefoot.core.sections import ModelSection
from surefoot.model.loss import loss_sum
from surefoot.model.precision import autocast_context
from surefoot.model.transformer import Transformer
from surefoot.tensors.batch import IGNORED_LABEL, Batch

MakeModel = Callable[[ModelSection], Transformer]
MakeBatch = Callable[..., Batch]


def gradients(model: Transformer, batch: Batch, *, z_loss: float = 0.0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss_sum(model, batch, z_loss=z_loss).objective)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in found.values()), [name for name, grad in found.items() if grad is None]
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def test_it_sums_nats_over_live_tokens_only(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(small), make_batch()
    logits_BSV = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS).double()
    wanted = 0.0
    for row, column in (batch.labels_BS != IGNORED_LABEL).nonzero().tolist():
        wanted -= logits_BSV[row, column].log_softmax(-1)[batch.labels_BS[row, column]].item()
    sums = loss_sum(model, batch)
    assert sums.nats.dtype == torch.float32
    assert not sums.nats.requires_grad
    assert sums.nats.item() == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(sums.objective, sums.nats)


def test_a_sum_over_atoms_is_the_sum_of_a_larger_atom(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(small), make_batch()
    rows = [
        replace(
            batch,
            tokens_BS=batch.tokens_BS[row : row + 1],
            labels_BS=batch.labels_BS[row : row + 1],
            positions_BS=batch.positions_BS[row : row + 1],
            doc_ids_BS=batch.doc_ids_BS[row : row + 1],
        )
        for row in range(2)
    ]
    both, (first, second) = gradients(model, batch), (gradients(model, row) for row in rows)
    for name, grad in both.items():
        torch.testing.assert_close(first[name] + second[name], grad, atol=1e-4, rtol=1e-4)


def test_the_z_loss_adds_the_square_of_log_z_and_is_not_reported(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(small), make_batch(phantom_rows=[1])
    logits_BSV = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    log_z = torch.logsumexp(logits_BSV[batch.labels_BS != IGNORED_LABEL], dim=-1)
    plain, sums = loss_sum(model, batch), loss_sum(model, batch, z_loss=0.5)
    assert torch.equal(sums.nats, plain.nats)
    assert (sums.objective - sums.nats).item() == pytest.approx(0.5 * log_z.square().sum().item(), rel=1e-4)
    assert sums.objective.requires_grad


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_phantom_atom_is_finite_and_gives_every_parameter_a_gradient_of_exactly_zero(
    kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch, precision: Literal["fp32", "bf16"]
) -> None:
    model, phantom = make_model(kind), make_batch(phantom_rows=[0, 1])
    assert phantom.is_phantom
    with autocast_context(precision, torch.device("cpu"), cpu_capabilities={"avx512_bf16": True}):
        assert model(phantom.tokens_BS, phantom.positions_BS, phantom.doc_ids_BS).isfinite().all()
        sums = loss_sum(model, phantom, z_loss=kind.z_loss)
    torch.autograd.backward(sums.objective)
    assert sums.nats.item() == 0.0
    assert sums.objective.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name  # NaN counts as true


def test_phantom_rows_add_nothing_to_live_ones(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch(phantom_rows=[1])
    other = replace(batch, tokens_BS=batch.tokens_BS.clone())
    other.tokens_BS[1] = 17  # what a phantom row holds must not matter
    one, two = gradients(model, batch, z_loss=kind.z_loss), gradients(model, other, z_loss=kind.z_loss)
    for name, grad in one.items():
        torch.testing.assert_close(two[name], grad, atol=1e-6, rtol=0)
        assert grad.any(), name


def test_every_parameter_learns(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    for name, grad in gradients(make_model(kind), make_batch(), z_loss=kind.z_loss).items():
        assert grad.isfinite().all(), name
        assert grad.any(), name


def test_bf16_stays_near_float32_with_float32_gradients_and_loss(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(kind), make_batch()
    wanted = loss_sum(model, batch).nats
    with autocast_context("bf16", torch.device("cpu"), cpu_capabilities={"avx512_bf16": True}):
        assert model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS).dtype == torch.bfloat16
        sums = loss_sum(model, batch)
    torch.autograd.backward(sums.objective)
    assert sums.nats.dtype == torch.float32
    assert not torch.equal(sums.nats, wanted)
    # 8 bits of significand on logits of about 10: a hundredth of the loss
    torch.testing.assert_close(sums.nats, wanted, rtol=2e-2, atol=0)
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_in_float64_nothing_on_the_way_is_narrower(kind: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    """The slope over a step of 1e-7 along the gradient: one float32 in between would leave of it nothing but rounding."""
    model, batch = make_model(kind).double(), make_batch()
    slopes = gradients(model, batch, z_loss=kind.z_loss)
    steepness = torch.stack([slope.square().sum() for slope in slopes.values()]).sum().sqrt()

    def moved(by: float) -> torch.Tensor:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(by * slopes[name] / steepness)
        return loss_sum(model, batch, z_loss=kind.z_loss).objective.detach()

    here, there = moved(-1e-7), moved(2e-7)
    assert here.dtype == torch.float64
    assert ((there - here) / 2e-7).item() == pytest.approx(steepness.item(), rel=1e-5)
