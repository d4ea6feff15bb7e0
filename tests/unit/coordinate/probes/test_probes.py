"""Probes: a verdict for each, from a process of its own; links and clocks by pure functions and by real processes."""

from __future__ import annotations

import itertools
import math
import os
import random
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.coordinate.probes import checks
from surefoot.coordinate.probes.bisect import find_bad_links, rounds, slow_pairs
from surefoot.coordinate.probes.checks import ProbeWish, gpu_faults
from surefoot.coordinate.probes.clock import Exchange, answer_offset, ask_offset, offset_of
from surefoot.coordinate.probes.records import ProbeResult, is_sound
from surefoot.coordinate.probes.run import QUICK, run_probes
from surefoot.coordinate.telemetry.collect import Gpus, KernelLog
from surefoot.coordinate.telemetry.records import GpuSample


@given(num_nodes=st.integers(2, 9), num_bad=st.integers(0, 3), seed=st.integers(0, 999))
def test_halving_finds_what_measuring_all_would(num_nodes: int, num_bad: int, seed: int) -> None:
    nodes = [f"n{index}" for index in range(num_nodes)]
    pairs = list(itertools.combinations(nodes, 2))
    bad = set(random.Random(seed).sample(pairs, min(num_bad, len(pairs))))
    found = find_bad_links(nodes, lambda links: not bad & set(links))
    covered = set(found.links) | {pair for pair in bad if set(pair) & set(found.nodes)}
    assert covered == bad
    assert found.num_measured <= 1 + 2 * max(1, len(bad)) * math.ceil(math.log2(len(pairs) + 1))


def test_a_bad_node_is_named_instead_of_its_links() -> None:
    nodes = ["a", "b", "c", "d"]
    found = find_bad_links(nodes, lambda links: not any("c" in link for link in links))
    assert (found.nodes, found.links) == (("c",), ())
    one = find_bad_links(nodes, lambda links: ("a", "d") not in links)
    assert (one.nodes, one.links) == ((), (("a", "d"),))
    assert find_bad_links(["a"], lambda links: False).links == ()
    with pytest.raises(ValueError, match="3 measurements"):
        find_bad_links([f"n{index}" for index in range(9)], lambda links: False, max_measured=3)


@given(num_nodes=st.integers(2, 12))
def test_rounds_have_every_pair_once_and_no_node_twice(num_nodes: int) -> None:
    nodes = [str(index) for index in range(num_nodes)]
    found = list(rounds(nodes))
    assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in found)
    assert sorted(tuple(sorted(pair)) for one in found for pair in one) == sorted(
        tuple(sorted(pair)) for pair in itertools.combinations(nodes, 2)
    )


def test_slow_pairs_are_held_to_the_usual_one() -> None:
    speeds = {("a", "b"): 100.0, ("a", "c"): 95.0, ("b", "c"): 40.0}
    assert slow_pairs(speeds, share=0.7) == (("b", "c"),)
    assert slow_pairs({}, share=0.7) == ()


def test_the_offset_is_that_of_the_shortest_exchange() -> None:
    long, short = Exchange(0.0, 7.0, 7.0, 4.0), Exchange(10.0, 15.1, 15.1, 10.2)
    found = offset_of([long, short])
    assert found is not None
    assert found.offset_s == pytest.approx(5.0)
    assert found.error_s == pytest.approx(0.1)
    assert offset_of([]) is None


def test_clocks_are_compared_over_a_real_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10.0)
        answering = threading.Thread(target=answer_offset, args=(theirs,), kwargs={"ahead_s": 30.0})
        answering.start()
        found = ask_offset(ours)
        answering.join(10.0)
    assert found is not None
    assert abs(found.offset_s - 30.0) <= found.error_s + 0.001


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"remap_failed": True}, "could not be remapped"),
        ({"remap_pending": True}, "waits for a reset"),
        ({"ecc_volatile_uncorrected": 2}, "2 uncorrected"),
        ({"recovery_action": "Drain and Reset"}, "asks for"),
        ({"nvlinks": 18, "nvlinks_up": 17}, "17 of 18"),
    ],
)
def test_what_an_accelerator_says_against_itself(figures: dict[str, object], words: str) -> None:
    (fault,) = gpu_faults(GpuSample("g", **figures))  # type: ignore[arg-type]
    assert words in fault
    assert gpu_faults(GpuSample("g", recovery_action="None", remap_failed=False, ecc_volatile_uncorrected=0)) == []


