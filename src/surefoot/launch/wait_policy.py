"""How the compute threads of a CPU rank wait for each other: for a moment awake, then asleep, so that whoever works
beside them finds a core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_USERS_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""What OpenMP, GNU's and Intel's, takes from the environment when torch is imported."""


_SPINS = 10_000
"""A tenth of a millisecond: longer than most waits of a region in which nobody is missing, shorter than the turn of whoever
took the core."""


def wait_policy(environ: Mapping[str, str], *, has_gpu: bool) -> dict[str, str]:
    """What is added to the environment that torch is imported in. A setting that is there already stays, and so does spinning beside a GPU:
    there the cores only feed it, and a thread that sleeps is woken late."""
    if has_gpu or any(name in environ for name in _USERS_OWN):
        return {}
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(_SPINS)}


def sees_gpu(environ: Mapping[str, str]) -> bool:
    """Whether a rank would find a CUDA device, as far as one can tell without torch."""
    return environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
