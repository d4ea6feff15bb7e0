"""What kind of checkpoint lies in a folder, by the names of its files. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from surefoot.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from surefoot.core.errors import ConfigError, Incompatible

FolderKind = Literal["surefoot", "dcp", "safetensors"]

_PER_RANK = re.compile(r"__\d+\.metadata")
_MEGATRON_STEP = re.compile(r"iter_\d{7}")
_DEEPSPEED_STEP = re.compile(r"global_step\d+")
_OTHERS = "see docs/opinions.md; its own framework can convert it to a stock DCP or safetensors folder, which can be looked at"


def look_at_folder(path: Path) -> FolderKind:
    """Raises ConfigError when there is nothing to look at, and Incompatible for checkpoints that are pickles, saying whose they are."""
    if not path.is_dir():
        raise ConfigError("no such folder", where=str(path))
    names = {entry.name for entry in path.iterdir()}
    if MANIFEST_NAME in names:
        return "surefoot"
    if whose := _whose(names):
        raise Incompatible(f"this is {whose}: not read, because that would execute code from it", where=str(path), hint=_OTHERS)
    if any(_PER_RANK.fullmatch(name) for name in names):
        raise Incompatible(
            "this was saved by stock DCP without collectives: each rank wrote a list of its own and nobody committed the whole",
            where=str(path),
            hint="load it with the program that saved it, and save it again",
        )
    if METADATA_NAME in names or any(name.endswith(".distcp") for name in names):
        return "dcp"
    if any(name.endswith(".safetensors") for name in names) or any(path.glob("sharded/*.safetensors")):
        return "safetensors"
    raise ConfigError(
        "no checkpoint: neither a manifest nor .metadata nor *.distcp nor *.safetensors is here",
        where=str(path),
        hint="give the folder of one step, not the folder of all of them",
    )


def _whose(names: set[str]) -> str:
    """Megatron's and DeepSpeed's folders, of one step or of all of them. Empty for none of them."""
    megatron = {"latest_checkpointed_iteration.txt", "common.pt"} & names
    if megatron or any(_MEGATRON_STEP.fullmatch(name) for name in names) or _has_part(names, "mp_rank_", without="_states.pt"):
        return "a checkpoint of Megatron, whose common state is a pickle"
    deepspeed = "zero_to_fp32.py" in names or any(_DEEPSPEED_STEP.fullmatch(name) for name in names)
    if deepspeed or any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return "a checkpoint of DeepSpeed, a pickle per rank"
    return ""


def _has_part(names: set[str], start: str, *, without: str) -> bool:
    return any(name.startswith(start) and not name.endswith(without) for name in names)
