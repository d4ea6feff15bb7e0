"""The stacks of a live run's ranks: once, or sampled for some seconds. py-spy sees native frames too, where it is installed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Any

from surefoot.launch.stacks import Answer, ThreadStack, ask_stacks, hottest
from surefoot.observe.live import LiveRecord

ANSWER_LIMIT_S = 2.0
SAMPLE_INTERVAL_S = 0.05
"""Of a profile by signal. Every sample is appended to the file of the rank: 20 a second are some 100 kB of text."""
_PY_SPY_LIMIT_S = 20.0
_NUM_FRAMES = 12
_NUM_HOT = 10


def look_at_stacks(run_dir: Path, live: LiveRecord, pids: Mapping[int, int]) -> tuple[dict[str, Any], list[str]]:
    """The answer for programs and the lines for people."""
    answers = ask_stacks(run_dir, live.generation, pids, limit_s=ANSWER_LIMIT_S)
    beats = {one.rank: one for one in live.ranks}
    native = {answer.rank: _native(answer.pid) for answer in answers} if which("py-spy") else {}
    told, lines = [], []
    for answer in answers:
        beat = beats[answer.rank]
        told.append(
            {**_as_json(answer), "phase": beat.phase, "step": beat.step, "beat_age_s": beat.age_s, "native": native.get(answer.rank)}
        )
        lines += ["", f"rank {answer.rank}, pid {answer.pid}: {answer.process.words}; {beat.phase} at step {beat.step}"]
        lines += _lines(answer)
    return {"ranks": told, "silent": [answer.rank for answer in answers if not answer.threads]}, lines


def look_at_profile(run_dir: Path, live: LiveRecord, pids: Mapping[int, int], *, duration_s: float) -> tuple[dict[str, Any], list[str]]:
    """Where the training threads were, sampled by signal for `duration_s`: the innermost Python lines and the share of samples in each."""
    samples: dict[int, list[tuple[ThreadStack, ...]]] = {rank: [] for rank in pids}
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        next_s = time.monotonic() + SAMPLE_INTERVAL_S
        for answer in ask_stacks(run_dir, live.generation, pids, limit_s=min(ANSWER_LIMIT_S, duration_s)):
            if answer.threads:
                samples[answer.rank].append(answer.threads)
        time.sleep(max(0.0, next_s - time.monotonic()))
    told, lines = [], []
    for rank, taken in samples.items():
        hot = hottest(taken, num_lines=_NUM_HOT)
        named = [{"file": frame.file, "line": frame.line, "function": frame.function, "share": round(share, 3)} for frame, share in hot]
        told.append({"rank": rank, "pid": pids[rank], "num_samples": len(taken), "hottest": named})
        lines += ["", f"rank {rank}, pid {pids[rank]}: {len(taken)} samples" + ("" if taken else ": it did not answer")]
        lines += [f"  {share:>5.0%}  {frame}" for frame, share in hot]
    return {"ranks": told, "duration_s": duration_s}, lines


def _as_json(answer: Answer) -> dict[str, Any]:
    threads = [
        {"name": thread.name, "frames": [{"file": f.file, "line": f.line, "function": f.function} for f in thread.frames]}
        for thread in answer.threads
    ]
    process = {"state": answer.process.state, "waits_in": answer.process.waits_in, "kernel_stack": list(answer.process.kernel_stack)}
    return {"rank": answer.rank, "pid": answer.pid, "answered": bool(answer.threads), "why": answer.why, **process, "threads": threads}


def _lines(answer: Answer) -> list[str]:
    lines = [f"  {answer.why}"] if answer.why else []
    lines += [f"  kernel: {line}" for line in answer.process.kernel_stack[:_NUM_FRAMES] if not answer.threads]
    for number, thread in enumerate(reversed(answer.threads)):
        lines.append("  training thread" if number == 0 else f"  thread {thread.name}".rstrip())
        lines += [f"    {frame}" for frame in thread.frames[: _NUM_FRAMES if number == 0 else 3]]
    return lines


def _native(pid: int) -> Any:
    """What py-spy says, native frames included; None where it may not look (ptrace is a privilege in most containers)."""
    try:
        child = subprocess.run(
            ["py-spy", "dump", "--native", "--json", "--pid", str(pid)], capture_output=True, timeout=_PY_SPY_LIMIT_S, check=False
        )
        return json.loads(child.stdout) if child.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
