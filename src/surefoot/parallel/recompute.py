"""Activations that are computed again in the backward instead of being kept: all of a block's, or what is cheap to compute.

The forward of the instance is replaced, so no parameter changes its name. What enters a block is kept; its random numbers are drawn again
from torch's generators as they stood, so losses and gradients keep their bits. Buffers are changed by the first computation only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from surefoot.core.errors import ConfigError
from surefoot.parallel.buffers import keep_buffers

Mode = Literal["none", "selective", "full"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KEPT = {getattr(torch.ops.aten, name) for name in (*_PRODUCTS, *_ATTENTIONS) if hasattr(torch.ops.aten, name)}


def recompute(blocks: Sequence[nn.Module], *, mode: Mode) -> None:
    """Local. Before `fully_shard`, whose hooks then stand around the computation. Raises ConfigError where there is no block."""
    if mode == "none":
        return
    if not blocks:
        raise ConfigError(
            "the model has no blocks whose activations could be computed again",
            where="parallel.recompute",
            hint='use "none", or give the model a method shard_units() that names its blocks',
            got=mode,
        )
    for block in blocks:
        block.forward = _recomputed(block, selective=mode == "selective")  # of this instance, on purpose


def _recomputed(block: nn.Module, *, selective: bool) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=functools.partial(_contexts, block, selective=selective), **kwargs
        )

    return recomputed


def _contexts(block: nn.Module, *, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first computation, and around the second."""
    if not selective:
        return nullcontext(), _BuffersUntouched(block, nullcontext())
    first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return first, _BuffersUntouched(block, second)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = getattr(op, "overloadpacket", None) in _KEPT and not _drops(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """A kept attention that drew random numbers would not draw them in the second computation, and shift all that are drawn after it."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False


class _BuffersUntouched:
    """Enters `inner`; on the way out the buffers of `block` are as they were."""

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._block = block
        self._inner = inner
        self._stack = ExitStack()
        self._put_back: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._put_back = keep_buffers(self._block)
        self._stack.enter_context(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return self._stack.__exit__(kind, error, trace)
        finally:
            if self._put_back is not None:
                self._put_back()
            self._put_back = None
