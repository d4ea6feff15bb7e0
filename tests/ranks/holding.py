"""Shared by tests that count what a rank holds: bytes that autograd saves, and bytes of all tensors that are alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Of what is on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().untyped_storage()


class Saved:
    """The most bytes that autograd has saved at once, without parameters. A storage counts once, from the first tensor on it that is saved
    to the last that is let go."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> _Holder | torch.Tensor:
        """A parameter is looked for anew each time: gathered ones come and go."""
        storage = storage_of(tensor)
        pointer = storage.data_ptr()
        if pointer not in self.holders and any(storage_of(one).data_ptr() == pointer for one in self.module.parameters()):
            return tensor
        return _Holder(self, tensor, pointer, storage.nbytes())

    @contextmanager
    def watching(self) -> Iterator[Saved]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed.tensor if isinstance(packed, _Holder) else packed):
            yield self


class _Holder:
    def __init__(self, saved: Saved, tensor: torch.Tensor, pointer: int, num_bytes: int) -> None:
        self.saved, self.tensor, self.pointer, self.num_bytes = saved, tensor, pointer, num_bytes
        saved.holders[pointer] += 1
        saved.now += num_bytes * (saved.holders[pointer] == 1)
        saved.peak = max(saved.peak, saved.now)

    def __del__(self) -> None:
        self.saved.holders[self.pointer] -= 1
        if not self.saved.holders[self.pointer]:
            del self.saved.holders[self.pointer]
            self.saved.now -= self.num_bytes


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated, as what it is made of
    """Bytes in storages that operators gave back, now and at the most. A storage may be resized meanwhile: full sharding frees so."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch again
        self.known: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        self.remember(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.num_bytes())
        return given

    def remember(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            ready = local.wait() if hasattr(local, "wait") else local  # of a collective under way
            reference = StorageWeakRef(ready.detach().untyped_storage())  # type: ignore[no-untyped-call]  # torch again
            self.known[reference.cdata] = reference

    def num_bytes(self) -> int:
        self.known = {key: one for key, one in self.known.items() if not one.expired()}  # type: ignore[no-untyped-call]  # torch again
        storages = [torch.UntypedStorage._new_with_weak_ptr(key) for key in self.known]
        return sum(storage.nbytes() for storage in storages if storage is not None)
