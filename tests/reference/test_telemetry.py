"""What real drivers and kernels print, of several generations, through the parsers."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest

from surefoot.coordinate.telemetry.dcgm import parse_dcgm
from surefoot.coordinate.telemetry.gpu_xml import parse_nvidia_smi
from surefoot.coordinate.telemetry.infiniband import parse_ports, port_faults
from surefoot.coordinate.telemetry.kernel_log import Crash, OomKill, SXidEvent, XidEvent, parse_kernel_log
from surefoot.coordinate.telemetry.nvlink import parse_nvlink_status, with_nvlinks


@pytest.mark.parametrize(
    ("name", "num_gpus", "product", "power_w"),
    [
        ("tesla-t4", 1, "Tesla T4", 26.78),
        ("a10g", 1, "NVIDIA A10G", 25.58),
        ("a100-sxm4-v12", 1, "NVIDIA A100-SXM4-80GB", 67.03),
        ("rtx-3080-v13", 1, "NVIDIA GeForce RTX 3080", 142.33),
        ("rtx-4000-sff-ada-v13", 1, "NVIDIA RTX 4000 SFF Ada Generation", 8.44),
    ],
)
def test_every_generation_of_the_driver_is_read(ops_data: Path, name: str, num_gpus: int, product: str, power_w: float) -> None:
    text = (ops_data / "nvidia_smi" / f"telegraf-{name}.xml").read_bytes()
    gpus = parse_nvidia_smi(text)
    assert len(gpus) >= num_gpus
    gpu = gpus[0]
    assert (gpu.name, gpu.power_w) == (product, power_w)
    for known in (gpu.temperature_c, gpu.sm_clock_mhz, gpu.memory_total_bytes, gpu.slowed_by, gpu.pcie_replays, gpu.power_limit_w):
        assert known is not None
    for cut in range(0, len(text), 997):
        assert gpus[: len(parse_nvidia_smi(text[:cut]))] == parse_nvidia_smi(text[:cut])


def test_where_error_correction_is_off_its_counts_are_unknown(ops_data: Path) -> None:
    off = parse_nvidia_smi((ops_data / "nvidia_smi" / "telegraf-rtx-4000-sff-ada-v13.xml").read_bytes())[0]
    assert (off.ecc_is_on, off.ecc_volatile_uncorrected, off.ecc_aggregate_corrected) == (False, None, None)
    on = parse_nvidia_smi((ops_data / "nvidia_smi" / "telegraf-a10g.xml").read_bytes())[0]
    assert (on.ecc_is_on, on.ecc_volatile_uncorrected, on.remapped_rows_uncorrected) == (True, 0, 0)


def test_all_links_of_eight_accelerators(ops_data: Path) -> None:
    status = parse_nvlink_status((ops_data / "nvidia_smi" / "gpud-nvlink-status-a100.txt").read_text())
    assert [len(one.links) for one in status] == [12] * 8
    assert with_nvlinks((), status) == ()


def test_every_xid_line_of_the_collection_is_one_event(ops_data: Path) -> None:
    lines = (ops_data / "xid" / "gpud-xid-lines.txt").read_text().splitlines()
    events = [event for event in parse_kernel_log(lines) if isinstance(event, XidEvent)]
    stated = [int(found[1]) for line in lines if (found := re.search(r"Xid \(PCI:[0-9a-f:.]+\): (\d+)", line)) is not None]
    assert [event.code for event in events] == stated
    assert len(stated) == len(lines) - 1  # one has "%d" for its code


def test_the_history_of_a_gsp_time_out_is_one_event(ops_data: Path) -> None:
    events = parse_kernel_log((ops_data / "xid" / "gpud-dmesg-xid-119.log").read_bytes())
    assert {event.code for event in events if isinstance(event, XidEvent)} == {119}
    first = events[0]
    assert isinstance(first, XidEvent)
    assert (first.device, first.pid, first.process) == ("0000:9b:00", 2024380, "nvidia-smi")
    assert first.num_lines > 10


def test_switches_kills_and_crashes(ops_data: Path) -> None:
    folder = ops_data / "xid"
    switches = parse_kernel_log((folder / "gpud-sxid-lines.txt").read_bytes())
    assert {event.code for event in switches if isinstance(event, SXidEvent)} >= {20034, 12028, 22013}
    assert any(event.link == 30 and event.is_fatal for event in switches if isinstance(event, SXidEvent))
    kills = parse_kernel_log((folder / "gpud-dmesg-memory-oom.log").read_bytes())
    assert {event.pid for event in kills if isinstance(event, OomKill)} == {123}
    crashes = parse_kernel_log((folder / "gpud-dmesg-nccl-segfault.log").read_bytes())
    assert {event.library for event in crashes if isinstance(event, Crash)} == {"libnccl.so.2"}
    assert parse_kernel_log((folder / "gpud-fabricmanager.log").read_bytes()) == ()
    assert parse_kernel_log((folder / "gpud-kmsg-peermem.log").read_bytes()) == ()


def test_a_good_node_one_at_the_wrong_rate_and_one_with_a_dead_interface(ops_data: Path) -> None:
    def faults(name: str) -> list[tuple[str, str]]:
        files = json.loads((ops_data / "infiniband" / f"gcm-learn_{name}.json").read_text())
        ports = parse_ports({path: text for path, text in files.items() if isinstance(text, str)})
        assert len(ports) == 8
        return [(fault.id, fault.kind) for fault in port_faults(ports, wanted_gbps=200.0)]

    assert faults("good") == []
    assert {kind for _, kind in faults("ib_intf_bad_rate")} == {"slow"}
    assert len(faults("ib_intf_bad_rate")) == 8
    assert faults("ib_intf_operstate_down") == [("mlx5_6/1", "down")]


def test_the_ports_of_a_real_node(ops_data: Path) -> None:
    with tarfile.open(ops_data / "infiniband" / "gpud-sys-class-infiniband.tar.gz") as archive:
        files = {member.name: data.read().decode() for member in archive if (data := archive.extractfile(member)) is not None}
    ports = parse_ports(files)
    assert len(ports) == 9
    assert {port.rate_gbps for port in ports if port.link_layer == "InfiniBand"} == {400.0}
    assert all("symbol_error" in port.counters and "hw.local_ack_timeout_err" in port.counters for port in ports)
    assert port_faults(ports) == ()  # an Ethernet port is not held to the rate of the fabric


def test_every_metric_that_an_exporter_serves_by_default_can_be_read(ops_data: Path) -> None:
    names = [
        line.split(",")[0].strip()
        for line in (ops_data / "dcgm" / "dcgm-exporter-default-counters.csv").read_text().splitlines()
        if line.startswith("DCGM_FI_")
    ]
    text = "".join(f'{name}{{gpu="0",UUID="GPU-x"}} 1\n' for name in names)
    (gpu,) = parse_dcgm(text)
    for known in (gpu.temperature_c, gpu.power_w, gpu.sm_clock_mhz, gpu.pcie_replays, gpu.utilization_percent, gpu.last_xid):
        assert known == 1
    (blank,) = parse_dcgm("".join(f'{name}{{gpu="0"}} 9223372036854775794\n' for name in names) + 'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 30\n')
    assert (blank.temperature_c, blank.power_w, blank.pcie_replays, blank.remapped_rows_uncorrected) == (30, None, None, None)
