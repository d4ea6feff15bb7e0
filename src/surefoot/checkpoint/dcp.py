"""Calling torch.distributed.checkpoint: one rank or many, and its failures as our errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.tensors.world import World, told_apart


@contextmanager
def dcp_errors(world: World, *, what: str) -> Iterator[None]:
    """What DCP raises inside becomes a CheckpointError (of the kind of its cause), or PeerLost when a rank went away.

    DCP tells every rank of any rank's error, in a CheckpointException, which no `except Exception` catches: it is a BaseException.
    """
    try:
        with warnings.catch_warnings():
            # DCP warns whenever there is no process group, asked for or not.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as exception:
        rank, (cause, _) = min(exception.failures.items(), key=lambda failure: failure[0])
        raise _named(cause, rank, what) from exception
    except RuntimeError as error:
        if world.save_group is None:
            raise
        raise told_apart(what, error) from error


def _named(cause: BaseException, rank: int, what: str) -> SurefootError:
    if isinstance(cause, SurefootError):
        values = {**cause.values, "rank": rank}
        return type(cause)(f"{cause.what} (rank {rank})", where=cause.where, hint=cause.hint, **values)
    return CheckpointError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}", rank=rank)
