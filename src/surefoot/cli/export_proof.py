"""A clean process that reads an export back and compares it with its checkpoint: `python -m surefoot.cli.export_proof JOB`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.clean import begin_clean, end_clean, leave_result
from surefoot.checkpoint.export import check_dcp, check_safetensors, read_weights, weights_of
from surefoot.checkpoint.manifest import read_manifest
from surefoot.cli.stage_changes import sample_of
from surefoot.config import load_config
from surefoot.core.records import Problem
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_before
from surefoot.model.hf_layout import hf_name
from surefoot.model.transformer import Transformer
from surefoot.observe.run_dir import CONFIG_NAME

_TOLERANCE = 1e-4
"""Of the largest logit: both compute in float32 and add in another order; a wrong layout is off by far more."""
_NUM_TOKENS = 48


def main() -> None:
    job = begin_clean()
    torch.set_num_threads(1)
    leave_result(job, check_export(job))
    end_clean()


def check_export(job: Mapping[str, Any]) -> dict[str, Any]:
    """Local. {problems, notes, logits, num_tensors}."""
    out, path = Path(job["out"]), Path(job["path"])
    wanted = weights_of(path)
    logits: dict[str, Any] | None = None
    notes: list[str] = []
    if job["format"] == "dcp":
        problems = check_dcp(out, wanted)
    elif job["format"] == "safetensors":
        problems = check_safetensors(out, wanted)
    else:
        problems = check_safetensors(out, wanted, rename=hf_name)
        if importlib.util.find_spec("transformers") is None:
            notes.append("transformers is not installed, so logits were not compared: pip install 'surefoot[hf]'")
        elif not problems:
            logits, problems = _compare_logits(out, path, config=load_config(Path(job["run_dir"]) / CONFIG_NAME).config)
    return {"problems": [asdict(problem) for problem in problems], "notes": notes, "logits": logits, "num_tensors": len(wanted)}


def _compare_logits(out: Path, path: Path, *, config: RunConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The same tokens through our model and through the one that `transformers` builds from the folder."""
    from transformers import AutoModelForCausalLM

    weights = {name: tensor.float() for portion in read_weights(path) for name, tensor in portion.items()}
    vocab_size = weights["embed.weight"].shape[0]
    stage = stage_before(config, sample_of(read_manifest(path).cursor))
    ours = Transformer(replace(config.model, vocab_size=vocab_size, rope_base=stage.rope_base), vocab_size)
    ours.load_state_dict(weights)
    theirs = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(vocab_size, (2, min(_NUM_TOKENS, stage.seq_len)), generator=generator)
    positions_BS = torch.arange(tokens_BS.shape[1]).expand(tokens_BS.shape)
    with torch.no_grad():
        here_BSV = ours(tokens_BS, positions_BS, torch.zeros_like(tokens_BS))
        there_BSV = theirs(tokens_BS).logits
    relative = float((here_BSV - there_BSV).abs().max() / here_BSV.abs().max().clamp_min(1e-12))
    compared = {"architecture": type(theirs).__name__, "relative": relative, "tolerance": _TOLERANCE}
    if relative <= _TOLERANCE:  # not so for nan either
        return compared, []
    detail = f"{type(theirs).__name__} computes other logits: relative difference {relative:.2g}, limit {_TOLERANCE:g}"
    return compared, [Problem(kind="wrong-digest", file="config.json", detail=detail)]


if __name__ == "__main__":
    main()
