"""`surefoot rollback` behind its options: where it leads, what is left out from there, and how a run is told, live or not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli.operators import Desk, Told, user_at_host
from surefoot.core.blocking import Block
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.holder import LockRecord
from surefoot.core.records import CheckpointRef, LedgerEntry
from surefoot.observe.blocks import asked_with_fields
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.observe.wishes import standing_at, why_confirm, why_refuse

_LEASE_S = 30.0  # it is held for milliseconds
_LEFT_OUT = (Event.BLOCK_TAKEN, Event.BLOCK_REFUSED)
_STEPS = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class GoBack:
    """What a person asks for: back to step `to`, without the samples of steps `skip` ("A:B") and without `documents`."""

    run_dir: Path
    to: int
    skip: str = ""
    documents: tuple[str, ...] = ()
    confirmed: bool = False
    reason: str = ""


def go_back_live(wanted: GoBack, *, job: LockRecord, wait: bool, wait_s: float) -> Told:
    """Order it. What can be known now is refused now; the run has the last word."""
    ref = _checkpoint(wanted, read_ledger(wanted.run_dir / LEDGER_NAME))
    blocks = _left_out(wanted, ref)
    desk = Desk(wanted.run_dir, "rollback", job=job, wait_s=wait_s)
    told = desk.give(reason=wanted.reason, to=wanted.to, confirmed=wanted.confirmed, blocks=[block.as_json() for block in blocks])
    if not wait:
        return told
    taken = desk.answer()
    back = desk.until_done(taken, Event.RUN_ROLLED_BACK)
    answers = desk.entries_after(back, _LEFT_OUT, number=len(blocks))  # in the order in which they were asked for
    refused = [answer.reason for answer in answers if answer.event == Event.BLOCK_REFUSED]
    name = str(taken.fields["checkpoint"])
    words = f"back at step {back.step}, checkpoint {name}, attempt {back.attempt}: {taken.step - back.step} steps were given up"
    words += "".join(f"\nnot left out: {why}" for why in refused)
    more = {"from_step": taken.step, "checkpoint": desk.checkpoint(name), "left_out": _names(blocks), "refused": refused}
    return desk.told(back, words, more=more)


def wish_to_go_back(wanted: GoBack) -> Told:
    """No job trains it: the next start goes on from there. Nobody starts it meanwhile, for its lock is held here."""
    from surefoot.cli.ledgering import tell, users_ledger
    from surefoot.coordinate.lock import RunLock
    from surefoot.core.clock import SystemClock
    from surefoot.observe.opening import note_take_over

    run_dir = wanted.run_dir
    _refuse_read_only(run_dir)
    with RunLock.acquire(run_dir, job=f"rollback-{user_at_host()}", clock=SystemClock(), lease_s=_LEASE_S) as lock:
        entries = read_ledger(run_dir / LEDGER_NAME)
        if (taken := lock.taken_over) is not None:
            note_take_over(users_ledger(run_dir), entries, reason=taken.reason, former=taken.former)
        _refuse_never_reached(wanted, entries)
        ref = _checkpoint(wanted, entries)
        _refuse_other_config(ref, run_dir, entries)
        blocks = _left_out(wanted, ref)
        fields = {"id": ref.id, "confirmed": wanted.confirmed, **asked_with_fields(blocks)}  # one line: a kill leaves all of it or nothing
        asked = tell(run_dir, Event.RESUME_ASKED, rule="rollback", reason=wanted.reason, fields=fields)
    stands = fold_lineage(entries).counters.step
    words = f"the next `surefoot train {run_dir}` goes on from {ref.id}, step {ref.step}; {max(0, stands - ref.step)} steps are given up"
    more = {"from_step": stands, "checkpoint": {"id": ref.id, "step": ref.step, "rung": ref.rung.value}, "left_out": _names(blocks)}
    return Told("rollback", run_dir, "asked", words, by=asked.by, step=ref.step, seq=asked.seq, more=more)


def _checkpoint(wanted: GoBack, entries: Sequence[LedgerEntry]) -> CheckpointRef:
    """Raises ConfigError when there is none, or a second word is missing."""
    lineage, where = fold_lineage(entries), f"--to {wanted.to}"
    ref = standing_at(wanted.to, lineage)
    if ref is None:
        there = ", ".join(name for name in lineage.line if name not in lineage.retired)
        raise ConfigError(f"no checkpoint of step {wanted.to} or before is left", where=where, hint=f"there are {there or 'none'}")
    if (why := why_refuse(ref, lineage)) is not None:
        raise ConfigError(why, where=where, hint=f"a step before {ref.step} leads to an older one")
    if (why := why_confirm(ref, lineage, asked_step=wanted.to)) is not None and not wanted.confirmed:
        raise ConfigError(why, where=where, hint="--yes goes back to it all the same; the ledger says who asked")
    return ref


def _refuse_never_reached(wanted: GoBack, entries: Sequence[LedgerEntry]) -> None:
    """A live run knows by itself; of one that has ended ledger and metrics tell."""
    from surefoot.cli.triage_facts import furthest_step

    if wanted.to > (furthest := furthest_step(wanted.run_dir, entries)):
        what = f"the run has not reached step {wanted.to}"
        raise ConfigError(what, where=f"--to {wanted.to}", hint=f"it reached step {furthest}", got=wanted.to, limit=furthest)


def _left_out(wanted: GoBack, ref: CheckpointRef) -> list[Block]:
    """What is left out from the checkpoint on: resolved as `data block` does. Raises ConfigError or DataError for what cannot be."""
    if not wanted.skip and not wanted.documents:
        return []
    from surefoot.cli.blocking import Target, Wish, is_compared, resolve
    from surefoot.cli.run_data import open_run_data

    steps = _steps(wanted.skip, ref) if wanted.skip else None
    run = open_run_data(wanted.run_dir)
    targets = [Target(document=document) for document in wanted.documents]
    if steps is not None:
        first, last = run.steps.of_step(steps[0]).samples, run.steps.of_step(steps[1] - 1).samples
        targets.insert(0, Target(samples=f"{int(first.min())}:{int(last.max()) + 1}"))
    reason = wanted.reason or f"left out on the way back to step {ref.step}"
    blocks = [resolve(run, Wish(target, reason=reason, by=user_at_host())) for target in targets]
    for block in blocks:
        is_compared(run, block)
    return blocks


def _steps(text: str, ref: CheckpointRef) -> tuple[int, int]:
    match = _STEPS.fullmatch(text)
    first, end = (int(match[1]), int(match[2])) if match else (0, 0)
    if first >= end:
        raise ConfigError(f"{text!r} is no range of steps", where="--skip", hint="write A:B: steps A up to B, B not among them")
    if first <= ref.step:
        what = f"the checkpoint {ref.id} was made after step {first}: its samples are in it"
        raise ConfigError(what, where=f"--skip {text}", hint=f"go back to before step {first}, or begin at step {ref.step + 1}")
    return first, end


def _refuse_other_config(ref: CheckpointRef, run_dir: Path, entries: Sequence[LedgerEntry]) -> None:
    """The next start would refuse it, and then the wish would stand unmet."""
    from surefoot.checkpoint.manifest import read_manifest
    from surefoot.cli.resume_from import refuse_other_config
    from surefoot.config import load_config
    from surefoot.core.errors import CheckpointError
    from surefoot.observe.run_dir import CHECKPOINTS_NAME

    try:
        manifest = read_manifest(run_dir / CHECKPOINTS_NAME / ref.id)
    except CheckpointError:
        return  # another tier may have it; else the start says what is wrong
    refuse_other_config(manifest, config=load_config(run_dir / CONFIG_NAME).config, run_dir=run_dir, entries=entries, accepted=())


def _refuse_read_only(run_dir: Path) -> None:
    if not os.access(run_dir, os.W_OK):
        raise ConfigError(
            "you may not write into the run folder", where=str(run_dir), hint="ask its owner, or for the right to write there"
        )


def _names(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    return [{"kind": block.kind, "name": block.name, "mode": block.mode} for block in blocks]
