"""The vendor file: what is read off a driver's document and a kernel log, and what it says where there is neither."""

from __future__ import annotations

import pytest

from surefoot.heal.vendor import Device, Seat, VendorFile, Xid, device_of, devices_in, markdown, of_device, same_slot, seat_of, xids_in

SMI = """<?xml version="1.0" ?><nvidia_smi_log><driver_version>535.1</driver_version><cuda_version>12.2</cuda_version>
<gpu id="00000000:9B:00.0"><product_name>H</product_name><serial>165</serial><uuid>GPU-1</uuid>
<ecc_errors><volatile><sram_uncorrectable>2</sram_uncorrectable><dram_correctable>N/A</dram_correctable></volatile></ecc_errors>
<remapped_rows><remapped_row_unc>1</remapped_row_unc><remapped_row_pending>No</remapped_row_pending></remapped_rows></gpu>
<gpu id="00000000:9C:00.0"><serial>N/A</serial><remapped_rows>N/A</remapped_rows></gpu></nvidia_smi_log>"""
LOG = """[Sun Feb 23 16:24:18 2025] NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=x, Timeout after 6s
[    5.123] NVRM: Xid (PCI:0000:9c:00): 79, GPU has fallen off the bus.
kern  :warn  : 2025-01-21T04:41:44,283302+00:00 NVRM: Xid (PCI:0000:9b:00): 43
NVRM: Xid (PCI:0000:9b:00): many
nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal"""


def test_devices_with_their_names_and_counters() -> None:
    driver, (first, second) = devices_in(SMI)
    assert driver == {"driver_version": "535.1", "cuda_version": "12.2"}
    assert first.names == {"product": "H", "serial": "165", "uuid": "GPU-1"}
    assert first.counters == {
        "ecc_errors.volatile.sram_uncorrectable": "2",
        "remapped_rows.remapped_row_unc": "1",
        "remapped_rows.remapped_row_pending": "No",
    }
    assert (second.index, second.names, second.counters) == (1, {}, {})
    with pytest.raises(ValueError, match="no nvidia-smi document"):
        devices_in("NVIDIA-SMI has failed")


def test_a_rank_has_the_device_that_it_said_and_no_other() -> None:
    """Rank 1 of a process that sees the second GPU alone; of rank 0 nothing is known."""
    devices = [Device(index, f"0000:9{index}:00.0", {"uuid": f"GPU-{index}"}, {}) for index in range(2)]
    told = {"node7": {"1": [0, "gpu-1"], "3": [1, "GPU-9"], "4": [2, ""]}, "node8": {"5": [0, "GPU-0"]}, "odd": 3}
    seat = seat_of(told, 1)
    assert seat == Seat("node7", 0, "gpu-1")
    assert device_of(seat, devices) == devices[1]
    assert seat_of(told, 0) is seat_of(None, 1) is seat_of([], 1) is None
    for rank in (3, 4):
        assert (seat := seat_of(told, rank)) is not None
        assert device_of(seat, devices) is None


def test_xids_of_a_device() -> None:
    xids = xids_in(LOG.splitlines())
    assert [(xid.number, xid.time) for xid in xids] == [
        (119, "Sun Feb 23 16:24:18 2025"),
        (79, "5.123"),
        (43, "2025-01-21T04:41:44,283302+00:00"),
    ]
    assert [xid.number for xid in of_device(xids, devices_in(SMI)[1][0])] == [119, 43]
    assert len(of_device(xids, None)) == 3
    assert xids[1].text == "GPU has fallen off the bus."


def test_addresses_of_one_slot() -> None:
    assert same_slot("0000:9b:00", "00000000:9B:00.0")
    assert not same_slot("0000:9b:00", "0001:9b:00.0")


def test_the_page_says_what_there_is_and_what_is_missing() -> None:
    device = Device(0, "0000:9b:00.0", {"serial": "165"}, {"ecc.unc": "2", "ecc.corr": "0"})
    finding = {"step": 7, "time_utc": "t", "rule": "replica_differs", "reason": "rank 1 differs"}
    file = VendorFile(
        "mine", 1, "node7", "t", "rank 1 differs", device=device, xids=(Xid(79, "0000:9b:00", "gone", ""),), evidence=(finding,)
    )
    page = markdown(file)
    for words in ("# Rank 1 of mine on node7", "- serial: 165", "- ecc.unc: 2", "- Xid 79 at 0000:9b:00: gone", "step 7"):
        assert words in page
    assert "ecc.corr" not in page
    assert "- no nvidia-smi" in markdown(VendorFile("mine", 1, "node7", "t", "", missing=("no nvidia-smi",)))
