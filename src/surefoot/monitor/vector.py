"""The one small vector that every rank sends before the update, and how it is folded into Signals.

Words are int64; floats travel as the bits of a float64, so one all-gather carries sums, maxima and per-rank values alike, and every rank
folds the same words in the same order. A word's place never changes inside one `VECTOR_VERSION`; ranks that disagree on it refuse to go on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Literal

import torch

from surefoot.core.errors import SurefootError
from surefoot.core.records import RankSignals, Signals
from surefoot.tensors.exact_sum import NUM_LEVELS

VECTOR_VERSION = 4


class Flag(IntFlag):
    """What a rank asks for. One asking is enough: the group agrees on the union."""

    LEAVE = 1
    SAVE = 2
    PAUSE = 4
    BLOCK = 8


class SaveState(IntEnum):
    """What a rank knows of the oldest save that is not agreed on yet."""

    NONE = 0
    UNDER_WAY = 1
    COMMITTED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class HostWords:
    """What a rank knows without its device. Durations in seconds; `blocklist_word` is the first 8 bytes of the blocklist's chain head."""

    generation: int
    attempt: int
    step: int
    flags: Flag
    blocklist_word: int
    num_live_tokens: int
    data_wait_s: float
    forward_backward_s: float
    step_clock_s: float
    cpu_s: float
    save_clock_s: float
    save_stall_s: float
    save_slot_free: bool
    save_point: int = 0
    save_state: SaveState = SaveState.NONE


_INTS = (
    "version", "generation", "attempt", "step", "flags", "blocklist_word", "num_live_tokens", "save_slot_free", "save_point", "save_state",
)  # fmt: skip
_FLOATS = ("data_wait_s", "forward_backward_s", "step_clock_s", "cpu_s", "save_clock_s", "save_stall_s")
_LEVELS = tuple(f"squared_norm_{level}" for level in range(NUM_LEVELS))
_DEVICE = ("loss_sum", *_LEVELS, "num_nonfinite")
_PLACE = {name: index for index, name in enumerate((*_INTS, *_FLOATS, *_DEVICE))}


def encode(host: HostWords, *, device_values: torch.Tensor) -> torch.Tensor:
    """Local. `device_values` float64 [NUM_LEVELS + 2] = (loss_sum, squared norm by level, num_nonfinite) -> int64 [W] on their device."""
    ints = (
        VECTOR_VERSION,
        host.generation,
        host.attempt,
        host.step,
        int(host.flags),
        host.blocklist_word,
        host.num_live_tokens,
        int(host.save_slot_free),
        host.save_point,
        int(host.save_state),
    )
    floats = (host.data_wait_s, host.forward_backward_s, host.step_clock_s, host.cpu_s, host.save_clock_s, host.save_stall_s)
    words = (*ints, *(_bits(value) for value in floats))
    on_host = torch.tensor(words, dtype=torch.int64)
    return torch.cat((on_host.to(device_values.device, non_blocking=True), device_values.view(torch.int64)))


def fold(words_RW: torch.Tensor) -> Signals:
    """Local, pure. The gathered words of all ranks -> Signals, equal on every rank.

    The norm is that of the mean gradient: sqrt(sum of squared norms) / live tokens; each element was counted by one rank. Levels and ranks
    are added exactly, so that exact parts make an exact whole. Save clock and
    stall are rank 0's, so all ranks decide alike; a slot is free when every rank has one. A save is committed when rank 0 says so, whose
    side publishes; otherwise one rank that failed is enough.
    Raises SurefootError when ranks are on different steps, attempts, generations, blocklists or vector versions, naming them.
    """
    rows = [[int(word) for word in row] for row in words_RW.tolist()]
    for name in ("version", "generation", "attempt", "step", "blocklist_word", "save_point"):
        values = [row[_PLACE[name]] for row in rows]
        if len(set(values)) > 1:
            raise SurefootError(
                f"ranks disagree on {name}: {dict(enumerate(values))}",
                where="the exchange of the step",
                hint="a rank runs other code or holds other state; stop the run and compare the ranks' logs",
            )
    first = rows[0]
    num_live_tokens = sum(row[_PLACE["num_live_tokens"]] for row in rows)
    squared_norm = _sum(_float(row, level) for row in rows for level in _LEVELS)
    flags = Flag(0)
    for row in rows:
        flags |= Flag(row[_PLACE["flags"]])
    return Signals(
        step=first[_PLACE["step"]],
        attempt=first[_PLACE["attempt"]],
        generation=first[_PLACE["generation"]],
        loss=_sum(_float(row, "loss_sum") for row in rows) / max(num_live_tokens, 1),
        num_live_tokens=num_live_tokens,
        grad_norm=math.sqrt(squared_norm) / max(num_live_tokens, 1),
        num_nonfinite=round(_sum(_float(row, "num_nonfinite") for row in rows)),
        leave_requested=Flag.LEAVE in flags,
        save_requested=Flag.SAVE in flags,
        save_clock_s=_float(first, "save_clock_s"),
        save_stall_s=_float(first, "save_stall_s"),
        save_slot_free=all(row[_PLACE["save_slot_free"]] for row in rows),
        block_requested=Flag.BLOCK in flags,
        ranks=tuple(
            RankSignals(
                rank=rank,
                loss_sum=_float(row, "loss_sum"),
                num_live_tokens=row[_PLACE["num_live_tokens"]],
                data_wait_s=_float(row, "data_wait_s"),
                forward_backward_s=_float(row, "forward_backward_s"),
                step_clock_s=_float(row, "step_clock_s"),
                cpu_s=_float(row, "cpu_s"),
            )
            for rank, row in enumerate(rows)
        ),
        save_point=first[_PLACE["save_point"]],
        save_outcome=_outcome([SaveState(row[_PLACE["save_state"]]) for row in rows]),
    )


def _outcome(states: list[SaveState]) -> Literal["", "committed", "failed"]:
    if states[0] is SaveState.COMMITTED:
        return "committed"
    return "failed" if SaveState.FAILED in states else ""


def _sum(values: Iterable[float]) -> float:
    """Correctly rounded whatever the order; nan when any value is not finite."""
    finite = list(values)
    return math.fsum(finite) if all(map(math.isfinite, finite)) else math.nan


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(row: list[int], name: str) -> float:
    return float(struct.unpack("<d", struct.pack("<q", row[_PLACE[name]]))[0])
