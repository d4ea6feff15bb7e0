"""The accelerators of docs/layout-search.md: the list is whole, and the description of one's own can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.plan.hardware import ACCELERATORS, GIB, accelerator

PAGE = (Path(__file__).parents[3] / "docs" / "layout-search.md").read_text()
(TOML,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NEEDED = ("memory_bytes", "memory_bandwidth", "devices_per_node", "node_link", "fabric_link", "host_link", "disk")


def test_every_accelerator_is_listed_with_its_peak_and_memory() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) (\w+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(ACCELERATORS)
    for name, peak, dtype, gib in rows:
        one = ACCELERATORS[name]
        assert (float(peak) * 1e12, float(gib) * GIB) == pytest.approx((one.peaks[dtype], one.memory_bytes))


def test_the_description_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    own = accelerator(str(path))
    assert (own.name, own.devices_per_node, own.peak_flops("bf16")) == ("h100-pcie", 4, 756e12)
    path.write_text(re.sub(r"^(name|source) = .*\n", "", TOML, flags=re.MULTILINE))
    assert (accelerator(str(path)).name, accelerator(str(path)).source) == ("mine", str(path))


@pytest.mark.parametrize("key", NEEDED)
def test_a_key_that_is_left_out_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(rf"^{key} = .*\n", "", TOML, flags=re.MULTILINE))
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        accelerator(str(path))
