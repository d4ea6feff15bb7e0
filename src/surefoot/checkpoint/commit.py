"""A save from its draft to its end: what is written is decided here by all ranks, and here they learn together what became of it.

Staging (`staging`) and writing (`upload`) lie in between, and neither talks to other ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from surefoot.checkpoint.manifest import manifest_from_json, parse_id, read_manifest, rng_key
from surefoot.checkpoint.rng import capture_rng
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot, SlotHeader, SlotState
from surefoot.checkpoint.staging import Snapshot, Work
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.upload import Uploader
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible, Incomplete, SurefootError, Torn
from surefoot.core.records import Manifest
from surefoot.core.strict_json import canonical
from surefoot.tensors.world import World, broadcast_json, gather_json, lead

_ASK_EVERY_S = 0.2
_KINDS: dict[str, type[SurefootError]] = {kind.code: kind for kind in (CheckpointError, Corrupt, Incompatible, Incomplete, Torn)}


def prepare(
    draft: Manifest,
    *,
    state: LiveState,
    extras: Mapping[str, Any],
    world: World,
    plans: SavePlans,
    overlap: bool = False,
    updates: Callable[[], int] = lambda: 0,
    reason: str = "",
    error: SurefootError | None = None,
) -> Work:
    """Collective over the save group. All that a save of `draft` is, before a byte is copied; all ranks raise the same CheckpointError.

    `draft` brings everything that only the caller knows; files, tensors, digests, hash, `topology["world_size"]` and the cursor (from
    `extras`) are filled in here and by the uploader. Without `overlap` the loop's thread copies everything. `error` is why this rank cannot
    take part: then no rank does.
    """
    if parse_id(draft.id) is None:
        raise CheckpointError("a checkpoint id is s<step>-a<attempt>[-r<retry>]", where=draft.id)
    tensors = {key: tensor for key, tensor in state.tensors.items() if world.leads or key not in state.rank_0_only}
    tensors[rng_key(world.rank)] = capture_rng(world.device)
    planned = plans.plan(tensors, world=world, error=error)
    header = SlotHeader(
        run=draft.run,
        id=draft.id,
        step=draft.step,
        attempt=draft.attempt,
        generation=draft.generation,
        rank=world.rank,
        world_size=world.size,
        file=planned.image.file,
        image_bytes=planned.image.num_bytes,
    )
    rest: dict[str, Any] = {"job_bytes": planned.job_bytes}
    if world.leads:
        topology = {**draft.topology, "world_size": world.size}
        rest |= {
            "reason": reason,
            "draft": asdict(replace(draft, cursor=extras.get("cursor", draft.cursor), topology=topology)),
            "extras": canonical(extras).decode(),
            "metadata": base64.b64encode(planned.metadata).decode(),
            "tensors": planned.tensors,
            "stored": planned.stored,
        }
    at_once = {key for key in tensors if not overlap or key in state.buffers or key == rng_key(world.rank)}
    return Work(header, planned, tensors, frozenset(at_once), rest, updates)


def save(
    root: Path,
    draft: Manifest,
    *,
    state: LiveState,
    extras: Mapping[str, Any],
    world: World,
    slot: Slot | None = None,
    limit_s: float = 600.0,
) -> Manifest:
    """Collective over the save group. Write, make durable and publish the checkpoint `draft.id` under `root`; the sealed manifest.

    The way of an overlapped save, with the wait at its end; through `slot`, else through one of its own. All ranks raise the same error: a
    CheckpointError after which nothing of this save is left (try again with the next `-r<retry>`), or PeerLost. Every wait is bounded: by
    `limit_s`, and by the timeout of the group.
    """
    work = prepare(draft, state=state, extras=extras, world=world, plans=SavePlans())
    own, error = (slot, None) if slot is not None else _fresh_slot(world.rank)
    uploader = Uploader(root, [own] if own is not None else [], limit_s=limit_s)
    try:
        failure = take(own, work) if own is not None else error
        await_outcome(world, slot=own, checkpoint=draft.id, error=lambda: failure, work=uploader.step, limit_s=limit_s)
    except BaseException:
        if own is not None:
            own.cancel()
        uploader.drain(limit_s=limit_s, ranks_are_gone=True)
        raise
    finally:
        if own is not None and own is not slot:
            own.close()
    return manifest_of(root, draft.id, world=world)


def _fresh_slot(rank: int) -> tuple[Slot | None, SurefootError | None]:
    try:
        return Slot.create(rank=rank, number=0), None
    except OSError as error:
        return None, no_memory(error, where=f"rank {rank}")


def take(slot: Slot, work: Work) -> SurefootError | None:
    """Local. Stage a save here and now; why it could not be."""
    try:
        snapshot = Snapshot(slot, work)
        snapshot.begin()
    except (SurefootError, OSError) as error:
        return (
            error if isinstance(error, SurefootError) else CheckpointError(f"no memory for a host copy: {error.strerror}", where=str(slot))
        )
    snapshot.run()
    return snapshot.error


def no_memory(error: OSError, *, where: str) -> CheckpointError:
    return CheckpointError(f"no memory for a host copy: {error.strerror}", where=where, hint="lower checkpoint.num_slots")


def outcome_of(slot: Slot, checkpoint: str) -> tuple[str, SurefootError | None]:
    """Local. What the slot says about the save: "" while it is on its way, "committed", or "failed" with the error."""
    header, state = slot.header(), slot.state()
    if header is None or header.id != checkpoint:
        return "failed", CheckpointError("its slot holds something else", where=checkpoint)
    if state is SlotState.COMMITTED:
        return "committed", None
    if state is SlotState.FAILED:
        return "failed", error_told(header.told)
    if state is SlotState.FREE:
        return "failed", CheckpointError("its slot was given up", where=checkpoint)
    return "", None


def await_outcome(
    world: World,
    *,
    slot: Slot | None,
    checkpoint: str,
    error: Callable[[], SurefootError | None],
    work: Callable[[], object],
    limit_s: float,
    clock: Clock | None = None,
) -> None:
    """Collective over the save group. Until the save is committed; all ranks raise the same error when it failed or `limit_s` is over.

    Committed is what rank 0's side committed, whatever others know of it yet. `error` is why this rank has nothing staged. `work` is
    called in between: it moves an upload on, or waits a moment.
    """
    clock = clock or SystemClock()
    deadline_s = clock.monotonic_s() + limit_s
    while True:
        ask_s = clock.monotonic_s() + _ASK_EVERY_S
        while True:
            found = error()
            state, told = ("failed", found) if found is not None or slot is None else outcome_of(slot, checkpoint)
            now_s = clock.monotonic_s()
            if state or now_s >= ask_s:
                break
            if not work():
                clock.sleep(0.002)
        if not state and now_s >= deadline_s:
            state, told = "failed", CheckpointError(f"not committed within {limit_s:g} s", where=checkpoint)
        states = gather_json(world, [state, None if told is None else tell(told)])
        if states[0][0] == "committed":
            return
        if any(state == "failed" for state, _ in states):
            raise error_of(states, checkpoint)
        if state:
            work()


def error_of(states: list[Any], checkpoint: str) -> SurefootError:
    """Pure. One error from what each rank said, as [state, told]: the first cause, with its rank."""
    failed = [(rank, told) for rank, (state, told) in enumerate(states) if state == "failed"]
    causes = [(rank, told) for rank, told in failed if told is not None and not str(told["what"]).startswith("given up")]
    if not failed or (first := (causes or failed)[0])[1] is None:
        return CheckpointError("the save failed", where=checkpoint)
    rank, told = first
    error = error_told(told)
    what = error.what if "(rank " in error.what else f"{error.what} (rank {rank})"
    return type(error)(what, where=error.where, hint=error.hint, **{**error.values, "rank": rank})


def tell(error: SurefootError) -> dict[str, Any]:
    values = {name: value for name, value in error.values.items() if isinstance(value, int | float | str)}
    return {"code": error.code, "what": error.what, "where": error.where, "hint": error.hint, "values": values}


def error_told(told: Mapping[str, Any]) -> SurefootError:
    """The error that `tell` or a slot put into words."""
    if not told:
        return CheckpointError("it failed, and its slot does not say why")
    kind = _KINDS.get(str(told["code"]), CheckpointError)
    return kind(str(told["what"]), where=str(told["where"]), hint=str(told["hint"]), **told["values"])


def manifest_of(root: Path, checkpoint: str, *, world: World) -> Manifest:
    """Collective over the save group. The manifest of a published checkpoint, read by rank 0, equal on all ranks."""
    found = lead(world, lambda: read_manifest(root / checkpoint), unexpected=CheckpointError)
    return manifest_from_json(broadcast_json(world, asdict(found) if found else None))
