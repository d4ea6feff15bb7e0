"""The digest on an accelerator equals the digest of the same bits on the CPU."""

from __future__ import annotations

import pytest
import torch

from surefoot.tensors.digest import box_digest, tensor_digest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str)
def test_bits_on_the_device_have_the_digest_of_the_host(device: torch.device, dtype: torch.dtype) -> None:
    for shape in ((7, 11), (3, 300_000), (257, 1025)):
        tensor = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
        assert tensor_digest(tensor.to(device)) == tensor_digest(tensor)
        half = shape[1] // 2
        box = tensor[:, half:]
        assert box_digest(box.to(device), global_shape=shape, offsets=(0, half)) == box_digest(box, global_shape=shape, offsets=(0, half))
