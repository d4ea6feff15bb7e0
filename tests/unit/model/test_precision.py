"""The precision context: half precision where it is asked for, and a warning with the price where it is emulated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch

from surefoot.model.precision import autocast_context, has_units

CPU = torch.device("cpu")
WITH: Mapping[str, Any] = {"cpu_name": "x", "avx2": True, "avx512_bf16": True, "avx512_fp16": True}
WITHOUT: Mapping[str, Any] = {"cpu_name": "x", "avx2": True, "f16c": True, "avx512_bf16": False, "avx512_fp16": False}

Half = Literal["bf16", "fp16"]
halves = pytest.mark.parametrize(("half", "dtype", "price"), [("bf16", torch.bfloat16, "21.6"), ("fp16", torch.float16, "19.5")])


def test_fp32_changes_nothing_and_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with autocast_context("fp32", CPU, cpu_capabilities=WITHOUT):
        assert not torch.is_autocast_enabled("cpu")
    assert not caplog.records


@halves
def test_products_are_half_and_the_context_can_be_entered_again(half: Half, dtype: torch.dtype, price: str) -> None:
    context = autocast_context(half, CPU, cpu_capabilities=WITH)
    linear = torch.nn.Linear(4, 4)
    for _ in range(2):
        with context:
            assert linear(torch.ones(4)).dtype == dtype
        assert linear(torch.ones(4)).dtype == torch.float32
    assert linear.weight.dtype == torch.float32


@halves
def test_only_what_is_emulated_is_warned_about_with_its_price(
    half: Half, dtype: torch.dtype, price: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        autocast_context(half, CPU, cpu_capabilities=WITH)
        assert not caplog.records
        autocast_context(half, CPU, cpu_capabilities=WITHOUT)
    assert f"{half} on a CPU without" in caplog.text
    assert f"{price} times slower" in caplog.text


@pytest.mark.parametrize(
    ("half", "capabilities", "wanted"),
    [
        ("bf16", WITH, True),
        ("bf16", WITHOUT, False),
        ("bf16", {}, False),
        ("bf16", {"sve_bf16": True, "avx512_fp16": False}, True),
        ("fp16", WITH, True),
        ("fp16", {"f16c": True, "avx512_bf16": True}, False),
    ],
)
def test_units_are_found_by_name(half: Half, capabilities: Mapping[str, Any], wanted: bool) -> None:
    assert has_units(half, capabilities) is wanted
    assert isinstance(has_units(half, torch.cpu.get_capabilities()), bool)
