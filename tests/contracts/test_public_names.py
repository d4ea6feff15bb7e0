from __future__ import annotations

import importlib

import pytest

import surefoot


def test_at_most_twenty_names() -> None:
    assert len(surefoot.__all__) <= 20
    assert list(surefoot.__all__) == sorted(surefoot.__all__)


@pytest.mark.parametrize("name", surefoot.__all__)
def test_each_name_can_be_had(name: str) -> None:
    assert getattr(surefoot, name) is not None
    assert name in dir(surefoot)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        importlib.import_module("surefoot").__getattr__("nonsense")