def test_accelerators_that_are_wanted_and_do_not_answer_are_a_failure() -> None:
    nobody = Gpus(limit_s=1.0, command=("no-such-program-here",))
    assert checks.probe_gpus(ProbeWish(), gpus=nobody).verdict == "unknown"
    assert checks.probe_gpus(ProbeWish(num_gpus=8), gpus=nobody).verdict == "failed"


def test_xids_of_earlier_generations_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("[5.0] NVRM: Xid (PCI:0000:01:00): 79, off the bus\n[9.0] NVRM: Xid (PCI:0000:01:00): 45, cleaned up\n")

    def verdict(since_boot_s: float) -> str:
        return checks.probe_xids(ProbeWish(since_boot_s=since_boot_s), log=KernelLog(tmp_path / "kmsg", from_start=True)).verdict

    assert (verdict(0.0), verdict(6.0)) == ("failed", "ok")
    assert checks.probe_xids(ProbeWish(), log=KernelLog(tmp_path / "absent")).verdict == "unknown"


def test_memory_and_ports_of_a_made_node(tmp_path: Path) -> None:
    assert checks.probe_memory(ProbeWish(), root=tmp_path).verdict == "unknown"
    edac = tmp_path / "sys/devices/system/edac/mc/mc0"
    edac.mkdir(parents=True)
    (edac / "ue_count").write_text("1\n")
    assert checks.probe_memory(ProbeWish(), root=tmp_path).verdict == "failed"
    (edac / "ue_count").write_text("0\n")
    assert checks.probe_memory(ProbeWish(), root=tmp_path).verdict == "ok"
    assert checks.probe_ports(ProbeWish(), root=tmp_path).verdict == "unknown"
    port = tmp_path / "sys/class/infiniband/m0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("100 Gb/sec\n")
    assert checks.probe_ports(ProbeWish(), root=tmp_path).verdict == "ok"
    assert checks.probe_ports(ProbeWish(port_gbps=400.0), root=tmp_path).verdict == "failed"


def test_the_disk_gives_back_what_it_got_and_nothing_stays(tmp_path: Path) -> None:
    result = checks.probe_disk(ProbeWish(folder=str(tmp_path), disk_bytes=1 << 20))
    assert result.verdict == "ok"
    assert result.figures["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert checks.probe_disk(ProbeWish(folder=str(tmp_path), disk_bytes=1 << 20, min_bytes_per_s=1e18)).verdict == "failed"
    assert checks.probe_disk(ProbeWish(folder=str(tmp_path / "absent"))).verdict == "failed"
    assert checks.probe_space(ProbeWish(folder=str(tmp_path), min_free_bytes=1 << 62)).verdict == "failed"


def test_the_quick_probes_run_in_processes_of_their_own(tmp_path: Path) -> None:
    results = run_probes(QUICK, ProbeWish(folder=str(tmp_path), min_free_bytes=0), limit_s=60.0)
    assert [result.name for result in results] == list(QUICK)
    assert {result.name: result.verdict for result in results}["space"] == "ok"


def test_a_probe_that_hangs_is_named_and_hides_no_other(tmp_path: Path) -> None:
    """nvidia-smi is a program here that never answers."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        gpu, space = run_probes(("gpu", "space"), ProbeWish(folder=str(tmp_path), min_free_bytes=0), limit_s=3.0)
    assert (gpu.verdict, space.verdict) == ("hung", "ok")
    assert not is_sound((gpu, space))
    ours = [path for path in Path("/proc").glob("[0-9]*/environ") if str(program.parent).encode() in _read(path)]
    assert ours == []


def test_a_probe_that_raises_has_failed() -> None:
    (result,) = run_probes(("no-such-probe",), ProbeWish(), limit_s=60.0)
    assert result.verdict == "failed"
    assert "no-such-probe" in result.reason
    assert is_sound((ProbeResult("a", "ok", ""), ProbeResult("b", "unknown", "")))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.campaign
def test_computing_has_known_bits_and_processes_reach_each_other() -> None:
    wish = ProbeWish(num_ranks=3)
    first, bandwidth, again = run_probes(("compute", "bandwidth"), wish, limit_s=120.0, at_once=False) + run_probes(
        ("compute",), wish, limit_s=120.0
    )
    assert (first.verdict, bandwidth.verdict) == ("ok", "ok")
    assert first.figures["digest"] == again.figures["digest"]
    assert bandwidth.figures["bytes_per_s"] > 0
