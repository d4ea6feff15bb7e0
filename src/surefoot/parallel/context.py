"""Context parallel: each rank of `cp` computes some positions of every sequence; its queries meet the keys and values of all.

A sequence is cut into 2 * cp pieces, and rank r takes piece r and piece 2 * cp - 1 - r. A causal query at index i meets i + 1 keys: equal
pieces in order would leave the last rank almost twice the mean and the first next to nothing, while a piece from the head and one from the
tail cost every rank the same, with a window too. Keys are gathered rank after rank, not in their order in the sequence: the mask
knows the index of each, so nothing is sorted.

Keys and values are gathered in the forward of each attention and their gradients reduced and scattered in its backward. Everything else in
a decoder is computed position by position.

Dim letters: B samples, S positions of this rank, T positions of the sequence, K key heads, E dims of a head, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from surefoot.core.cut_plan import CutPlan
from surefoot.core.errors import ConfigError
from surefoot.parallel.running import Loss, Runner
from surefoot.tensors.batch import IGNORED_LABEL, Batch


@dataclass(frozen=True)
class SequencePart:
    """The positions of rank `rank` of `size` in `group`. `group` is None where a sequence is whole."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def num_pieces(self) -> int:
        """Of a sequence, all ranks together."""
        return 2 * self.size if self.size > 1 else 1

    def index(self, num_positions: int, *, rank: int, device: torch.device) -> torch.Tensor:
        """Local. index_S: where in the sequence of `num_positions` the positions of `rank` are, rising. All of them when it is whole."""
        if self.size == 1:
            return torch.arange(num_positions, device=device)
        if num_positions % self.num_pieces:
            raise ConfigError(
                f"a sequence of {num_positions} positions cannot be cut into {self.num_pieces} equal pieces, two for each rank of cp",
                where="[data] seq_len",
                hint=f"make it a multiple of {self.num_pieces}",
                got=num_positions,
            )
        pieces = torch.arange(num_positions, device=device).chunk(self.num_pieces)
        return torch.cat((pieces[rank], pieces[self.num_pieces - 1 - rank]))

    def order(self, num_positions: int, *, device: torch.device) -> torch.Tensor:
        """Local. index_T: the indices of all ranks' positions, rank after rank, as they are gathered."""
        return torch.cat([self.index(num_positions, rank=rank, device=device) for rank in range(self.size)])

    def of(self, atom: Batch) -> Batch:
        """Local. The same samples with this rank's positions only, and its own live tokens."""
        if self.size == 1:
            return atom
        index_S = self.index(atom.tokens_BS.shape[1], rank=self.rank, device=atom.tokens_BS.device)
        labels_BS = atom.labels_BS[:, index_S]
        return replace(
            atom,
            tokens_BS=atom.tokens_BS[:, index_S],
            labels_BS=labels_BS,
            positions_BS=atom.positions_BS[:, index_S],
            doc_ids_BS=atom.doc_ids_BS[:, index_S],
            num_live_tokens=int((labels_BS != IGNORED_LABEL).sum()),
        )


def gather_keys(model: nn.Module, part: SequencePart, *, plan: CutPlan) -> None:
    """Local. Let the queries of every attention of `model` meet the keys of all ranks of `part`.

    Raises ConfigError for a model that does not say where it attends.
    """
    if not plan.attentions:
        raise ConfigError(
            "the model does not say where its positions meet", where="[parallel] cp", hint="leave it out: cut your own model by dp_shard"
        )
    model.get_submodule(plan.mask).register_forward_pre_hook(lambda _, given: _gather_documents(part, given[0]))
    for name in plan.attentions:
        model.get_submodule(name).register_forward_pre_hook(lambda _, given: (given[0], *_gather_keys_and_values(part, *given[1:])))


def _gather_documents(part: SequencePart, doc_ids_BS: torch.Tensor) -> tuple[Any, ...]:
    """Collective over cp. What the mask is made of: the documents of these queries and of all keys, and where they are in the sequence.

    Small, and once per forward: so what a model is called with is one part of a sequence and nothing else, in the stages of a pipeline too.
    """
    doc_ids_BT = _gather(doc_ids_BS, part).movedim(0, 1).flatten(1, 2)
    num_positions, device = doc_ids_BT.shape[1], doc_ids_BS.device
    index_S = part.index(num_positions, rank=part.rank, device=device)
    return doc_ids_BS, index_S, (doc_ids_BT, part.order(num_positions, device=device))


def _gather_keys_and_values(part: SequencePart, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective over cp, and in the backward again. One message for both, in the dtype of the values, to which attention casts."""
    gathered_R2BKSE = _Gather.apply(torch.stack((k_BKSE.type_as(v_BKSE), v_BKSE)), part)  # type: ignore[no-untyped-call]  # as torch has it
    k_BKTE, v_BKTE = gathered_R2BKSE.movedim(0, 3).flatten(3, 4).unbind()
    return k_BKTE, v_BKTE


class _Gather(torch.autograd.Function):
    """Every rank's tensor, stacked along a new first dim; the gradient of each is the sum over the ranks that saw it."""

    @staticmethod
    def forward(ctx: Any, here: torch.Tensor, part: SequencePart) -> torch.Tensor:
        ctx.part = part
        return _gather(here, part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (of_all,) = gradients
        of_mine = torch.empty_like(of_all[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(of_mine, of_all.contiguous().flatten(0, 1), group=ctx.part.group)
        return of_mine, None


def _gather(here: torch.Tensor, part: SequencePart) -> torch.Tensor:
    gathered = here.new_empty((part.size * here.shape[0], *here.shape[1:]))
    dist.all_gather_single(gathered, here.contiguous(), group=part.group)
    return gathered.view(part.size, *here.shape)


@dataclass(frozen=True)
class PartOfSequence:
    """A Runner where positions are cut: `inner` computes this rank's of each atom. `multiple_of`: what it can cut a sequence evenly by."""

    inner: Runner
    part: SequencePart
    multiple_of: int

    def run(self, atoms: Sequence[Batch], *, start: Callable[[Batch], None], loss: Loss) -> torch.Tensor:
        return self.inner.run([self.part.of(atom) for atom in atoms], start=start, loss=loss)

    def evaluate(self, atoms: Sequence[Batch], *, loss: Loss) -> torch.Tensor:
        return self.inner.evaluate([self.part.of(atom) for atom in atoms], loss=loss)

    def logits(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        """Of sequences of any length: what is missing to an even cut is put behind, where no earlier position looks."""
        num_positions = tokens_BS.shape[1]
        missing = -num_positions % self.multiple_of
        given_BT = [F.pad(ids_BS, (0, missing)) for ids_BS in (tokens_BS, positions_BS, doc_ids_BS)]
        if self.part.size == 1:
            return self.inner.logits(*given_BT)[:, :num_positions]
        index_S = self.part.index(num_positions + missing, rank=self.part.rank, device=tokens_BS.device)
        gathered_RBSV = _gather(self.inner.logits(*(ids_BT[:, index_S] for ids_BT in given_BT)), self.part)
        place_T = self.part.order(num_positions + missing, device=tokens_BS.device).argsort()
        return gathered_RBSV.movedim(0, 1).flatten(1, 2)[:, place_T[:num_positions]]
