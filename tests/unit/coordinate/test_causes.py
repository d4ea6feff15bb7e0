from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from surefoot.coordinate.causes import Cause, HostFacts, cause_of, fingerprint_of, is_peer_error
from surefoot.coordinate.witness import Witness

LIVE = Witness(1, 4711, "S", None, 0.1, groups=None)
KILLED = replace(LIVE, process_state="", signal=signal.SIGKILL, exit_mono_s=10.0)
FAILED = replace(LIVE, process_state="", exit_code=1, exit_mono_s=10.0)
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/a/b/loop.py", line 10, in main',
    "    step()",
    '  File "/a/b/model.py", line 12, in forward',
    "    return x / 0",
    "           ~~^~~",
    "ZeroDivisionError: division by zero",
]
CRASH = [
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x7f01 (most recent call first):",
    '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
    '  File "/a/model.py", line 3 in forward',
]


def said(witness: Witness, *lines: str) -> Witness:
    return replace(witness, details={"last_error_lines": list(lines)})


def test_a_plain_kill_is_told_from_one_for_lack_of_memory_by_the_counter() -> None:
    assert cause_of(KILLED).cause == Cause.KILLED
    found = cause_of(KILLED, facts=HostFacts(num_oom_kills=1))
    assert (found.cause, found.fingerprint) == (Cause.HOST_OOM, "host-oom")
    assert "counted 1 kills" in found.reason


def test_the_kernels_log_names_the_process() -> None:
    assert "by its log" in cause_of(KILLED, facts=HostFacts(oom_pids=frozenset({4711}))).reason
    assert cause_of(KILLED, facts=HostFacts(oom_pids=frozenset({4712}))).cause == Cause.KILLED


def test_memory_counters_explain_no_other_end() -> None:
    facts = HostFacts(num_oom_kills=3)
    assert cause_of(replace(KILLED, signal=signal.SIGSEGV), facts=facts).cause == Cause.SEGFAULT
    assert cause_of(FAILED, facts=facts).cause == Cause.EXCEPTION


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_crash_has_the_frame_that_faulthandler_wrote(number: signal.Signals) -> None:
    found = cause_of(said(replace(KILLED, signal=number), *CRASH))
    assert (found.cause, found.fingerprint) == (Cause.SEGFAULT, f"{number.name} at __init__.py:519 in string_at")
    assert cause_of(replace(KILLED, signal=number)).fingerprint == ""


def test_an_abort_is_a_librarys() -> None:
    assert cause_of(said(replace(KILLED, signal=signal.SIGABRT), *CRASH)).cause == Cause.ABORTED


def test_sigterm_is_a_preemption_only_when_the_job_was_asked_to_leave() -> None:
    ended = replace(KILLED, signal=signal.SIGTERM)
    assert cause_of(ended, facts=HostFacts(asked_to_leave=True)).cause == Cause.PREEMPTION
    assert cause_of(ended).cause == Cause.KILLED


def test_real_time_signals_have_no_name() -> None:
    assert cause_of(replace(KILLED, signal=35)).reason == "rank 1 was killed by signal 35"


def test_an_exception_has_the_fingerprint_of_its_traceback() -> None:
    found = cause_of(said(FAILED, *TRACEBACK))
    assert (found.cause, found.fingerprint) == (Cause.EXCEPTION, "ZeroDivisionError at model.py:12 in forward")
    assert cause_of(FAILED).fingerprint == ""


def test_messages_and_the_upper_frames_are_no_part_of_a_fingerprint() -> None:
    other = [line.replace("division by zero", "at 0x7f3a") for line in TRACEBACK[3:]]
    assert fingerprint_of(other) == fingerprint_of(TRACEBACK)
    assert fingerprint_of([line.replace("line 12", "line 13") for line in TRACEBACK]) != fingerprint_of(TRACEBACK)


def test_of_chained_tracebacks_the_last_counts_and_text_without_one_has_none() -> None:
    chained = ["KeyError: 'x'", "", "During handling of the above exception, another exception occurred:", "", *TRACEBACK]
    assert fingerprint_of([*TRACEBACK[:4], *chained]) == "ZeroDivisionError at model.py:12 in forward"
    assert fingerprint_of(["WARNING: slow", "Error: none"]) == ""


def test_device_memory_is_known_by_the_type_that_torch_raises() -> None:
    lines = [*TRACEBACK[:-1], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    found = cause_of(said(FAILED, *lines))
    assert (found.cause, found.fingerprint) == (Cause.DEVICE_OOM, "OutOfMemoryError at model.py:12 in forward")


def test_a_logged_accelerator_error_explains_an_exception_but_no_decision() -> None:
    facts = HostFacts(xids=("Xid 79 on 0000:3b:00",))
    assert cause_of(said(FAILED, *TRACEBACK), facts=facts).cause == Cause.XID
    assert cause_of(replace(FAILED, exit_code=4), facts=facts).cause == Cause.DELIBERATE


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 7, 93])
def test_what_a_rank_decided_is_no_fault(code: int) -> None:
    assert cause_of(replace(FAILED, exit_code=code)).cause == Cause.DELIBERATE


def test_peers_are_told_from_time_outs_and_from_leaving() -> None:
    left = replace(FAILED, exit_code=75)
    assert cause_of(left).cause == Cause.PEER_LOST
    assert cause_of(replace(left, error={"code": "peer-lost", "what": "all_reduce timed out"})).cause == Cause.COLLECTIVE_TIMEOUT
    assert cause_of(replace(left, error={"code": "preempted", "what": "asked to leave"})).cause == Cause.PREEMPTION


def test_who_lives_or_is_done_has_no_cause() -> None:
    assert {cause_of(LIVE).cause, cause_of(replace(FAILED, exit_code=0)).cause} == {Cause.UNKNOWN}
    assert not any(is_peer_error(one) for one in (LIVE, KILLED, replace(FAILED, exit_code=0)))
