"""The last collectives of this rank, by the names of their groups, kept in a file when one fails: torch's flight recorder, cut to size."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from surefoot.core import strict_json
from surefoot.core.durable import write_atomic

logger = logging.getLogger(__name__)

MAX_COLLECTIVES = 300
"""The newest ones are kept: about 60 KB. Torch itself remembers TORCH_FR_BUFFER_SIZE of them, 2000 by default, in memory."""

MAX_ERROR_CHARACTERS = 4000


class Evidence:
    """Where this process leaves it. A process is one rank of one generation, so there is one such place, said at its start."""

    path: Path | None = None


def evidence_path(run_dir: Path, *, generation: int, rank: int) -> Path:
    """Beside the logs of that rank."""
    return run_dir / "logs" / f"g{generation}" / f"rank_{rank}.collectives.json"


def keep_evidence_at(path: Path) -> None:
    """Local. From now on `leave_evidence` writes there."""
    Evidence.path = path


def leave_evidence(what: str, error: BaseException) -> Path | None:
    """Local. Write down that `what` failed and what was under way. None where no place was said; a disk that refuses it is a warning."""
    path = Evidence.path
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json.dumps(_record(what, error), indent=1), durable=False)
    except Exception as problem:  # a sink of evidence: it must not take the place of the error that it is about
        logger.warning("the evidence about a failed collective could not be written: %s", problem)
        return None
    return path


def last_collectives() -> list[dict[str, Any]]:
    """Local. Of this process, oldest first: group, sequence number in that group and series, operator, sizes, age, whether it is over."""
    now_ns = time.time_ns()
    return [_shown(entry, now_ns=now_ns) for entry in _recorded()[-MAX_COLLECTIVES:]]


def group_states() -> list[dict[str, Any]]:
    """Local. What this process has enqueued and finished, as `states_of` says it."""
    return states_of(_recorded())


def states_of(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per group and series: the last enqueued collective (or point-to-point operation) in a flight record, and the last that is over.

    The two series of a group count apart; gloo records no point-to-point operations. Keys as in `coordinate.witness.GroupState`.
    """
    states: dict[tuple[str, bool], dict[str, Any]] = {}
    for entry in entries:
        shown = _shown(entry, now_ns=0)
        key = (shown["group"], shown["is_p2p"])
        state = states.setdefault(key, {"name": shown["group"], "is_p2p": shown["is_p2p"], "last_enqueued": 0, "last_completed": 0})
        if shown["is_over"]:
            state["last_completed"] = max(state["last_completed"], shown["seq"])
        if shown["seq"] >= state["last_enqueued"]:
            newest = {"operation": shown["operator"], "shapes": shown["input_sizes"], "dtypes": shown["dtypes"]}
            state.update(newest, last_enqueued=shown["seq"])
    return list(states.values())


def _recorded() -> list[dict[str, Any]]:
    # torch has no public way to read its recorder from inside the process. NCCL keeps a recorder of its own, which a CPU build lacks.
    core: Any = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = json.loads(core._dump_fr_trace_json()).get("entries", [])
    if torch.cuda.is_available() and hasattr(core, "_dump_nccl_trace_json"):
        entries = entries + json.loads(core._dump_nccl_trace_json()).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _shown(entry: Mapping[str, Any], *, now_ns: int) -> dict[str, Any]:
    _, group = entry["process_group"]
    return {
        "group": group,
        "is_p2p": bool(entry["is_p2p"]),
        "seq": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        "operator": entry["profiling_name"],
        "input_sizes": entry["input_sizes"],
        "output_sizes": entry["output_sizes"],
        "dtypes": entry["input_dtypes"],
        "age_s": round((now_ns - entry["time_created_ns"]) / 1e9, 6),
        "timeout_s": entry["timeout_ms"] / 1e3,
        "is_over": bool(entry["retired"]) or entry["state"] == "completed",
    }


def _record(what: str, error: BaseException) -> dict[str, Any]:
    collectives = last_collectives()
    return {
        "what": what,
        "error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS],
        "rank": int(os.environ.get("RANK", "0")),
        "newest_seq_by_group": {shown["group"]: shown["seq"] for shown in collectives if not shown["is_p2p"]},
        "newest_p2p_seq_by_group": {shown["group"]: shown["seq"] for shown in collectives if shown["is_p2p"]},
        "collectives": collectives,
    }
