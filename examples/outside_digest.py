"""The state digest of a checkpoint, by stock torch and numpy alone: no line of surefoot runs here.

    python examples/outside_digest.py runs/quickstart/checkpoints/s500-a1

It reads the folder with `torch.distributed.checkpoint.load`, digests every `model.*` and `optim.*` tensor by the definition of "sf1", and
prints the digest that `manifest.json` names. Exit 1 when the two differ.

Definition: a tensor is its row-major elements, as little-endian words (8- and 16-byte elements as two and four 32-bit words) with a running
index i. Its digest is the sum of word(i) * A(i // 65536) * B(i % 65536) mod 2^64, where A(k) = splitmix64(0x243F6A8885A308D3 + k) | 1 and
B(j) = splitmix64(0x13198A2E03707344 + j) | 1. The state digest is sha256 over the JSON rows [key, dtype, shape, digest], sorted by key.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import numpy.typing
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def splitmix64(first: int, count: int) -> np.typing.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64((first + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


COLUMNS = splitmix64(0x13198A2E03707344, 65536) | np.uint64(1)


def tensor_digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    words = raw.view(f"<u{min(tensor.dtype.itemsize, 4)}")
    total = 0
    for row in range(0, len(words), 65536):
        part = words[row : row + 65536].astype(np.uint64)
        row_weight = int(splitmix64((0x243F6A8885A308D3 + row // 65536) % 2**64, 1)[0]) | 1
        total += int((part * COLUMNS[: len(part)]).sum(dtype=np.uint64)) * row_weight
    return f"{total % 2**64:016x}"


def state_digest(folder: Path) -> str:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(("model.", "optim."))
    }
    load(state, checkpoint_id=folder)
    rows = sorted(
        [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor_digest(tensor)] for key, tensor in state.items()
    )
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
    return f"sf1:{hashlib.sha256(text.encode()).hexdigest()}"


def main() -> int:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    folder = Path(sys.argv[1])
    found = state_digest(folder)
    print(found)
    named = json.loads((folder / "manifest.json").read_text())["state_digest"]
    if found != named:
        print(f"manifest.json says {named}", file=sys.stderr)
    return 0 if found == named else 1


if __name__ == "__main__":
    sys.exit(main())
