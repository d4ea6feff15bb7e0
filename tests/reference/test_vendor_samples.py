"""The vendor file's readers on real driver documents and kernel logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.heal.vendor import devices_in, of_device, xids_in
from tests.reference.conftest import ROOT


@pytest.fixture(scope="module")
def samples() -> Path:
    folder = ROOT / "ops"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder


def test_every_document_of_a_driver_is_read(samples: Path) -> None:
    paths = sorted(samples.glob("nvidia_smi/*.xml"))
    assert len(paths) >= 5
    for path in paths:
        driver, devices = devices_in(path.read_text())
        assert driver["driver_version"], path.name
        assert devices, path.name
        assert devices[0].names["uuid"].startswith("GPU-"), path.name
        assert all(value not in ("", "N/A") for device in devices for value in device.counters.values()), path.name
    counted = devices_in((samples / "nvidia_smi" / "telegraf-a100-sxm4-v12.xml").read_text())[1][0]
    assert counted.names["serial"] == "1650522003820"
    assert counted.counters["ecc_errors.aggregate.dram_uncorrectable"] == "0"


def test_every_xid_of_a_kernel_log_is_found_and_nothing_else(samples: Path) -> None:
    for path in sorted((samples / "xid").iterdir()):
        lines = path.read_text(errors="replace").splitlines()
        numbered = [line for line in lines if "NVRM: Xid (PCI:" in line and line.partition("): ")[2][:1].isdigit()]
        assert len(xids_in(lines)) == len(numbered), path.name
    gsp = xids_in((samples / "xid" / "gpud-dmesg-xid-119.log").read_text().splitlines())
    assert gsp[0].number == 119
    assert (gsp[0].pci, gsp[0].time) == ("0000:9b:00", "Sun Feb 23 16:24:18 2025")
    assert of_device(gsp, None) == tuple(gsp[-200:])
