"""What a rank's own gradient comes to before it is reduced."""

from __future__ import annotations

import pytest
import torch

from surefoot.parallel.gauges import Gauges


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 2.0), (torch.float64, 1e30)])
def test_a_finite_buffer_has_a_finite_norm(dtype: torch.dtype, value: float) -> None:
    gauges = Gauges(device=torch.device("cpu"))
    gauges.note_contribution(torch.full((1 << 16,), value, dtype=dtype))  # its norm is 256 times the value
    squared = gauges.squared_local_norm()
    assert squared is not None
    assert float(squared) == pytest.approx((256 * value) ** 2, rel=1e-3)  # in float32
