"""Buffers come back as they were, whether a forward wrote into them or put others in their place."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.parallel.buffers import keep_buffers


def test_buffers_that_were_written_or_rebound_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    put_back = keep_buffers(model)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    last = model[1]
    assert isinstance(last, nn.BatchNorm1d)
    last.running_mean = torch.full((3,), 7.0)
    assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    put_back()
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {name: buffer.tolist() for name, buffer in before.items()}
    assert len(list(model.buffers())) == len(before)
