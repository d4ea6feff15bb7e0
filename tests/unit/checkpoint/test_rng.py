"""Random streams go out and come back bit for bit, as JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from surefoot.checkpoint.rng import capture_rng, restore_rng
from surefoot.core.errors import Corrupt

CPU = torch.device("cpu")


def _draw() -> tuple[object, ...]:
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.standard_normal(3).tolist(),
        torch.randn(3).tolist(),
    )


def test_the_streams_go_on_as_if_nothing_had_happened() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    _draw()  # leaves a half-used pair of normals in Python and NumPy
    stored = capture_rng(CPU)
    expected = _draw()
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    restore_rng(stored, device=CPU)
    assert _draw() == expected


def test_what_is_stored_is_json() -> None:
    assert set(json.loads(bytes(capture_rng(CPU).tolist()))) == {"python", "numpy", "torch", "cuda"}


@pytest.mark.parametrize("raw", [b"", b"{}", b"\x80\x04.", b'{"python": 1}'])
def test_foreign_bytes_are_refused(raw: bytes) -> None:
    before = capture_rng(CPU)
    with pytest.raises(Corrupt, match="random state"):
        restore_rng(torch.tensor(list(raw), dtype=torch.uint8), device=CPU)
    assert torch.equal(capture_rng(CPU), before)
