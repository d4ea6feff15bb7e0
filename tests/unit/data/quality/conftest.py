"""The poisoned sources, prepared once."""

from __future__ import annotations

import pytest

from tests.unit.data.quality.poisoned import Poisoned, prepare_poisoned


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    return prepare_poisoned(tmp_path_factory.mktemp("poisoned"))
