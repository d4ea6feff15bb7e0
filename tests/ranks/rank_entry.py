"""What a test rank runs inside the product's nursery: load the test's function, join the gloo group, call it, pickle what came of it."""

from __future__ import annotations

import datetime
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any


def main() -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    call = pickle.loads(Path(os.environ["TEST_CALL"]).read_bytes())
    if call["init"]:
        limit = datetime.timedelta(seconds=call["timeout_s"])
        listen_fd = int(os.environ["SUREFOOT_LISTEN_FD"]) if rank == 0 else None
        port = int(os.environ["MASTER_PORT"])
        # torch re-exports TCPStore from its C part without saying so
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, limit, master_listen_fd=listen_fd)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        function = _load(call["path"], call["module"], call["name"])
        outcome: tuple[str, Any] = ("result", function(rank=rank, world_size=world_size, **call["kwargs"]))
    except BaseException:  # the boundary of the process; a rank's CheckpointException is a BaseException
        outcome = ("error", traceback.format_exc())
    target = Path(os.environ["TEST_OUTCOME"])
    temporary = target.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(target)
    if outcome[0] == "result" and dist.is_initialized():
        dist.barrier()  # nobody closes the store while a peer still needs it
        dist.destroy_process_group()
    return 0 if outcome[0] == "result" else 1


def _load(path: str, module_name: str, name: str) -> Callable[..., Any]:
    """The function by file and qualified name, under the module name that pytest gave it, so that its classes unpickle there."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = attrgetter(name)(module)
    return function
