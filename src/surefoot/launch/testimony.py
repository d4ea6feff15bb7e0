"""What every rank of this machine knows, gathered before any of them is killed: from the kernel, from the board, and from itself.

All are asked at once and in two ways, for each works where the other does not: a signal whose handler, in C, appends the stacks of all
threads even while Python is busy or its lock is held; and a call on the beats board that a thread of the rank answers with its collectives.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.coordinate.liveness import STOPPED
from surefoot.coordinate.witness import GroupState, Witness
from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.launch.crew import Crew
from surefoot.launch.evidence import complaints
from surefoot.launch.logs import last_lines, rank_paths, stacks_path, testimony_path
from surefoot.launch.process import STACKS_SIGNAL, catches, process_state, waits_in

_LOOK_INTERVAL_S = 0.02
_MAX_FRAMES = 12
_MAX_STACK_BYTES = 65_536
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True)
class _Asked:
    """A rank that was asked for its stacks: where its file ended until then."""

    path: Path
    num_bytes: int


def gather_witnesses(crew: Crew, run_dir: Path, *, limit_s: float, clock: Clock) -> tuple[Witness, ...]:
    """One Witness per rank of this machine, within `limit_s`, as soon as all have answered who can.

    Who is stopped cannot, nor who has not set itself up to: those are not waited for.
    """
    alive = [(rank, pid) for rank in crew.alive() if (pid := crew.pid(rank)) is not None]
    states = {rank: process_state(pid) for rank, pid in alive}
    able = [(rank, pid) for rank, pid in alive if states[rank] != STOPPED]
    call = crew.board.call_for_testimony()
    asked = {rank: place for rank, pid in able if (place := _ask_for_stacks(crew, run_dir, rank, pid)) is not None}
    testifying = [rank for rank, _ in able if _testimony(run_dir, crew, rank) is not None]
    until_s = clock.monotonic_s() + limit_s
    while clock.monotonic_s() < until_s:
        still = set(crew.alive())
        waited = [rank for rank in testifying if rank in still and _number(_testimony(run_dir, crew, rank)) != call]
        waited += [rank for rank, place in asked.items() if rank in still and _size(place.path) <= place.num_bytes]
        if not waited:
            break
        clock.sleep(_LOOK_INTERVAL_S)
    told = complaints(run_dir, crew.generation)
    return tuple(_witness(crew, run_dir, rank, states, asked.get(rank), call, told, now_s=clock.monotonic_s()) for rank in crew.ranks)


def main_stack(text: str) -> tuple[str, ...]:
    """The innermost frames of the main thread, innermost first, out of what faulthandler wrote last: it writes that thread last of all."""
    frames: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ", "Stack ")):
            frames = []
        elif (found := _FRAME.match(line)) is not None:
            frames.append(f"{found['file']}:{found['line']} in {found['name']}")
    return tuple(frames[:_MAX_FRAMES])


def _ask_for_stacks(crew: Crew, run_dir: Path, rank: int, pid: int) -> _Asked | None:
    if not catches(pid, STACKS_SIGNAL):
        return None
    path = stacks_path(run_dir, crew.generation, rank)
    asked = _Asked(path, _size(path))
    with contextlib.suppress(ProcessLookupError):  # the nursery reaps a rank only after it was heard of, and this number is then gone
        os.kill(pid, STACKS_SIGNAL)
    return asked


def _testimony(run_dir: Path, crew: Crew, rank: int) -> dict[str, Any] | None:
    """None where this rank has not set itself up to testify, or is writing at this moment."""
    try:
        record = strict_json.loads(testimony_path(run_dir, crew.generation, rank).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _number(record: dict[str, Any] | None) -> object:
    return record.get("call") if record is not None else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _new_text(asked: _Asked | None) -> str:
    if asked is None:
        return ""
    try:
        with asked.path.open("rb") as file:
            file.seek(asked.num_bytes)
            return file.read(_MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _witness(
    crew: Crew, run_dir: Path, rank: int, states: dict[int, str], asked: _Asked | None, call: int, told: Any, *, now_s: float
) -> Witness:
    beat, pid = crew.board.read(rank), crew.pid(rank)
    ended = next((ended for ended in crew.exits if ended.rank == rank), None)
    record = _testimony(run_dir, crew, rank)
    has_answered = _number(record) == call
    return Witness(
        rank=rank,
        pid=pid,
        process_state=states.get(rank, ""),
        beat=beat if beat.num_beats else None,
        age_s=round(now_s - (beat.mono_s if beat.num_beats else crew.started_s), 3),
        node=socket.gethostname(),
        exit_code=ended.exit_code if ended else None,
        signal=ended.signal if ended else None,
        exit_mono_s=ended.mono_s if ended else None,
        error=told.get(rank),
        groups=_groups(record["groups"]) if record is not None and has_answered else None,
        stack=main_stack(_new_text(asked)),
        details={
            "testifies": record is not None,
            "has_answered": has_answered,
            "waits_in": waits_in(pid) if pid is not None and rank in states else "",
            "last_error_lines": last_lines(rank_paths(run_dir, crew.generation, rank)[1]),
        },
    )


def _groups(states: Sequence[dict[str, Any]]) -> tuple[GroupState, ...]:
    return tuple(
        GroupState(
            name=str(state["name"]),
            last_enqueued=int(state["last_enqueued"]),
            last_completed=int(state["last_completed"]),
            operation=str(state["operation"]),
            shapes=tuple(tuple(int(length) for length in shape) for shape in state["shapes"]),
            dtypes=tuple(str(dtype) for dtype in state["dtypes"]),
            is_p2p=bool(state["is_p2p"]),
        )
        for state in states
    )
