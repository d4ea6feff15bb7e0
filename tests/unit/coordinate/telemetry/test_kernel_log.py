"""One event per fault in the kernel log, whatever stands before the message and however many lines follow it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.coordinate.telemetry.kernel_log import Crash, OomKill, SXidEvent, XidEvent, oom_pids, parse_kernel_log, since, xids_of
from surefoot.coordinate.telemetry.xids import NVLINK_CODES, XIDS, Advice, judge_xid, worst_advice

HEADS = ["", "[12.5] ", "[Tue Dec  1 02:00:00 2026] ", "kern  :err   : 2026-12-01T02:00:00,000000+00:00 ", "3,44,12500000,-;"]


@pytest.mark.parametrize("head", HEADS)
def test_an_xid_is_found_behind_every_head(head: str) -> None:
    (event,) = parse_kernel_log(f"{head}NVRM: Xid (PCI:0000:3B:00): 94, pid=77, name=python3, Contained: SM\n")
    assert isinstance(event, XidEvent)
    assert (event.device, event.code, event.pid, event.process, event.message) == ("0000:3b:00", 94, 77, "python3", "Contained: SM")
    assert event.stamp_s == (12.5 if head.startswith(("[12", "3,")) else None)


def test_a_part_of_an_accelerator_is_named_inside_the_bracket() -> None:
    (event,) = parse_kernel_log("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid='<unknown>', name=<unknown>, Contained\n")
    assert isinstance(event, XidEvent)
    assert (event.device, event.pid, event.process, event.message) == ("0000:01:00", None, None, "Contained")


def test_the_history_of_the_gsp_belongs_to_its_event() -> None:
    log = [
        "NVRM: Xid (PCI:0000:01:00): 119, pid=5, name=x, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
        "NVRM: GPU0 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x1 0x2.",
        "NVRM: GPU0 RPC history (CPU -> GSP):",
        "NVRM:     entry function                   data0",
        "NVRM:      0    103  GSP_RM_ALLOC          0x1",
        "NVRM:     -1    76   GSP_RM_CONTROL        0x2",
        "eth0: link is up",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    ]
    first, second = parse_kernel_log(log)
    assert isinstance(first, XidEvent)
    assert isinstance(second, XidEvent)
    assert (first.num_lines, second.num_lines) == (6, 1)
    assert xids_of((first, second)) == ("Xid 119 on 0000:01:00", "Xid 154 on 0000:01:00")


def test_a_switch_tells_of_one_error_in_several_lines() -> None:
    head = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, "
    events = parse_kernel_log(
        [f"{head}Fatal, Link 30 LTSSM Fault Up", f"{head}Severity 1 Engine instance 30", f"{head}Data {{0x1}}", head + "Non-fatal, Link 2"]
    )
    assert [(event.link, event.is_fatal, event.num_lines) for event in events if isinstance(event, SXidEvent)] == [
        (30, True, 3),
        (2, False, 1),
    ]


def test_kills_and_crashes_name_their_process() -> None:
    log = (
        "[1.0] Out of memory: Killed process 41 (python3) total-vm:1kB\n"
        "[2.0] Memory cgroup out of memory: Killed process 42 (rank one) total-vm:1kB\n"
        "[3.0] pt_main_thread[43]: segfault at 7f ip 0f sp 0f error 4 in libnccl.so.2[7f+1]\n"
        "[4.0] oom_reaper: reaped process 41 (python3)\n"
    )
    events = parse_kernel_log(log)
    assert events == (
        OomKill(41, "python3", False, 1.0),
        OomKill(42, "rank one", True, 2.0),
        Crash(43, "pt_main_thread", "libnccl.so.2", 3.0),
    )
    assert oom_pids(events) == {41, 42}
    assert since(events, stamp_s=2.0) == events[1:]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:01:00): %d, x",
        "SXid (invalid): some error",
        "NVRM: Xid (PCI:0000:01:00)",
        "oom-kill:constraint=X",
        "app: SXid (PCI:0:0): xyz, Fatal",
    ],
)
def test_what_has_not_its_form_is_no_event(line: str) -> None:
    assert parse_kernel_log(line) == ()


@given(noise=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_garbage_neither_harms_nor_hides(noise: bytes) -> None:
    log = noise.replace(b"Xid", b"") + b"\nNVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
    events = [event for event in parse_kernel_log(log) if isinstance(event, XidEvent)]
    assert [event.code for event in events] == [79]


def xid(code: int, message: str = "") -> XidEvent:
    (event,) = parse_kernel_log(f"NVRM: Xid (PCI:0000:01:00): {code}, {message}")
    assert isinstance(event, XidEvent)
    return event


@pytest.mark.parametrize(
    ("code", "message", "advice"),
    [
        (31, "", Advice.RESTART),
        (45, "", Advice.WATCH),
        (79, "", Advice.DRAIN),
        (119, "", Advice.RESET),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 01", Advice.DRAIN),
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 01", Advice.WATCH),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", Advice.DRAIN),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)", Advice.RESET),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", Advice.WATCH),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Advice.DRAIN),
    ],
)
def test_a_code_and_its_message_say_what_to_do(code: int, message: str, advice: Advice) -> None:
    assert judge_xid(xid(code, message)).advice is advice


def test_an_unknown_code_is_watched_and_said_to_be_unknown() -> None:
    judged = judge_xid(xid(4711, "new"))
    assert (judged.advice, judged.is_known, judged.blames_program) == (Advice.WATCH, False, False)
    assert not set(XIDS) & set(NVLINK_CODES)


def test_the_worst_of_several_decides() -> None:
    worst = worst_advice([xid(45), xid(94), xid(79), xid(48)])
    assert worst is not None
    assert worst.event == xid(79)
    assert worst_advice([OomKill(1, "x", False)]) is None
