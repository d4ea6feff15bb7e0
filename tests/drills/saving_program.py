"""A small loop that saves every second step, in a fresh process per command: `test_save_crash_points.py` kills it at every call.

A command is a line of JSON on stdin. For a run of the loop it is {"run_dir", "num_steps"} and as wished "width", "checkpoint" (settings),
"leave_in", "stop_before". The answer is a line with the pid, and when that process has ended, a line with its wait status. Torch is
imported once; each process is a fork of this one, so a run costs a fraction of a second. With `leave_in` it asks itself to leave in that
step, with `stop_before` it stops itself before that step and goes on when it gets SIGCONT. Output goes to <run_dir>.out: lines
"digest <step> <digest of the state>" and "resident <step> <bytes>", and what went wrong.

{"do": "stage", "run_dir", "id"} and {"do": "upload", "run_dir", "stop_before"} are the two halves of a save in a process each, as under an
agent: the host copy lies in memory of this process, and is there after the one that uploads it was killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.checkpoint.commit import prepare, take
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.state import collect, dtype_name
from surefoot.checkpoint.upload import NotCommitted, ReadBack, Uploader
from surefoot.core.errors import SurefootError
from surefoot.core.records import Manifest, ManifestTensor
from surefoot.core.sections import CheckpointSection, RunConfig, RunSection, ScheduleSection, TrainSection
from surefoot.guard import Guard
from surefoot.tensors.digest import as_hex, state_digest, tensor_digest
from surefoot.tensors.world import single_world

_ANY_TRACER = (0x59616D61, -1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY: where Yama lets only ancestors look


class Points:
    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 4
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(self.next_sample))

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


def config_of(command: Mapping[str, Any]) -> RunConfig:
    return RunConfig(
        run=RunSection(name="crash", dir=command["run_dir"]),
        train=TrainSection(num_steps=command["num_steps"]),
        schedule=ScheduleSection(kind="constant"),
        checkpoint=CheckpointSection(**{"interval_steps": 2, "keep_last": 2, "milestone_steps": 0, **command.get("checkpoint", {})}),
    )


def train(command: Mapping[str, Any], slot: Slot) -> None:
    torch.manual_seed(0)
    width = command.get("width", 128)
    model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = Points()
    with Guard(config_of(command), model=model, optimizer=optimizer, data=points) as guard:
        guard.restore()
        while guard.begin():
            if guard.step + 1 == command.get("stop_before"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if guard.step + 1 == command.get("leave_in"):
                os.kill(os.getpid(), signal.SIGTERM)
            loss = model(next(points)).square().sum()
            loss.backward()
            if guard.judge(loss, 4).proceeds:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(guard.clip_scale)
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            guard.finish()
            print("digest", guard.step, digest_of(model, optimizer), flush=True)
            print("resident", guard.step, resident_bytes(), flush=True)


def stage(command: Mapping[str, Any], slot: Slot) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 512)
    state = collect(model, torch.optim.AdamW(model.parameters()))
    draft = Manifest(
        format_version=0, id=command["id"], run="crash", step=1, attempt=1, generation=1, parent=None, time_utc="2026-01-01T00:00:00.000Z",
        loss=1.0, tokens=1, state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1,
        ledger_hash="", cursor={}, files=(), tensors=(),
    )  # fmt: skip
    work = prepare(draft, state=state, extras={"cursor": {}}, world=single_world(), plans=SavePlans())
    if (error := take(slot, work)) is not None:
        raise error


def upload(command: Mapping[str, Any], slot: Slot) -> None:
    if "stop_before" in command:
        os.kill(os.getpid(), signal.SIGSTOP)
    read_back: list[ReadBack] = []
    failed: list[NotCommitted] = []
    root = Path(command["run_dir"]) / "checkpoints"
    uploader = Uploader(root, [slot], limit_s=60.0, on_read_back=read_back.append, on_failed=failed.append)
    uploader.drain(limit_s=60.0, ranks_are_gone=True)
    if failed:
        raise failed[0].error
    print("read back:", [problem for back in read_back for problem in back.problems])
    assert slot.state() is SlotState.COMMITTED


DO = {"train": train, "stage": stage, "upload": upload}


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = collect(model, optimizer).tensors.items()
    return state_digest(ManifestTensor(key, dtype_name(it.dtype), tuple(it.shape), as_hex(tensor_digest(it))) for key, it in tensors)


def resident_bytes() -> int:
    """Of this process, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_forked(command: Mapping[str, Any], slot: Slot) -> int:
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        ctypes.CDLL(None).prctl(*_ANY_TRACER, 0, 0, 0)
        output = os.open(f"{command['run_dir']}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        DO[command.get("do", "train")](command, slot)
        exit_code = 0
    except SystemExit as error:
        exit_code = int(error.code or 0)
    except SurefootError as error:
        print(f"ended: {error}", file=sys.stderr)
        exit_code = error.exit_code
    except BaseException:  # the end of a process: whatever it was must be read by the test
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def main() -> None:
    torch.set_num_threads(1)
    slot = Slot.create(rank=0, number=0)
    for line in sys.stdin:
        pid = run_forked(json.loads(line), slot)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main()
