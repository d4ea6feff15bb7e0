"""A RecomputePort for our own loop: one atom of the last step once more, its gradient digested before anybody else's is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from surefoot.checkpoint.rng import capture_rng, restore_rng
from surefoot.core.hashing import key64
from surefoot.core.stages import stage_before
from surefoot.model.loss import loss_of
from surefoot.model.rope import set_rope_base
from surefoot.parallel.buffers import keep_buffers
from surefoot.parallel.contribution import unreduced
from surefoot.parallel.exact import ExactSums
from surefoot.tensors.batch import Batch
from surefoot.tensors.digest import tensor_digest
from surefoot.tensors.random import RandomKey
from surefoot.train.step import Parts


class Recompute:
    """`last_step` tells the step of the last batch as `forward_backward` was told it: training steps finished before it."""

    def __init__(self, parts: Parts, *, last_step: Callable[[], int]) -> None:
        self._parts = parts
        self._last_step = last_step

    def gradient_digest(self, *, shift: int) -> int:
        """Collective over the grid. As the port says. Where ranks share the work of an atom (tp, cp, pp), the digest is of this rank's part
        of it, to be compared with that of the rank of the same coordinates.
        """
        parts, cut = self._parts, self._parts.cut
        step = self._last_step()
        set_rope_base(cut.module, stage_before(parts.config, parts.data.next_sample).rope_base)
        seen: dict[str, int] = {}

        def see(name: str, gradient: torch.Tensor) -> None:
            seen[name] = tensor_digest(gradient)

        def start(atom: Batch) -> None:
            RandomKey(parts.config.run.seed, step, atom.atom).start_streams()

        with _as_it_was(parts), unreduced(cut.runner, module=cut.module, roots=cut.roots, see=see):
            cut.runner.run([parts.data.first_atom(shift=shift)], start=start, loss=partial(loss_of, z_loss=parts.config.model.z_loss))
        return key64(sorted(seen.items()))


@contextmanager
def _as_it_was(parts: Parts) -> Iterator[None]:
    """Local. Buffers, random streams and units of exact sums are afterwards what they were, whatever happened."""
    put_back_buffers = keep_buffers(parts.cut.module)
    streams = capture_rng(parts.world.device)
    sums = parts.cut.exact_sums
    kept = (dict(sums.exponents), sums.bound, sums.take_redos()) if isinstance(sums, ExactSums) else None
    try:
        yield
    finally:
        put_back_buffers()
        restore_rng(streams, device=parts.world.device)
        if kept is not None and isinstance(sums, ExactSums):
            sums.exponents, sums.bound, redos = kept
            sums.take_redos()
            for redo in redos:
                sums.note(redo)
