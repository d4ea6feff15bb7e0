"""The host and its ports out of the kernel's files; collecting them from a made root and from this machine; keeping them."""

from __future__ import annotations

import json
from pathlib import Path

from surefoot.coordinate.telemetry.collect import Gpus, KernelLog, read_disk, read_host, read_ports
from surefoot.coordinate.telemetry.host import parse_diskstats, parse_host
from surefoot.coordinate.telemetry.infiniband import parse_ports, port_faults
from surefoot.coordinate.telemetry.records import GpuSample, HostSample, NodeSample
from surefoot.coordinate.telemetry.store import TelemetryLog, nodes_of, read_samples, samples_at


def port_files(device: str, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", interface: str = "up") -> dict[str, str]:
    port = f"/sys/class/infiniband/{device}/ports/1"
    return {
        f"{port}/state": f"{state}\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/rate": f"{rate}\n",
        f"{port}/link_layer": "InfiniBand\n",
        f"{port}/counters/symbol_error": "3\n",
        f"{port}/counters/broken": "N/A (no PMA)\n",
        f"{port}/hw_counters/local_ack_timeout_err": "9\n",
        f"{port}/hw_counters/lifespan": "12\n",
        f"/sys/class/infiniband/{device}/device/net/ib_{device}/operstate": f"{interface}\n",
        f"/sys/class/infiniband/{device}/device/net/ib_{device}/dev_port": "0\n",
    }


def test_a_port_with_its_counters() -> None:
    (port,) = parse_ports(port_files("m0"))
    assert (port.id, port.state, port.physical_state, port.rate_gbps, port.interface_state) == ("m0/1", "ACTIVE", "LinkUp", 400.0, "up")
    assert port.counters == {"symbol_error": 3, "hw.local_ack_timeout_err": 9}
    (silent,) = parse_ports({"m0/ports/1/state": "garbage"})
    assert (silent.state, silent.rate_gbps, silent.counters) == (None, None, {})


def test_ports_are_held_to_their_equals_or_to_what_is_wanted() -> None:
    good = port_files("m0") | port_files("m1")
    assert port_faults(parse_ports(good)) == ()
    slow = parse_ports(good | port_files("m2", rate="100 Gb/sec"))
    assert [(fault.id, fault.kind) for fault in port_faults(slow)] == [("m2/1", "slow")]
    assert [fault.id for fault in port_faults(parse_ports(good), wanted_gbps=800.0)] == ["m0/1", "m1/1"]
    down = parse_ports(good | port_files("m2", state="1: DOWN"))
    assert [(fault.id, fault.kind) for fault in port_faults(down)] == [("m2/1", "down")]
    assert port_faults(down, unused=frozenset({"m2/1"})) == ()
    assert [fault.id for fault in port_faults(parse_ports(good | port_files("m2", interface="down")))] == ["m2/1"]
    assert port_faults(parse_ports(port_files("m2", interface="down"))) == ()  # used without one
    assert port_faults(parse_ports(port_files("m2", state="1: DOWN"))) == ()  # a node without a fabric


HOST = {
    "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 10 kB\nSwapFree: 4 kB\nMemF",
    "proc/vmstat": "pgfault 5\noom_kill 2\n",
    "proc/loadavg": "3.25 1 1 1/1 1\n",
    "proc/pressure/memory": "some avg10=1.50 avg60=0 avg300=0 total=5\nfull avg10=0.50 avg60=0 avg300=0 total=5\n",
    "sys/devices/system/edac/mc/mc0/ce_count": "4\n",
    "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
}


def test_the_host_by_names(tmp_path: Path) -> None:
    host = parse_host(HOST)
    assert (host.memory_total_bytes, host.memory_available_bytes, host.swap_used_bytes, host.oom_kills) == (
        1000 << 10,
        400 << 10,
        6 << 10,
        2,
    )
    assert (host.load_1m, host.memory_some_percent, host.memory_full_percent, host.cpu_some_percent) == (3.25, 1.5, 0.5, None)
    assert (host.ecc_corrected, host.ecc_uncorrected) == (4, 0)
    assert parse_host({}) == HostSample()
    assert parse_host({"proc/meminfo": "MemTotal: 10"}).memory_total_bytes is None  # cut off before its unit
    for name, text in HOST.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_host(tmp_path).ecc_corrected == 4


def test_disks_are_found_by_their_number() -> None:
    line = "   8       1 sda1 10 0 100 5 20 0 200 5 0 1500 10 0 0 0 0\n"
    assert parse_diskstats(line + "8 2 sdb\n") == {(8, 1): (51200, 102400, 1.5)}


def test_this_machine_is_read_and_ports_of_a_made_one(tmp_path: Path) -> None:
    host, disk = read_host(), read_disk(tmp_path)
    assert host.memory_total_bytes is not None
    assert disk.total_bytes is not None
    assert disk.free_bytes is not None
    assert read_disk(tmp_path / "absent").free_bytes is None
    device = tmp_path / "sys/class/infiniband/m0/ports/1"
    device.mkdir(parents=True)
    (device / "state").write_text("4: ACTIVE\n")
    assert [port.state for port in read_ports(tmp_path)] == ["ACTIVE"]


def test_a_driver_that_hangs_is_left_alone_in_time(tmp_path: Path) -> None:
    gpus = Gpus(limit_s=0.1, command=("sleep", "60"))
    assert gpus.read() == ()
    assert "did not answer within 0.1 s" in gpus.why_not
    absent = Gpus(limit_s=1.0, command=("no-such-program-here",))
    assert (absent.read(), absent.why_not) == ((), "there is no no-such-program-here")
    log = KernelLog(tmp_path / "kmsg")
    assert (log.read(), "kmsg" in log.why_not) == ((), True)


def taken(step: int) -> NodeSample:
    return NodeSample("n", "2026-01-01T00:00:00Z", float(step), step=step, gpus=(GpuSample("g", temperature_c=50.0, pcie_replays=0),))


def test_samples_come_back_without_what_nobody_said(tmp_path: Path) -> None:
    log = TelemetryLog(tmp_path, node="../n 1", max_bytes=1 << 20)
    for step in range(5):
        log.append(taken(step))
    assert nodes_of(tmp_path) == ["_n_1"]
    samples = read_samples(tmp_path, "../n 1")
    assert samples[-1]["gpus"] == [{"id": "g", "temperature_c": 50.0, "pcie_replays": 0}]
    assert [sample["step"] for sample in samples_at(tmp_path, "../n 1", first_step=1, last_step=2)] == [1, 2]
    assert [sample["step"] for sample in read_samples(tmp_path, "../n 1", newest=2)] == [3, 4]


def test_a_torn_line_harms_no_other_and_space_is_bounded(tmp_path: Path) -> None:
    TelemetryLog(tmp_path, node="n", max_bytes=1 << 20).append(taken(0))
    (segment,) = (tmp_path / "telemetry" / "n").iterdir()
    with segment.open("a") as file:
        file.write('{"format_version": 1, "st')
    log = TelemetryLog(tmp_path, node="n", max_bytes=4096)
    for step in range(1, 200):
        log.append(taken(step))
    folder = tmp_path / "telemetry" / "n"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2 * 4096
    steps = [sample["step"] for sample in read_samples(tmp_path, "n")]
    assert steps == list(range(steps[0], 200))
    assert len(steps) >= 8
    assert json.loads(next(iter(sorted(folder.iterdir()))).read_text().splitlines()[0])["format_version"] == 1
