"""What a run answers to an order, and why not. Pure: the order and the ledger go in, the fields of `order.taken` or a reason come out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.core.blocking import Block, block_from_json
from surefoot.core.errors import DataError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.control import MAX_PAUSE_S, NoOrder, Order
from surefoot.observe.drains import MAX_NODE_NAME, why_no_drain
from surefoot.observe.incidents import refuse_unknown_incident
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.wishes import standing_at, why_confirm, why_refuse

ANSWERS = (Event.ORDER_TAKEN, Event.ORDER_REFUSED)


@dataclass(frozen=True, slots=True)
class Standing:
    """The run as it stands between two steps. `job` is the id in its lock, `default_pause_s` what a pause without a length keeps."""

    run_dir: Path
    job: str
    step: int
    num_steps: int
    is_paused: bool
    default_pause_s: float
    entries: Sequence[LedgerEntry]


class Refusal(str):
    """Why an order is not taken."""


def answered(entries: Sequence[LedgerEntry]) -> set[str]:
    """The ids of the orders that have their answer."""
    return {str(entry.fields.get("id")) for entry in entries if entry.event in ANSWERS}


def answer(order: Order | NoOrder, standing: Standing) -> dict[str, Any] | Refusal:
    """What `order.taken` says beside who, what and why; or the reason of `order.refused`."""
    if isinstance(order, NoOrder):
        return Refusal(f"a line of the control file is no order: {order.what}")
    if order.job != standing.job:
        return Refusal(f"it was given to another job ({order.job or 'none'}, this is {standing.job}), which ended before it could take it")
    if standing.step >= standing.num_steps and order.verb in ("stop", "save", "pause"):
        return Refusal(f"the run has made its last step, {standing.num_steps}, and finishes")
    return _ANSWERS[order.verb](order, standing)


def blocks_of(order: Order) -> list[Block]:
    """What is to be left out after a roll-back. Raises DataError for an entry that means nothing."""
    told = order.fields.get("blocks", [])
    if not isinstance(told, list) or not all(isinstance(block, dict) for block in told):
        raise DataError("what is to be left out cannot be read", where="blocks")
    return [block_from_json(block) for block in told]


def _nothing_to_ask(order: Order, standing: Standing) -> dict[str, Any] | Refusal:
    return {}


def _pause(order: Order, standing: Standing) -> dict[str, Any] | Refusal:
    limit_s = order.fields.get("limit_s")
    if limit_s is None:
        limit_s = standing.default_pause_s
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not (math.isfinite(limit_s) and 0 <= limit_s <= MAX_PAUSE_S):
        return Refusal(f"a pause of {limit_s!r} s: it takes 0 to {MAX_PAUSE_S:.0f}")
    return {"limit_s": float(limit_s), "prolongs": standing.is_paused}


def _resume(order: Order, standing: Standing) -> dict[str, Any] | Refusal:
    if not standing.is_paused:
        return Refusal(f"the run is not paused: it trains, at step {standing.step}")
    incident = order.fields.get("incident") or ""
    if not isinstance(incident, str):
        return Refusal(f"there is no incident {incident!r}")
    if incident and (why := refuse_unknown_incident(incident, run_dir=standing.run_dir, entries=standing.entries)):
        return Refusal(why)
    return {"incident": incident} if incident else {}


def _roll_back(order: Order, standing: Standing) -> dict[str, Any] | Refusal:
    to, confirmed = order.fields.get("to"), order.fields.get("confirmed") is True
    if isinstance(to, bool) or not isinstance(to, int) or to < 0:
        return Refusal(f"{to!r} is no step to go back to")
    if to > standing.step:
        return Refusal(f"step {to} is ahead: the run stands at step {standing.step}")
    lineage = fold_lineage(standing.entries)
    lineage = replace(lineage, counters=replace(lineage.counters, step=standing.step))
    ref = standing_at(to, lineage)
    if ref is None:
        there = ", ".join(name for name in lineage.line if name not in lineage.retired)
        return Refusal(f"no checkpoint of step {to} or before is left; there are {there or 'none'}")
    if (why := why_refuse(ref, lineage)) is not None:
        return Refusal(f"{why}; a step before {ref.step} leads to an older one")
    if (why := why_confirm(ref, lineage, asked_step=to)) is not None and not confirmed:
        return Refusal(f"{why}; --yes goes back to it all the same")
    try:
        blocks = blocks_of(order)
    except DataError as error:
        return Refusal(str(error))
    return {"to": to, "checkpoint": ref.id, "checkpoint_step": ref.step, "left_out": [f"{block.kind} {block.name}" for block in blocks]}


def _drain(order: Order, standing: Standing) -> dict[str, Any] | Refusal:
    """What the run takes, its agent hands on to the coordinator: see `observe.drains`."""
    node = order.fields.get("node")
    if not isinstance(node, str) or not node or len(node) > MAX_NODE_NAME or not node.isprintable():
        return Refusal(f"{node!r} is no name of a node")
    if (why := why_no_drain(standing.entries)) is not None:
        return Refusal(why)
    return {"node": node}


_ANSWERS = {
    "stop": _nothing_to_ask,
    "save": _nothing_to_ask,
    "pause": _pause,
    "resume": _resume,
    "rollback": _roll_back,
    "drain": _drain,
}


def told_of(order: Order | NoOrder, more: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an answer."""
    if isinstance(order, NoOrder):
        return {"id": order.id, **more}
    return {"id": order.id, "verb": order.verb, "by": order.by, "asked_utc": order.time_utc, **more}
