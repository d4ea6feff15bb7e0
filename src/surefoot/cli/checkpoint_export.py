"""`surefoot checkpoint export`: the weights for other tools. An export counts only after a clean process has read it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefoot.checkpoint.clean import run_clean
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.prove import LIMIT_S
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, describe, find
from surefoot.cli.new_folder import new_folder, refuse_taken
from surefoot.cli.stage_changes import sample_of
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError, Corrupt, DataError
from surefoot.core.records import Manifest, Problem
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_before
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME, is_run

EXPORT_NAME = "surefoot_export.json"
Format = Literal["hf", "dcp", "safetensors"]


def export_(
    source: Annotated[Path, typer.Argument(metavar="RUN|PATH", help="A run folder for its newest checkpoint, or a checkpoint folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")],
    format_: Annotated[Format, typer.Option("--format", help="Llama-family folder, stock DCP folder, or bare safetensors.")] = "hf",
    checkpoint: Annotated[str, typer.Option("--id", metavar="ID", help="Another checkpoint of the run than its newest.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the weights of a checkpoint for other tools, and have a clean process read them back: keys, dtypes, bits, logits.

    Examples: surefoot checkpoint export runs/quickstart --out exported | surefoot checkpoint export runs/quickstart --format dcp
    --id s500-a1 --out weights
    """
    refuse_taken(out, option="--out")
    found = _found(source, checkpoint)
    if found.problems:
        raise Corrupt(describe(found.problems[0]), where=str(found.folder), hint="see `surefoot checkpoint verify`")
    with new_folder(out, option="--out") as building:
        notes = _write(found, building, format_=format_)
        job = {"format": format_, "out": str(building), "path": str(found.folder.absolute()), "run_dir": _run_dir(found)}
        check: dict[str, Any] = run_clean("surefoot.cli.export_proof", job, limit_s=LIMIT_S)
        problems = [Problem(**problem) for problem in check["problems"]]
        if problems:
            told = "; ".join(describe(problem) for problem in problems[:5])
            raise Corrupt(f"the export does not read back: {told}", where=str(out), hint="nothing was left of it; look at the disk")
    notes += check["notes"]
    if json_output:
        answer = {"schema_version": SCHEMA_VERSION, "path": str(out), "id": found.id, "format": format_, "logits": check["logits"]}
        typer.echo(strict_json.dumps(answer | {"num_tensors": check["num_tensors"], "notes": notes}))
        return
    lines = [f"exported {found.id} to {out}: {check['num_tensors']} tensors, read back by a clean process with the same bits"]
    if check["logits"]:
        lines.append(f"{check['logits']['architecture']} computes the same logits, to {check['logits']['relative']:.1e}")
    typer.echo("\n".join([*lines, *(f"note: {note}" for note in notes)]))


def _found(source: Path, checkpoint: str) -> Found:
    if not checkpoint:
        return find(source)
    if not is_run(source):
        raise ConfigError("--id names a checkpoint of a run", where=str(source), hint="give the run folder, or leave --id out")
    folder = source / CHECKPOINTS_NAME / checkpoint
    if not folder.is_dir():
        raise ConfigError(f"this run has no checkpoint {checkpoint!r}", where=str(source), hint="see `surefoot checkpoint list RUN`")
    return find(folder)


def _run_dir(found: Found) -> str | None:
    return str(found.run_dir.absolute()) if found.run_dir and (found.run_dir / CONFIG_NAME).is_file() else None


def _write(found: Found, out: Path, *, format_: Format) -> list[str]:
    """What could not be written, in sentences."""
    from surefoot.checkpoint.export import write_dcp, write_safetensors
    from surefoot.model.hf_layout import hf_name

    manifest = read_manifest(found.folder)
    notes: list[str] = []
    if format_ == "dcp":
        write_dcp(found.folder, out)
    elif format_ == "safetensors":
        write_safetensors(found.folder, out)
    else:
        notes = _write_hf_files(found, manifest, out)
        write_safetensors(found.folder, out, rename=hf_name)
    if format_ != "dcp":  # a stock folder holds what its .metadata names, and nothing else
        origin = {"format": format_, "run": manifest.run, "checkpoint": manifest.id, "step": manifest.step, "tokens": manifest.tokens}
        origin |= {"state_digest": manifest.state_digest, "manifest": manifest.hash, "data": manifest.data_hash}
        write_atomic(out / EXPORT_NAME, strict_json.dumps({"schema_version": SCHEMA_VERSION, **origin}, indent=1) + "\n")
    return notes


def _write_hf_files(found: Found, manifest: Manifest, out: Path) -> list[str]:
    from tokenizers import Tokenizer as RustTokenizer

    from surefoot.core.model_sizes import resolve_sizes
    from surefoot.data.manifest import TOKENIZER_NAME
    from surefoot.data.tokenizer import load_tokenizer
    from surefoot.model.hf_layout import hf_config

    config = config_of(found)
    stage = stage_before(config, sample_of(manifest.cursor))
    tensors = {tensor.key: tensor for tensor in manifest.tensors}
    embedding = tensors.get("model.embed.weight")
    if embedding is None:
        raise ConfigError("it is no model of ours: it has no embed.weight", where=str(found.folder), hint="take --format safetensors")
    section = replace(config.model, vocab_size=embedding.shape[0], rope_base=stage.rope_base)
    notes: list[str] = []
    eos_id: int | None = None
    try:
        tokenizer = load_tokenizer(Path(config.data.path) / TOKENIZER_NAME)
    except (DataError, ConfigError, OSError):
        notes.append("the prepared data is not here, so there are no tokenizer files")
    else:
        eos_id = tokenizer.eos_id
        write_atomic(out / "tokenizer.json", tokenizer.json_bytes)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": stage.seq_len}
        eos = RustTokenizer.from_str(tokenizer.json_bytes.decode()).id_to_token(eos_id)
        write_atomic(
            out / "tokenizer_config.json", strict_json.dumps({**settings, "eos_token": eos, "clean_up_tokenization_spaces": False})
        )
        write_atomic(out / "generation_config.json", strict_json.dumps({"eos_token_id": eos_id}))
    sizes = resolve_sizes(section, embedding.shape[0])
    written = hf_config(section, sizes, dtype=embedding.dtype, seq_len=stage.seq_len, eos_id=eos_id)
    write_atomic(out / "config.json", strict_json.dumps(written, indent=2) + "\n")
    return notes


def config_of(found: Found) -> RunConfig:
    from surefoot.config import load_config

    if found.run_dir is None or not (found.run_dir / CONFIG_NAME).is_file():
        hint = "give a run folder, or take --format safetensors or dcp"
        raise ConfigError(
            "the sizes of the model are in the config of a run, and this is a bare checkpoint", where=str(found.folder), hint=hint
        )
    return load_config(found.run_dir / CONFIG_NAME).config
