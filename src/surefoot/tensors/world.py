"""The ranks of this generation, and the bounded, named collectives that rooms above are allowed to use.

Every group has a finite timeout and a name; the loop and the checkpoints have a group each, so that neither waits behind the other. Without
a process group (one rank) every collective is the identity, and no store or socket exists.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from surefoot.core.errors import PeerLost, SurefootError, error_from_json
from surefoot.core.strict_json import canonical
from surefoot.tensors.flight import leave_evidence

ProcessGroup = dist.ProcessGroup
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank among `size` ranks. `loop_group` carries the vector of each step, `save_group` (gloo) everything about checkpoints."""

    rank: int
    size: int
    device: torch.device
    loop_group: ProcessGroup | None = None
    save_group: ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """True on the one rank that writes what is job-wide: ledger, metrics, manifest."""
        return self.rank == 0


class Exchanges:
    """Whom this process tells that its main thread goes into an exchange, by the name of the group, and out of it by an empty one. A
    process is one rank of one generation, so there is one such listener; None where nobody watches."""

    tell: Callable[[str], None] | None = None


class _Within:
    """While entered, this thread is inside an exchange of `group`. Only the main thread's are told: it is the one that has to move."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __enter__(self) -> None:
        self._tell = Exchanges.tell if threading.current_thread() is threading.main_thread() else None
        if self._tell is not None:
            self._tell(self._group)

    def __exit__(self, *_: object) -> None:
        if self._tell is not None:
            self._tell("")


_LOOP, _SAVE = "loop", "save"


def single_world(device: torch.device | None = None) -> World:
    return World(rank=0, size=1, device=device or torch.device("cpu"))


def join_world(*, device: torch.device, collective_limit_s: float) -> World:
    """Collective over the default group, which must be initialised. Makes the named groups, each with `collective_limit_s` as timeout."""
    limit = timedelta(seconds=collective_limit_s)
    loop_group = dist.new_group(timeout=limit, group_desc="surefoot:loop")
    save_group = dist.new_group(timeout=limit, group_desc="surefoot:save", backend="gloo")
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, loop_group=loop_group, save_group=save_group)


def world_here(device: torch.device, *, collective_limit_s: float) -> World:
    """Collective over the default group where there is one. The World of a loop that set its processes up by itself.

    `device` is where its parameters are: a machine with a GPU may well train on the CPU.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return join_world(device=device, collective_limit_s=collective_limit_s)
    return single_world(device)


def gather_words(world: World, words_W: torch.Tensor) -> torch.Tensor:
    """Collective over the loop group. int64 words of each rank -> int64 [R, W], the same on every rank. Raises PeerLost."""
    if world.loop_group is None:
        return words_W.unsqueeze(0)
    gathered = torch.empty(world.size * words_W.numel(), dtype=words_W.dtype, device=words_W.device)
    try:
        with _Within(_LOOP):
            dist.all_gather_single(gathered, words_W, group=world.loop_group)
    except RuntimeError as error:
        raise told_apart("the exchange of the step", error) from error
    return gathered.view(world.size, -1)


def reduce_sum(world: World, values: torch.Tensor) -> torch.Tensor:
    """Collective over the loop group. Sums `values` over ranks in place and returns them. Raises PeerLost."""
    if world.loop_group is not None:
        try:
            with _Within(_LOOP):
                dist.all_reduce(values, group=world.loop_group)
        except RuntimeError as error:
            raise told_apart("a sum over ranks", error) from error
    return values


def reduce_max(world: World, values: torch.Tensor) -> torch.Tensor:
    """Collective over the loop group. The largest of each of `values` over ranks, in place, and returns them. No nan among them. Raises
    PeerLost."""
    if world.loop_group is not None:
        try:
            with _Within(_LOOP):
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=world.loop_group)
        except RuntimeError as error:
            raise told_apart("a maximum over ranks", error) from error
    return values


def broadcast_json(world: World, value: Any) -> Any:
    """Collective over the save group. Rank 0's `value`, as JSON types, on every rank. No pickle. Raises PeerLost."""
    if world.save_group is None:
        return json.loads(canonical(value))
    payload = torch.frombuffer(bytearray(canonical(value)), dtype=torch.uint8) if world.leads else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64)
    try:
        with _Within(_SAVE):
            dist.broadcast(length, group=world.save_group, group_src=0)
            if not world.leads:
                payload = torch.empty(int(length.item()), dtype=torch.uint8)
            dist.broadcast(payload, group=world.save_group, group_src=0)
    except RuntimeError as error:
        raise told_apart("a broadcast from rank 0", error) from error
    return json.loads(bytes(payload.tolist()))


