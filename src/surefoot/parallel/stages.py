"""Which submodules each stage of a pipeline has, and views of a model that hold only some of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from surefoot.core.cut_plan import CutPlan
from surefoot.core.errors import ConfigError


@runtime_checkable
class Divisible(Protocol):
    """A model that can be run piece by piece."""

    def part(self, names: Collection[str]) -> nn.Module:
        """A view with only the submodules `names`, under their names in the whole and with the same parameters.

        Its forward takes what comes from the piece before in place of the tokens, and hands on what comes out of its last submodule.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One of `num_pieces` consecutive parts of the model: the names of its submodules, in the order of the forward."""

    index: int
    num_pieces: int
    names: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_pieces - 1


def pieces_of(plan: CutPlan, *, num_stages: int, num_chunks: int) -> list[Piece]:
    """Local, pure. All pieces of the model; the stage of piece p is p mod `num_stages`, so neighbours are never on one rank."""
    num_pieces = num_stages * num_chunks
    blocks = iter(plan.blocks)
    names = [[next(blocks) for _ in range(size)] for size in deal_blocks(len(plan.blocks), num_pieces=num_pieces)]
    names[0][:0] = plan.first
    names[-1] += plan.last
    return [Piece(index, num_pieces, tuple(part)) for index, part in enumerate(names)]


def deal_blocks(num_blocks: int, *, num_pieces: int) -> list[int]:
    """Local, pure. How many blocks each piece has: the embedding counts as one block, the last norm with the head as another.

    Pieces differ by at most one so counted, the earlier ones have more, and none is without a block.
    Raises ConfigError where there are more pieces than blocks.
    """
    if num_blocks < num_pieces:
        raise ConfigError(
            f"{num_blocks} blocks cannot be dealt to {num_pieces} pieces",
            where="[parallel] pp",
            hint="at least one block a piece: fewer stages or chunks, or more layers",
            got=num_pieces,
            limit=num_blocks,
        )
    share, rest = divmod(num_blocks + 2, num_pieces)
    sizes = [share + (index < rest) for index in range(num_pieces)]
    sizes[0] -= 1
    sizes[-1] -= 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def own_part(model: nn.Module, pieces: Sequence[Piece]) -> nn.Module:
    """Local. What this rank keeps of `model`: the submodules of its `pieces`. The rest is gone with the last reference to `model`."""
    return part_of(model, [name for piece in pieces for name in piece.names])


def part_of(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Local. Raises ConfigError for a model that does not say how it is run piece by piece."""
    if not isinstance(model, Divisible):
        raise ConfigError(
            "the model does not say how it is run piece by piece",
            where="[parallel] pp",
            hint="leave it out: share your own model out by dp_shard",
        )
    return model.part(names)
