"""Joining the ranks of this generation, from the environment that torchrun and our agent both set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from surefoot.core.errors import PeerLost
from surefoot.core.sections import LaunchSection
from surefoot.tensors.world import World, is_peer_failure, join_world, single_world


def local_device() -> torch.device:
    """The accelerator of this local rank, or the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


@contextmanager
def connected(launch: LaunchSection) -> Iterator[World]:
    """Collective over the world. The World of this process: alone when the environment names no peers.

    Joining is bounded by `init_limit_s`, every later collective by `collective_limit_s`. The store's keys carry the generation, so a
    restart never reads what the generation before it left behind. Raises PeerLost when the others do not come.
    """
    device = local_device()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield single_world(device)
        return
    try:
        _join_default_group(launch, device)
        world = join_world(device=device, collective_limit_s=launch.collective_limit_s)
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        raise PeerLost(
            f"the ranks did not find each other: {error}", where="process group start", hint="see the logs of the other ranks"
        ) from error
    yield world
    if not _ends_abruptly():
        dist.destroy_process_group()  # only on the way out without an error: after one, peers may be gone and this would wait for them


def _ends_abruptly() -> bool:
    """Ranks of our agent and of `surefoot train` under torchrun end by os._exit, on purpose: destroying a gloo group while its last work is
    being freed deadlocks in torch 2.13 (the destructor joins a thread that wants the interpreter lock), and in one of some ends it aborts.
    """
    return "SUREFOOT_GENERATION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def set_threads(launch: LaunchSection) -> None:
    """Intra-op threads of this rank: as configured, or the cores shared out among the local ranks. One and two threads differ in bits."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(launch.threads_per_rank or max(1, cores // local_size))


def _join_default_group(launch: LaunchSection, device: torch.device) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listen_fd = os.environ.get("SUREFOOT_LISTEN_FD")
    by_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports its C part without saying so
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not by_agent_store,
        timeout=timedelta(seconds=launch.init_limit_s),
        wait_for_workers=False,
        master_listen_fd=int(listen_fd) if listen_fd is not None and rank == 0 else None,
    )
    generation = os.environ.get("SUREFOOT_GENERATION", "") or f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"surefoot/{generation}", store),  # type: ignore[attr-defined]  # as above
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=launch.collective_limit_s),
    )
    dist.distributed_c10d._get_default_group()._set_group_desc("surefoot:default")  # init_process_group takes no name
