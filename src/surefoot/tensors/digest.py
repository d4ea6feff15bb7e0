"""A digest of tensor bits that ignores sharding: algorithm "sf1".

A tensor is its elements in row-major order of the *global* shape, element i being the zero-extended little-endian word bits(i). The
digest is

    sum over i of  bits(i) * w(i)   mod 2^64,     w(i) = A(i // 65536) * B(i % 65536)   mod 2^64
    A(k) = splitmix64(0x243F6A8885A308D3 + k) | 1,    B(j) = splitmix64(0x13198A2E03707344 + j) | 1

Elements of 8 and 16 bytes count as two and four 32-bit words, each with its own i, so that two sign flips in float64 cannot cancel. Every w
is odd, so any single flipped bit changes the sum; swapped values meet different weights. A sum has no order: parts over disjoint boxes add
up to the whole whatever the sharding, thread count or device. It detects errors; it is no signature against an adversary.

The constants (the first digits of pi) and this text are the format: a change needs a new name beside "sf1". Host memory is summed by
`host_digest` in numpy, other devices here in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from surefoot.tensors.digest_sum import ALGORITHM as ALGORITHM
from surefoot.tensors.digest_sum import DigestedTensor as DigestedTensor
from surefoot.tensors.digest_sum import as_hex as as_hex
from surefoot.tensors.digest_sum import combine as combine
from surefoot.tensors.digest_sum import state_digest as state_digest
from surefoot.tensors.host_digest import BLOCK, MASK, HostBox, Runs, column_weights, row_weights

_DEVICE_ROWS = 128  # blocks of 65536 int64 that are worked on at once: so many keep a GPU busy
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def tensor_digest(tensor: torch.Tensor) -> int:
    """Local. Digest of a whole tensor; of a DTensor, of this rank's box of it, to be combined over one copy of every box."""
    if isinstance(tensor, DTensor):
        _, offsets = local_box(tensor)
        return box_digest(tensor.to_local(), global_shape=tensor.shape, offsets=offsets)
    return box_digest(tensor, global_shape=tensor.shape, offsets=(0,) * tensor.dim())


def local_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local. (sizes, offsets) of what this rank holds of the global tensor. A pending sum (Partial) has no bits yet: ValueError."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"a partial tensor has no digest: {tensor.placements}")
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(sizes), tuple(offsets)
    return tuple(tensor.shape), (0,) * tensor.dim()


def box_digest(local: torch.Tensor, *, global_shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Local. Digest of the box of a tensor of `global_shape` that starts at `offsets`; boxes that share no element add up with `combine`.

    Raises ValueError when the box does not fit and TypeError for sparse and sub-byte dtypes.
    """
    _check_box(local, global_shape, offsets)
    if local.numel() == 0:
        return 0
    words = _words(local.detach())
    if words.device.type == "cpu":
        box = BoxDigest(local.shape, dtype=local.dtype, global_shape=global_shape, offsets=offsets)
        box.update(words.numpy())
        return box.value
    runs = Runs(local.shape, global_shape=global_shape, offsets=offsets, words_per_element=words.numel() // local.numel())
    starts = runs.starts(0, runs.number)
    if runs.length >= BLOCK // 4 or runs.number == 1:
        total = sum(_contiguous(part, first=first) for part, first in zip(words.view(-1, runs.length), starts.tolist(), strict=True))
    else:
        total = _scattered(words.view(-1, runs.length), starts=torch.from_numpy(starts).to(words.device))
    return total & MASK


class BoxDigest(HostBox):
    """Local. `box_digest` of bytes in host memory that come piece by piece, in row-major order of the box.

    `update` takes anything with a buffer (a memoryview, `tensor.view(torch.uint8).numpy()`), whole words each time: 4 bytes, or 1 or 2 when
    the element is no larger. `value` is the digest when all have come. Pieces that are still in the cache, some 256 KiB, are fastest.
    """

    def __init__(self, sizes: Sequence[int], *, dtype: torch.dtype, global_shape: Sequence[int], offsets: Sequence[int]) -> None:
        word_bytes = min(dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize, 4)
        super().__init__(_runs(tuple(sizes), tuple(global_shape), tuple(offsets), dtype.itemsize // word_bytes), word_bytes=word_bytes)


@lru_cache(maxsize=4096)
def _runs(sizes: tuple[int, ...], global_shape: tuple[int, ...], offsets: tuple[int, ...], words_per_element: int) -> Runs:
    """Cached because every save meets the same tensors."""
    return Runs(sizes, global_shape=global_shape, offsets=offsets, words_per_element=words_per_element)


def _check_box(local: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> None:
    if local.layout != torch.strided or local.is_quantized:
        raise TypeError(f"no digest for {local.dtype} in layout {local.layout}")
    fits = len(global_shape) == len(offsets) == local.dim()
    if not fits or not all(o >= 0 and o + s <= g for o, s, g in zip(offsets, local.shape, global_shape, strict=True)):
        raise ValueError(f"a box of {tuple(local.shape)} at {tuple(offsets)} does not fit into {tuple(global_shape)}")


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as one flat row of unsigned words of at most 4 bytes, lowest first."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    return tensor.view(-1).view(_WORDS[min(tensor.dtype.itemsize, 4)])


def _contiguous(words: torch.Tensor, *, first: int) -> int:
    """Digest of words whose global indices are first, first + 1, ..."""
    columns, rows = _columns(words.device), _rows(first // BLOCK, (first + words.numel() - 1) // BLOCK + 1, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    head = min(-first % BLOCK, words.numel())
    num_full, tail = divmod(words.numel() - head, BLOCK)
    if head:
        column = first % BLOCK
        total += (words[:head].to(torch.int64) * columns[column : column + head]).sum() * rows[0]
    full, full_rows = words[head : head + num_full * BLOCK].view(num_full, BLOCK), rows[1 if head else 0 :]
    step = _DEVICE_ROWS
    buffer = torch.empty((min(step, num_full), BLOCK), dtype=torch.int64, device=words.device)
    for row in range(0, num_full, step):
        part = full[row : row + step]
        products = buffer[: len(part)].copy_(part).mul_(columns)
        total += (products.sum(dim=1) * full_rows[row : row + len(part)]).sum()
    if tail:
        total += (words[-tail:].to(torch.int64) * columns[:tail]).sum() * rows[-1]
    return int(total.item())


def _scattered(words: torch.Tensor, *, starts: torch.Tensor) -> int:
    """Digest of many short runs (one a row of `words`), several runs at once with a gathered weight per word."""
    first, last = int(starts.min()) // BLOCK, (int(starts.max()) + words.shape[1] - 1) // BLOCK
    columns, rows = _columns(words.device), _rows(first, last + 1, words.device)
    within = torch.arange(words.shape[1], dtype=torch.int64, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = max(1, _DEVICE_ROWS * BLOCK // words.shape[1])
    for row in range(0, len(words), step):
        index = starts[row : row + step, None] + within
        weights = columns.take(index & (BLOCK - 1)) * rows.take((index >> 16) - first)
        total += (words[row : row + step].to(torch.int64) * weights).sum()
    return int(total.item())


@lru_cache(maxsize=8)
def _columns(device: torch.device) -> torch.Tensor:
    """B(j) for every j."""
    return torch.from_numpy(column_weights().view(np.int64)).to(device)


@lru_cache(maxsize=512)
def _rows(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """A(k) for k in start..stop-1; cached because every save meets the same tensors."""
    return torch.from_numpy(row_weights(np.arange(start, stop)).view(np.int64)).to(device)
