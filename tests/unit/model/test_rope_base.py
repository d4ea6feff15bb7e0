from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from surefoot.core.sections import ModelSection
from surefoot.model.rope import set_rope_base
from surefoot.model.transformer import Transformer
from surefoot.parallel.recompute import recompute
from surefoot.tensors.batch import Batch

MakeModel = Callable[[ModelSection], Transformer]
MakeBatch = Callable[..., Batch]

BASE = 5e5


def logits(model: Transformer, batch: Batch) -> torch.Tensor:
    out_BSV: torch.Tensor = model(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS)
    return out_BSV


def test_another_base_gives_the_bits_of_a_model_that_was_made_with_it(make_model: MakeModel, make_batch: MakeBatch) -> None:
    section, batch = ModelSection(num_layers=2, d_model=32, num_heads=4, d_ff=48), make_batch()
    model = make_model(section)
    before = logits(model, batch)
    set_rope_base(model, BASE)
    assert torch.equal(logits(model, batch), logits(make_model(replace(section, rope_base=BASE)), batch))
    assert not torch.equal(logits(model, batch), before)
    set_rope_base(model, section.rope_base)
    assert torch.equal(logits(model, batch), before)


def test_a_piece_of_a_model_turns_by_the_base_of_the_whole(small: ModelSection, make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = make_model(small), make_batch()
    first, last = model.part(["embed", "blocks.0"]), model.part(["blocks.1", "norm", "embed"])
    set_rope_base(first, BASE)
    whole = logits(model, batch)
    assert torch.equal(last(first(batch.tokens_BS, batch.positions_BS, batch.doc_ids_BS), batch.positions_BS, batch.doc_ids_BS), whole)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_that_are_computed_again_turn_as_their_forward_did(
    small: ModelSection, make_model: MakeModel, make_batch: MakeBatch, mode: str
) -> None:
    kept, again, batch = make_model(small), make_model(small), make_batch()
    recompute(list(again.blocks.children()), mode=mode)  # type: ignore[arg-type]
    for model in (kept, again):
        set_rope_base(model, BASE)
        loss = logits(model, batch).square().mean()
        set_rope_base(model, small.rope_base)  # too early, and of no consequence
        loss.backward()  # type: ignore[no-untyped-call]
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
