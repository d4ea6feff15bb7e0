from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.tensors.memory_snapshot import leave_memory_snapshot


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator of a device has an account to give")
def test_without_a_device_there_is_no_account(tmp_path: Path) -> None:
    assert leave_memory_snapshot(tmp_path / "memory.json") is None
    assert list(tmp_path.iterdir()) == []
