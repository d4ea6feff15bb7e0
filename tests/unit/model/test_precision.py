"""The precision context: bf16 where it is asked for, and a warning with the price where it is emulated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from surefoot.model.precision import autocast_context, has_bf16_units

CPU = torch.device("cpu")
WITH: Mapping[str, Any] = {"cpu_name": "x", "avx2": True, "avx512_bf16": True, "amx_bf16": False}
WITHOUT: Mapping[str, Any] = {"cpu_name": "x", "avx2": True, "avx512_bf16": False, "amx_bf16": False}


def test_fp32_changes_nothing_and_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with autocast_context("fp32", CPU, cpu_capabilities=WITHOUT):
        assert not torch.is_autocast_enabled("cpu")
    assert not caplog.records


def test_bf16_products_and_the_context_can_be_entered_again() -> None:
    context = autocast_context("bf16", CPU, cpu_capabilities=WITH)
    linear = torch.nn.Linear(4, 4)
    for _ in range(2):
        with context:
            assert linear(torch.ones(4)).dtype == torch.bfloat16
        assert linear(torch.ones(4)).dtype == torch.float32
    assert linear.weight.dtype == torch.float32


def test_emulated_bf16_is_warned_about_with_its_price(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        autocast_context("bf16", CPU, cpu_capabilities=WITHOUT)
    assert "21.6 times slower" in caplog.text


def test_a_cpu_with_bf16_units_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        autocast_context("bf16", CPU, cpu_capabilities=WITH)
    assert not caplog.records


@pytest.mark.parametrize(("capabilities", "wanted"), [(WITH, True), (WITHOUT, False), ({}, False), ({"sve_bf16": True}, True)])
def test_bf16_units_are_found_by_name(capabilities: Mapping[str, Any], wanted: bool) -> None:
    assert has_bf16_units(capabilities) is wanted
    assert isinstance(has_bf16_units(torch.cpu.get_capabilities()), bool)
