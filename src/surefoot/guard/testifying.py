"""A rank's answer to the agent's call: which collectives it has enqueued and finished. Written by a thread that does nothing else."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from surefoot.coordinate.beats import BeatBoard
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.tensors.flight import group_states

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.25


class Answering:
    """A process is one rank of one generation, so one thread is enough."""

    thread: threading.Thread | None = None


def testify(board: BeatBoard, path: Path) -> None:
    """Local. From now on answer every call of `board` in `path`; a file with the number 0 says that there is somebody who does.

    Call it in the rank, never before the fork. A second call does nothing.
    """
    if Answering.thread is not None:
        return
    _answer(path, call=0)
    Answering.thread = threading.Thread(target=_serve, args=(board, path), name="testimony", daemon=True)
    Answering.thread.start()


def testify_to_agent() -> None:
    """Local. As `testify`, where an agent has forked this process."""
    if "SUREFOOT_BEATS_FD" not in os.environ:
        return
    folder = Path(os.environ["SUREFOOT_RUN_DIR"]) / "logs" / f"g{os.environ['SUREFOOT_GENERATION']}"
    board = BeatBoard.attach(int(os.environ["SUREFOOT_BEATS_FD"]))
    testify(board, folder / f"rank_{os.environ['RANK']}.testimony.json")


def _serve(board: BeatBoard, path: Path) -> None:
    answered = 0
    while True:
        time.sleep(_LOOK_INTERVAL_S)
        try:
            call = board.testimony_call
        except ValueError:
            return  # the board is closed: nobody calls any more
        if call != answered:
            answered = call
            _answer(path, call=call)


def _answer(path: Path, *, call: int) -> None:
    try:
        groups = group_states() if call else []
        write_atomic(path, strict_json.dumps({"schema_version": 1, "call": call, "groups": groups}), durable=False)
    except Exception as error:  # the boundary of a thread: whoever waits for the answer goes on without it
        logger.warning("this rank could not say what it knows: %s", error)
