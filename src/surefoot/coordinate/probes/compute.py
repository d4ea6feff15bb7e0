"""Two probes that need torch, and so are imported in a child process only: known bits of computing, and the bandwidth between processes."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any, Final

from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import ProbeResult
from surefoot.core.parent import signal_on_parents_end

_SIZE: Final = 256
_REPEATS: Final = 3
_BYTES: Final = 4 << 20
_LIMIT_S: Final = 60


def probe_compute(wish: ProbeWish) -> ProbeResult:
    """Multiply and reduce seeded numbers several times: every time must give the same bits, and integer sums the known ones.

    The digest is the same on every node of one kind with one build of torch, so whoever asks several compares them.
    """
    import torch

    device = torch.device(wish.device)
    digests = [_digest(wish.device, seed=wish.seed) for _ in range(_REPEATS)]
    figures: dict[str, object] = {"digest": digests[0], "device": wish.device, "torch": torch.__version__}
    if len(set(digests)) > 1:
        return ProbeResult("compute", "failed", f"{_REPEATS} runs of one computation gave {len(set(digests))} different results", figures)
    # Sums of whole numbers below 2^24 are exact in float32 in every order: this result is known without a second machine.
    whole = torch.arange(4096, device=device, dtype=torch.float32)
    total = int(whole.sum().item())
    if total != 4096 * 4095 // 2:
        return ProbeResult("compute", "failed", f"the sum of 0 to 4095 is {total}, not {4096 * 4095 // 2}", figures)
    return ProbeResult("compute", "ok", f"{_REPEATS} runs, the same bits", figures)


def _digest(device: str, *, seed: int) -> str:
    import torch

    generator = torch.Generator().manual_seed(seed)
    sha = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(_SIZE, _SIZE, generator=generator).to(device, dtype) for _ in range(2))
        product = a @ b
        for result in (product, torch.softmax(product.float(), dim=1), product.float().sum(dim=0), product.float().cumsum(dim=0)):
            sha.update(result.detach().cpu().view(torch.uint8).contiguous().numpy().tobytes())
    return sha.hexdigest()[:32]


def probe_bandwidth(wish: ProbeWish) -> ProbeResult:
    """All-reduce between `num_ranks` processes of this node: whether each gets the right sum, and how fast.

    Collective over the processes that it starts. On accelerators by NCCL, one per process; else by gloo over loopback.
    """
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")  # nothing of torch runs here before: a fork is clean, and starts in no time
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, wish, port, queue), daemon=True) for rank in range(wish.num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_LIMIT_S)
    codes = [process.exitcode for process in ranks]
    if any(code != 0 for code in codes):
        for process in ranks:
            process.kill()
        return ProbeResult("bandwidth", "failed", f"processes of an all-reduce ended with {codes}", {"exit_codes": codes})
    speeds = [queue.get() for _ in ranks]
    figures: dict[str, object] = {"bytes_per_s": min(speeds), "num_ranks": wish.num_ranks, "backend": _backend(wish)}
    return ProbeResult("bandwidth", "ok", f"{min(speeds) / 1e6:.0f} MB/s between {wish.num_ranks} processes", figures)


def _rank(rank: int, wish: ProbeWish, port: int, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    signal_on_parents_end(os.getppid(), signal.SIGKILL)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    device = torch.device(f"cuda:{rank}" if wish.device == "cuda" else wish.device)
    dist.init_process_group(_backend(wish), rank=rank, world_size=wish.num_ranks, timeout=timedelta(seconds=_LIMIT_S / 2))
    values = torch.full((_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if not bool((values == wish.num_ranks * (wish.num_ranks + 1) / 2).all()):
        os._exit(3)
    begin_s = time.monotonic()
    for _ in range(_REPEATS):
        dist.all_reduce(values)
    values.sum().item()
    queue.put(_REPEATS * _BYTES / (time.monotonic() - begin_s))
    dist.barrier()
    os._exit(0)  # a group that is not needed any more is not worth the seconds of its destruction


def _backend(wish: ProbeWish) -> str:
    return "nccl" if wish.device == "cuda" else "gloo"
