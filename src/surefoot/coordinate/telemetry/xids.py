"""What an error of the accelerator's driver asks for: nothing, a restart of the program, a reset, or that the node is taken out. Pure.

Sources: NVIDIA, "Xid Errors" with its catalog (docs.nvidia.com/deploy/xid-errors), the guide to memory error management of A100 and newer
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), and what the driver itself says in Xid 154. Where the catalog leaves a choice, the worse
for the run decides: a fault that comes back on a node costs more than a node that is looked at once too often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from surefoot.coordinate.telemetry.kernel_log import KernelEvent, SXidEvent, XidEvent


class Advice(StrEnum):
    """In the order of their weight. `watch` is only counted; `reset` needs an empty accelerator, `drain` a person or a reboot."""

    WATCH = "watch"
    RESTART = "restart"
    RESET = "reset"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class XidKind:
    """`blames_program`: it is usually the program's own doing, so the node is not accused for it alone."""

    title: str
    advice: Advice
    blames_program: bool = False


_W, _A, _R, _D = Advice.WATCH, Advice.RESTART, Advice.RESET, Advice.DRAIN

XIDS: Final[Mapping[int, XidKind]] = {
    8: XidKind("accelerator stopped processing", _A),
    13: XidKind("graphics engine exception: an access out of bounds or an illegal instruction", _A, True),
    31: XidKind("memory page fault: an illegal address", _A, True),
    32: XidKind("invalid or corrupted push buffer", _A),
    38: XidKind("driver firmware error", _R),
    43: XidKind("a program's channel was stopped after its own error", _A, True),
    45: XidKind("channels were cleaned up after another error or the end of a program", _W, True),
    46: XidKind("accelerator stopped processing", _R),
    48: XidKind("uncorrectable memory error", _D),
    61: XidKind("internal micro-controller halted on a breakpoint", _R),
    62: XidKind("internal micro-controller halted", _R),
    63: XidKind("a memory row was remapped, in effect after a reset", _W),
    64: XidKind("a memory row could not be remapped", _D),
    66: XidKind("illegal access by the driver", _A),
    68: XidKind("video decoder exception", _A),
    69: XidKind("graphics engine class error", _A, True),
    74: XidKind("NVLink error", _D),
    79: XidKind("the accelerator has fallen off the bus", _D),
    92: XidKind("high rate of corrected memory errors", _W),
    94: XidKind("contained uncorrectable memory error: only the program that met it was ended", _A),
    95: XidKind("uncontained memory error: whatever ran there may have wrong data", _D),
    109: XidKind("context switch timed out", _R),
    110: XidKind("security fault", _D),
    119: XidKind("the accelerator's own processor (GSP) did not answer", _R),
    120: XidKind("error of the accelerator's own processor (GSP)", _R),
    121: XidKind("corrected error on the link to the host's processor", _W),
    123: XidKind("power management unit could not be written", _R),
    136: XidKind("link training failed", _R),
    137: XidKind("remote access over NVLink refused: an illegal address of a peer", _A, True),
    140: XidKind("unrecovered memory error", _R),
    143: XidKind("the accelerator could not be initialized", _D),
    156: XidKind("a resource was retired", _R),
    158: XidKind("fatal timeout of the accelerator", _D),
}
"""What is not here is unknown: it is ledgered and watched, and accuses nobody by itself."""
NVLINK_CODES: Final = range(144, 151)
"""NVLink from its fifth generation on; the message says whether it was fatal."""
RECOVERY_CHANGED: Final = 154
_RECOVERIES: Final[tuple[tuple[str, Advice], ...]] = (
    ("(none)", Advice.WATCH),
    ("reboot", Advice.DRAIN),
    ("drain", Advice.DRAIN),
    ("reset", Advice.RESET),
    ("flr", Advice.RESET),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One event with what it asks for. `is_known` is False for a code that no table has."""

    event: XidEvent | SXidEvent
    advice: Advice
    reason: str
    blames_program: bool = False
    is_known: bool = True


def judge_xid(event: XidEvent | SXidEvent) -> Judged:
    """What the event asks for, by its code and, where its message says more, by that."""
    if isinstance(event, SXidEvent):
        advice = Advice.DRAIN if event.is_fatal else Advice.WATCH
        link = "" if event.link is None else f", link {event.link}"
        return Judged(event, advice, f"{event.name}: {'fatal' if event.is_fatal else 'not fatal'} error of a switch{link}")
    if event.code in NVLINK_CODES:
        advice = Advice.DRAIN if event.is_fatal else Advice.WATCH
        return Judged(event, advice, f"{event.name}: {'fatal' if event.is_fatal else 'not fatal'} NVLink error")
    if event.code == RECOVERY_CHANGED:
        return _recovery(event)
    kind = XIDS.get(event.code)
    if kind is None:
        return Judged(event, Advice.WATCH, f"{event.name} is in no table: {event.message or 'no message'}", is_known=False)
    return Judged(event, kind.advice, f"{event.name}: {kind.title}", kind.blames_program)


def worst_advice(events: Iterable[KernelEvent]) -> Judged | None:
    """The event that asks for most, the first of several; None when there is no such event."""
    order = list(Advice)
    judged = [judge_xid(event) for event in events if isinstance(event, XidEvent | SXidEvent)]
    return max(judged, key=lambda one: order.index(one.advice), default=None)


def _recovery(event: XidEvent) -> Judged:
    """The driver says itself what it needs now: what stands after the "to"."""
    wish = event.message.lower().rpartition(" to ")[2]
    for word, advice in _RECOVERIES:
        if word in wish:
            return Judged(event, advice, f"{event.name}: the driver asks for {wish.partition('(')[2].rstrip(')') or wish}")
    return Judged(event, Advice.WATCH, f"{event.name}: {event.message or 'no message'}", is_known=False)
