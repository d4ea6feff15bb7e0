"""What a training loop hands to the guard. A missing port is a line in the capability print, not an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from surefoot.core.blocking import Block
from surefoot.core.records import GradientBound, HeldOutLoss, Redo


@runtime_checkable
class DataPort(Protocol):
    """Where the next batch comes from. The cursor is one small JSON object for the whole job, the same on all ranks.

    After a restore and after a roll-back the guard calls `seek`, and the loop takes what `next` gives then: what was read ahead is gone.
    """

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def next_sample(self) -> int:
        """Global index of the first sample that has not been handed out. Cheap: asked for every step."""
        ...

    def cursor(self) -> Mapping[str, Any]:
        """The state that makes `seek` give the batch that `next` would give now. Taken at saves only."""
        ...

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Go on from `cursor`; raises DataError when the data is not the one it was taken over."""
        ...


@runtime_checkable
class SteerableData(DataPort, Protocol):
    """A DataPort that can also leave something out and say where its samples came from.

    The guard hands over entries of the blocklist in one order on all ranks: those that were ever taken before the first `seek`, new ones
    between two steps. An entry says from which global sample on it holds, and what came before that never changes. The cursor holds what
    `blocklist` was as {"blocklist": {"count": ..., "head": ...}}: the guard refuses one whose entries the ledger lacks.
    """

    def block(self, block: Block) -> None:
        """Mask or replace the spans of `block` in samples from its effective one on. Local; the same answer on all ranks.

        Raises DataError, and changes nothing, when it cannot be honoured.
        """
        ...

    def skip(self, block: Block) -> None:
        """Leave out the global samples of `block`: no batch has them. As `block` else.

        `next_sample` may stand at the first of them until the next batch begins behind them, as ours does, or jump at once.
        """
        ...

    @property
    def blocklist(self) -> tuple[int, str]:
        """How many entries were handed over, and the head of their chain (`core.blocking.next_head`; 64 zeros for none)."""
        ...

    def locate(self, *, sample: int) -> Sequence[Mapping[str, Any]]:
        """The documents of a global sample, and where they came from."""
        ...


@runtime_checkable
class TouchedData(DataPort, Protocol):
    """A DataPort that knows which samples an entry changes: a replay is compared up to there, and else up to the effective sample."""

    def first_touched(self, block: Block, *, first: int, until: int) -> int | None:
        """The first global sample in [first, until) that `block` masks or replaces. Local; the same answer on all ranks."""
        ...


@runtime_checkable
class NamedData(DataPort, Protocol):
    """A DataPort that knows its data by content: a changed data set is noticed, and what was decided about it is ledgered."""

    @property
    def data_hash(self) -> str: ...

    @property
    def data_change(self) -> str | None:
        """What the last `seek` did about data that is not the cursor's, in words; None when there was nothing to do."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """What else a restart needs: a schedule, a scaler. Its state must be JSON; tensors belong in a module."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class LossScaler(Stateful, Protocol):
    """What a loop multiplies its loss by before the backward, as fp16 needs. Equal on all ranks; the guard alone moves it, in `finish`."""

    @property
    def scale(self) -> float:
        """That of the step under way. Exact where it is a power of two."""
        ...

    @property
    def at_minimum(self) -> bool:
        """Whether an overflow can lower it no further: then it is no longer the scale that is to blame."""
        ...

    def update(self, *, overflowed: bool) -> None:
        """Local. A step ended in an update, or in an overflow. Other skipped steps say nothing about the scale."""
        ...


class EvalPort(Protocol):
    def held_out(self) -> HeldOutLoss | None:
        """Collective over the world. The loss on the frozen held-out samples, the same on all ranks; None without any; changes no state."""
        ...


@runtime_checkable
class CanaryPort(EvalPort, Protocol):
    """An EvalPort with a second frozen set, small enough to be asked often: the canary. Always the same samples."""

    def canary(self) -> HeldOutLoss | None:
        """Collective over the world. As `held_out`, on the canary's samples."""
        ...


class NumericsPort(Stateful, Protocol):
    """What a loop with exact sums hands over: its units, which are state, and what this step found. Equal on all ranks."""

    @property
    def bound(self) -> GradientBound:
        """Of the gradients that are to be judged now."""
        ...

    def take_redos(self) -> list[Redo]:
        """What of this step was computed again; the next call does not return it a second time."""
        ...


class GaugePort(Protocol):
    """What a loop measures inside its forward and backward, where the guard cannot look. All of it is local and of the present step."""

    def begin(self) -> None:
        """The next step begins: what was measured so far is forgotten."""
        ...

    def squared_local_norm(self) -> Any:
        """A 0-d float64 tensor: of the gradient that this rank contributed in its last computation of the step, before any reduction and in
        the units of `.grad`; None where it is not known."""
        ...

    def waited_s(self) -> float:
        """Seconds of the step so far that this rank only waited for others, as far as it is known."""
        ...

    def times_s(self) -> Mapping[str, float]:
        """Of forward_s, backward_s, reduce_s (exposed) those that are known. Asked when the update is over."""
        ...


class RecomputePort(Protocol):
    """What a loop hands over whose local gradients can be computed again. Asked between two steps: after the update, gradients cleared."""

    def gradient_digest(self, *, shift: int) -> int:
        """Collective over the loop group. Digest of the local gradient, before any reduction, of one atom of the last batch: the first that
        the data rank `shift` ranks after this one had, with that atom's random streams and the present weights.

        Leaves gradients, buffers, random streams and the data cursor as they were.
        """
        ...


class ByteKeeper(Protocol):
    """Memory and peer tiers: named byte ranges that outlive the process which wrote them."""

    def put(self, key: str, data: memoryview) -> None: ...

    def get(self, key: str) -> memoryview: ...

    def keys(self) -> list[str]: ...

    def drop(self, key: str) -> None: ...
