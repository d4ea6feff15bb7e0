"""The one small vector that every rank sends before the update, and how it is folded into Signals.

Words are int64; floats travel as the bits of a float64, so one all-gather carries sums, maxima and per-rank values alike, and every rank
folds the same words in the same order. A word's place never changes inside one `VECTOR_VERSION` and one `Layout`, which names what is sent
per group of parameters; ranks that disagree on either refuse to go on. Its length follows from layout and step alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, Literal

import numpy as np
import torch

from surefoot.core.errors import SurefootError
from surefoot.core.hashing import key64
from surefoot.core.records import RankSignals, Signals
from surefoot.monitor.ratios import Late
from surefoot.tensors.exact_sum import NUM_LEVELS

VECTOR_VERSION = 6


class Flag(IntFlag):
    """What a rank asks for. One asking is enough: the group agrees on the union."""

    LEAVE = 1
    SAVE = 2
    PAUSE = 4
    BLOCK = 8
    ORDER = 16


class SaveState(IntEnum):
    """What a rank knows of the oldest save that is not agreed on yet."""

    NONE = 0
    UNDER_WAY = 1
    COMMITTED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """What a vector carries beside the words that every one has, agreed on once before the first step.

    Per group of parameters: the squared norm of its gradient, and squares of updates and weights. In steps that probe, the values named in
    `sums`, which are added over ranks, and in `maxima`, of which the largest counts; `figures` makes the probes of them.
    """

    groups: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()

    @property
    def word(self) -> int:
        """Names it in the vector."""
        return key64("layout", *self.groups, "|", *self.sums, "|", *self.maxima) >> 1


Figures = Callable[[Mapping[str, float]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class HostWords:
    """What a rank knows without its device. Durations in seconds; `blocklist_word` is the first 8 bytes of the blocklist's chain head.

    `lr` is what the loop will update with, `lr_applied_ratio` as in `Signals`.
    """

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
    layout_word: int = 0
    memory_bytes: int = 0
    lr: float = math.nan
    lr_applied_ratio: float = math.nan
    waited_s: float = 0.0


_INTS = (
    "version", "generation", "attempt", "step", "flags", "blocklist_word", "num_live_tokens", "save_slot_free", "save_point", "save_state",
    "layout_word", "memory_bytes",
)  # fmt: skip
_FLOATS = (
    "data_wait_s", "forward_backward_s", "step_clock_s", "cpu_s", "save_clock_s", "save_stall_s", "lr", "lr_applied_ratio", "waited_s",
)  # fmt: skip
_LEVELS = tuple(f"squared_norm_{level}" for level in range(NUM_LEVELS))
_DEVICE = ("loss_sum", *_LEVELS, "num_nonfinite", "squared_local_norm")
_NAMES = (*_INTS, *_FLOATS, *_DEVICE)
_AGREED = ("version", "layout_word", "generation", "attempt", "step", "blocklist_word", "save_point")


def encode(host: HostWords, *, device_values: torch.Tensor) -> torch.Tensor:
    """Local. int64 [W] on the device of `device_values`, which are float64 in the order of the vector.

    That is (loss_sum, squared norm by level, num_nonfinite, squared local norm), then what the layout names: squared norms of the gradient,
    of the update and of the weights, each by group, and in steps that probe its sums and maxima.
    """
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
        host.layout_word,
        host.memory_bytes,
    )
    words = (*ints, *(_bits(getattr(host, name)) for name in _FLOATS))
    on_host = torch.tensor(words, dtype=torch.int64)
    return torch.cat((on_host.to(device_values.device, non_blocking=True), device_values.view(torch.int64)))


def fold(words_RW: torch.Tensor, *, layout: Layout | None = None, figures: Figures = dict) -> Signals:
    """Local, pure. The gathered words of all ranks -> Signals, equal on every rank.

    The norm is that of the mean gradient: sqrt(sum of squared norms) / live tokens; each element was counted by one rank. Levels and ranks
    are added exactly, so that exact parts make an exact whole. Save clock and
    stall are rank 0's, so all ranks decide alike; a slot is free when every rank has one. A save is committed when rank 0 says so, whose
    side publishes; otherwise one rank that failed is enough. `lr` is rank 0's; of the applied ratios the one furthest from 1 counts.
    `figures` makes probes of what the layout names.
    Raises SurefootError when ranks are on different steps, attempts, generations, blocklists, layouts or vector versions, naming them.
    """
    words_RW = words_RW.cpu().contiguous()
    columns = _columns(words_RW)
    _refuse_disagreement(columns)
    num_live_tokens = int(sum(columns["num_live_tokens"]))
    tail_RX = words_RW[:, len(_NAMES) :]
    group_norms, update_ratios, probes = _fold_layout(tail_RX, layout or Layout(), num_live_tokens=num_live_tokens, figures=figures)
    first = {name: column[0] for name, column in columns.items()}
    flags = reduce(or_, map(Flag, set(columns["flags"])))
    return Signals(
        step=first["step"],
        attempt=first["attempt"],
        generation=first["generation"],
        loss=_sum(columns["loss_sum"]) / max(num_live_tokens, 1),
        num_live_tokens=num_live_tokens,
        grad_norm=math.sqrt(_sum(chain.from_iterable(columns[level] for level in _LEVELS))) / max(num_live_tokens, 1),
        num_nonfinite=round(_sum(columns["num_nonfinite"])),
        leave_requested=Flag.LEAVE in flags,
        save_requested=Flag.SAVE in flags,
        save_clock_s=first["save_clock_s"],
        save_stall_s=first["save_stall_s"],
        save_slot_free=all(columns["save_slot_free"]),
        block_requested=Flag.BLOCK in flags,
        ranks=_ranks(columns),
        save_point=first["save_point"],
        save_outcome=_outcome(columns["save_state"]),
        lr=first["lr"],
        lr_applied_ratio=max(columns["lr_applied_ratio"], key=_distance_from_1),
        order_requested=Flag.ORDER in flags,
        group_norms=group_norms,
        update_ratios=update_ratios,
        probes=probes,
    )


def fold_late(words_RX: torch.Tensor, *, layout: Layout, step: int) -> Late:
    """Local, pure. From the gathered float64 words of all ranks, (squares of update, of weights, by group; applied ratio), to what `fold`
    would make of them in the next vector, with the same bits."""
    num_groups = len(layout.groups)
    values_RX = words_RX.cpu().contiguous().numpy().view(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        updates_G, weights_G = np.add.reduce(values_RX, axis=0)[: 2 * num_groups].reshape(2, num_groups).tolist()
    squares = dict(zip(layout.groups, zip(updates_G, weights_G, strict=True), strict=True))
    return Late(step, squares, max(values_RX[:, -1].tolist(), key=_distance_from_1))


def _columns(words_RW: torch.Tensor) -> Mapping[str, list[Any]]:
    """The words that every vector has, by name and then by rank: integers, then floats from their bits. A column at a time: a loop over
    ranks that builds a mapping for each took tens of milliseconds for a thousand of them."""
    ints_IR = words_RW[:, : len(_INTS)].t().tolist()
    floats_FR = words_RW[:, len(_INTS) : len(_NAMES)].numpy().view(np.float64).T.tolist()
    return dict(zip(_NAMES, (*ints_IR, *floats_FR), strict=True))


def _refuse_disagreement(columns: Mapping[str, list[Any]]) -> None:
    for name in _AGREED:
        values = columns[name]
        if values.count(values[0]) != len(values):
            raise SurefootError(
                f"ranks disagree on {name}: {dict(enumerate(values))}",
                where="the exchange of the step",
                hint="a rank runs other code or holds other state; stop the run and compare the ranks' logs",
            )


def _ranks(columns: Mapping[str, list[Any]]) -> tuple[RankSignals, ...]:
    names = ("loss_sum", "num_live_tokens", "data_wait_s", "forward_backward_s", "step_clock_s", "cpu_s")
    parts = (range(len(columns["step"])), *(columns[name] for name in names), map(_root, columns["squared_local_norm"]))
    return tuple(map(RankSignals, *parts, columns["memory_bytes"], columns["waited_s"]))


def _fold_layout(
    words_RX: torch.Tensor, layout: Layout, *, num_live_tokens: int, figures: Figures
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    """(group norms, update ratios, probes). Row by row in the order of ranks, so with the same bits everywhere.

    A group that nobody has told of an update of is left out.
    """
    num_groups, num_sums = len(layout.groups), len(layout.sums)
    widths = (3 * num_groups, 3 * num_groups + num_sums + len(layout.maxima))
    if words_RX.shape[1] not in widths:
        raise SurefootError(f"a vector has {words_RX.shape[1]} words behind its fixed ones, its layout {widths}", where="the exchange")
    values_RX = words_RX.numpy().view(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        sums_X = np.add.reduce(values_RX, axis=0)
        maxima_X = np.maximum.reduce(values_RX, axis=0)
    squares_G, updates_G, weights_G = sums_X[: 3 * num_groups].reshape(3, num_groups).tolist()
    group_norms = {name: _root(value) / max(num_live_tokens, 1) for name, value in zip(layout.groups, squares_G, strict=True)}
    moved = zip(layout.groups, updates_G, weights_G, strict=True)
    update_ratios = {name: _root(update / weight) for name, update, weight in moved if weight > 0 or math.isnan(weight)}
    if words_RX.shape[1] == widths[0]:
        return group_norms, update_ratios, {}
    probed = dict(zip(layout.sums, sums_X[3 * num_groups :].tolist(), strict=False))
    probed |= dict(zip(layout.maxima, maxima_X[3 * num_groups + num_sums :].tolist(), strict=True))
    return group_norms, update_ratios, figures(probed)


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _distance_from_1(ratio: float) -> float:
    """Of a rate; one that nobody told is no distance."""
    if math.isnan(ratio):
        return -1.0
    return abs(math.log(ratio)) if ratio > 0 else math.inf


def _outcome(states: Sequence[int]) -> Literal["", "committed", "failed"]:
    if states[0] == SaveState.COMMITTED:
        return "committed"
    return "failed" if SaveState.FAILED in states else ""


def _sum(values: Iterable[float]) -> float:
    """Correctly rounded whatever the order; nan when any value is not finite."""
    finite = list(values)
    return math.fsum(finite) if all(map(math.isfinite, finite)) else math.nan


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