def gather_json(world: World, value: Any) -> list[Any]:
    """Collective over the save group. The JSON value of every rank, in rank order, on every rank. No pickle. Raises PeerLost."""
    if world.save_group is None:
        return [json.loads(canonical(value))]
    payload = torch.frombuffer(bytearray(canonical(value)), dtype=torch.uint8)
    lengths_R = torch.empty(world.size, dtype=torch.int64)
    try:
        with _Within(_SAVE):
            dist.all_gather_single(lengths_R, torch.tensor([payload.numel()], dtype=torch.int64), group=world.save_group)
            longest = int(lengths_R.max().item())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: payload.numel()] = payload
            gathered = torch.empty(world.size * longest, dtype=torch.uint8)
            dist.all_gather_single(gathered, padded, group=world.save_group)
    except RuntimeError as error:
        raise told_apart("a gather over ranks", error) from error
    rows = gathered.view(world.size, longest)
    return [json.loads(rows[rank, : int(lengths_R[rank])].numpy().tobytes()) for rank in range(world.size)]


def agree_ok(world: World, error: SurefootError | None) -> SurefootError | None:
    """Collective over the save group. None when every rank passes None, else the lowest failing rank's error, the same on every rank."""
    told = None if error is None else error.as_json()
    for rank, other in enumerate(gather_json(world, told)):
        if other is not None:
            if error is not None and rank == world.rank:
                return error
            meant = error_from_json(other)
            return type(meant)(f"{meant.what} (on rank {rank})", where=meant.where, hint=meant.hint, rank=rank)
    return None


def lead(world: World, part: Callable[[], T], *, unexpected: type[SurefootError] = SurefootError) -> T | None:
    """Collective over the save group. Run a part on rank 0 while the others wait; all ranks raise what it raised. None on the others.

    What is not ours becomes an `unexpected`, for the others wait for an outcome, whatever it is. Bounded by the timeout of the group.
    """
    result: T | None = None
    error: SurefootError | None = None
    if world.leads:
        try:
            result = part()
        except SurefootError as found:
            error = found
        except Exception as found:  # the boundary to the other ranks
            error = unexpected(f"{type(found).__name__}: {found}", where="rank 0")
            error.__cause__ = found
    if (agreed := agree_ok(world, error)) is not None:
        raise agreed
    return result


def lead_long(world: World, part: Callable[[], T], *, beat_s: float) -> T:
    """Collective over the save group. As `lead` for a part of any length, its JSON result on every rank.

    It runs in a thread of rank 0, which tells the others every `beat_s` that it is still at it: a collective waits for so long only.
    """
    pool = ThreadPoolExecutor(1) if world.leads else None
    doing = pool.submit(part) if pool is not None else None

    def look() -> list[T]:
        assert doing is not None
        wait([doing], timeout=beat_s)
        return [doing.result()] if doing.done() else []

    try:
        while not (told := broadcast_json(world, lead(world, look))):
            continue
    finally:
        if pool is not None:
            pool.shutdown(wait=False)
    result: T = told[0]
    return result


def told_apart(what: str, error: RuntimeError) -> RuntimeError | PeerLost:
    """The error to raise for a collective that failed: PeerLost when it is the loss of another rank, `error` itself when it is our own.

    On an accelerator a collective is also where this rank's earlier asynchronous errors surface; to call those a lost peer would send the
    search for the culprit the wrong way. What this rank was waiting for is left in a file (`tensors.flight`).
    """
    if not is_peer_failure(error):
        return error
    evidence = leave_evidence(what, error)
    seen = f"; the last collectives of this rank: {evidence}" if evidence else ""
    return PeerLost(f"{what} did not finish: {error}", hint=f"another rank went away; the agent names it and restarts{seen}")


_PEER_SIGNS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error out of torch (a backward with overlapped reductions, say) is the loss of another rank.

    The stages of a pipeline raise errors of their own from it.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_SIGNS):
        return True
    return error.__cause__ is not None and is_peer_failure(error.__cause__)
