"""What do checkpoints cost? Saves and loads of a 124M model and its AdamW state against bare copies and stock DCP, in interleaved rounds.

    python benchmarks/checkpoint.py [--rounds 5] [--quick] [--only copies|saves|steps|loads|two-ranks, several times]

copies     one thread over memory: memcpy, xxh3, the digest by dtype, all of them over pieces as a save takes them
saves      how long the loop stands still, with and without overlap, and the CPU-seconds of the whole save against dcp.save(sync_files=True)
steps      real forward and backward steps while a save is staged and uploaded by another process, against the same steps without one
loads      a verified load against stock dcp.load, and from memory against a cold disk, each in a process of its own
two-ranks  saves and steps of two fully sharded ranks

The threads of all its processes wait as those of our agent's ranks do, unless the environment says otherwise.

Prints one JSON line per round and row, then a table of medians and spreads, and each target as met or not met. Exit 1 when one is not met.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from surefoot.launch.wait_policy import sees_gpu, wait_policy


def main() -> None:
    """Become the process that measures: OpenMP reads its environment once, when torch is imported."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
    added = wait_policy(os.environ, has_gpu=sees_gpu(os.environ))
    command = [sys.executable, "-m", "benchmarks.checkpoint_rows", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path, **added})


if __name__ == "__main__":
    main()
