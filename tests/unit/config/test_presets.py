from __future__ import annotations

import pytest

from surefoot.config import load_config
from surefoot.config.presets import PRESETS
from surefoot.config.schema import settings_of
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import ModelSection


@pytest.mark.parametrize(
    ("preset", "vocab_size", "millions"),
    [
        ("quickstart", 8192, 1.9),
        ("124m", 50304, 124),
        ("350m", 50304, 355),
        ("774m", 50304, 778),
        ("1b", 128256, 1236),
        ("8b", 128256, 8030),
    ],
)
def test_presets_are_as_large_as_their_names_say(preset: str, vocab_size: int, millions: float) -> None:
    assert resolve_sizes(ModelSection(**PRESETS[preset]), vocab_size).num_parameters / 1e6 == pytest.approx(millions, rel=0.02)


def test_presets_set_settings_that_exist_and_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, sizes in PRESETS.items():
        assert set(sizes) <= set(settings_of(ModelSection))
        path = tmp_path_factory.mktemp("preset") / "run.toml"
        path.write_text(f'[model]\npreset = "{name}"\n')
        model = load_config(path).config.model
        assert {key: getattr(model, key) for key in sizes} == sizes
