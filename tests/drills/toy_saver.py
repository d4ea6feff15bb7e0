"""A torch-free job that saves through slots, for drills of the uploader: it resumes from the newest checkpoint that is published.

`TOY` in the environment is JSON: {num_steps, step_s, save_every, image_bytes, faults: {"<generation>": {"<rank>": "<fault>"}}}. Faults at
the first save of a generation: `die-staging` (its slot is half full), `die-staged` (all ranks have staged whole).
"""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id
from surefoot.checkpoint.slot import Slot, SlotHeader, SlotState
from surefoot.coordinate.beats import BeatBoard
from surefoot.core.records import Manifest, Phase
from surefoot.observe.ledger import LEDGER_NAME, read_ledger

TOY = json.loads(os.environ["TOY"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["SUREFOOT_GENERATION"])
RUN_DIR = Path(os.environ["SUREFOOT_RUN_DIR"])


def main() -> int:
    board = BeatBoard.attach(int(os.environ["SUREFOOT_BEATS_FD"]))
    slots = [Slot.open(int(os.environ[name]), rank=rank, number=number) for rank, number, name in json.loads(os.environ["SUREFOOT_SLOTS"])]
    fault = TOY.get("faults", {}).get(str(GENERATION), {}).get(str(RANK), "")
    found = published(RUN_DIR / "checkpoints")
    step = (parse_id(found[-1]) or (0,))[0] if found else 0
    print(f"generation {GENERATION} goes on from step {step}", flush=True)
    while step < TOY["num_steps"]:
        board.slot(RANK).beat(phase=Phase.STEP, step=step, restored=True)
        if board.leave_requested:
            return 75
        time.sleep(TOY["step_s"])
        step += 1
        if step % TOY["save_every"] == 0:
            stage(step, slots=slots, fault=fault)
    return 0


def stage(step: int, *, slots: list[Slot], fault: str) -> None:
    mine = [slot for slot in slots if slot.rank == RANK]
    slot = wait_for(lambda: next((slot for slot in mine if slot.state().reusable), None))
    num_bytes = TOY["image_bytes"]
    checkpoint = f"s{step}-a{GENERATION}"
    header = SlotHeader("toy", checkpoint, step, GENERATION, GENERATION, RANK, WORLD_SIZE, f"__{RANK}_0.distcp", num_bytes)
    image = slot.claim(header)
    image[: num_bytes // 2] = bytes([step % 256]) * (num_bytes // 2)
    if fault == "die-staging":
        os.kill(os.getpid(), signal.SIGKILL)
    slot.staged(index(checkpoint, step))
    if fault == "die-staged":
        busy = (SlotState.FREE, SlotState.STAGING)
        wait_for(lambda: not any(held(other, checkpoint) in busy for other in slots if other.number == slot.number) or None)
        os.kill(os.getpid(), signal.SIGKILL)


def held(slot: Slot, checkpoint: str) -> SlotState:
    header = slot.header()
    return slot.state() if header is not None and header.id == checkpoint else SlotState.FREE


def wait_for(look: Any) -> Any:
    give_up_s = time.monotonic() + 60.0
    while (found := look()) is None:
        if time.monotonic() > give_up_s:
            raise TimeoutError("nothing came")
        time.sleep(0.005)
    return found


def index(checkpoint: str, step: int) -> dict[str, Any]:
    entries = read_ledger(RUN_DIR / LEDGER_NAME)
    draft = Manifest(
        format_version=0,
        id=checkpoint,
        run="toy",
        step=step,
        attempt=GENERATION,
        generation=GENERATION,
        parent=None,
        time_utc="",
        loss=None,
        tokens=0,
        state_digest="",
        config_hashes={},
        data_hash="",
        code_version="",
        topology={"world_size": WORLD_SIZE},
        environment={},
        ledger_seq=entries[-1].seq,
        ledger_hash=entries[-1].hash,
        cursor={},
        files=(),
        tensors=(),
    )
    keys = [f"model.w{rank}" for rank in range(WORLD_SIZE)]
    return {
        "job_bytes": TOY["image_bytes"] * WORLD_SIZE,
        "metadata": base64.b64encode(b"metadata").decode(),
        "extras": "{}",
        "reason": "it is due",
        "draft": asdict(draft),
        "stored": [[key] for key in keys],
        "tensors": [[key, "float32", [1]] for key in keys],
        "parts": [{"key": keys[RANK], "digest": f"{step:016x}"}],
    }
