"""`surefoot checkpoint prove`: others load it, on one rank, on another topology, and into the model that the config builds."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.checkpoint.clean import run_clean
from surefoot.checkpoint.prove import LIMIT_S, Proof, free_budget, other_world_size, prove
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, as_json, describe, find, lineage_of, manifest_or_none
from surefoot.cli.ledgering import tell
from surefoot.core import strict_json
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.records import Problem
from surefoot.core.units import show_bytes, show_duration
from surefoot.observe.run_dir import CONFIG_NAME

_RULE = "checkpoint prove"


def prove_(
    path: Annotated[Path, typer.Argument(metavar="RUN|PATH", help="A run folder for its newest checkpoint, or a checkpoint folder.")],
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, max=64, help="Load on so many ranks only; 0: on one, then on another number than saved.")
    ] = 0,
    on: Annotated[str, typer.Option("--on", metavar="NODE", help="The node that is to load it: this one's name.")] = "",
    limit_s: Annotated[float, typer.Option("--limit-s", min=1.0, help="Seconds that one load may take.")] = LIMIT_S,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Have clean processes load a checkpoint and compare every digest; of a run, build its model too. Exit 1 when something differs.

    What comes of it is ledgered when the checkpoint is in a run folder.

    Examples: surefoot checkpoint prove runs/quickstart | surefoot checkpoint prove copies/s500-a1 --ranks 4 --json
    """
    _refuse_other_node(on, path=path)
    found = find(path)
    proofs = _prove(found, ranks=ranks, limit_s=limit_s)
    problems = [*found.problems, *(problem for proof in proofs for problem in proof.problems)]
    model = None if ranks or problems else _prove_model(found, limit_s=limit_s)
    model_problems = [Problem(**problem) for problem in model["problems"]] if model else []
    ledgered = _ledger(found, proofs, model_problems)
    problems += model_problems
    if json_output:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "ok": not problems,
            "path": str(found.folder),
            "problems": [as_json(problem) for problem in problems],
            "proofs": [_proof_row(proof) for proof in proofs],
            "model": {key: value for key, value in model.items() if key != "problems"} if model else None,
            "ledgered": ledgered,
        }
        typer.echo(strict_json.dumps(answer))
    else:
        typer.echo("\n".join(_lines(found, proofs, model, problems)))
    if problems:
        raise typer.Exit(1)


def _refuse_other_node(node: str, *, path: Path) -> None:
    here = {socket.gethostname(), socket.getfqdn(), "localhost"}
    if node and node not in here:
        raise ConfigError(
            f"this command runs on {socket.gethostname()} and starts nothing on {node}",
            where="--on",
            hint=f"run there, where the folder is mounted: surefoot checkpoint prove {path}",
        )


def _prove(found: Found, *, ranks: int, limit_s: float) -> list[Proof]:
    """One load after the other, until one finds something."""
    manifest = manifest_or_none(found.folder)
    saved = manifest.topology.get("world_size", 0) if manifest else 0
    looks = lineage_of(found.run_dir).looks.get(found.id, ()) if found.run_dir else ()
    turn = sum(1 for look in looks if look.event == Event.CHECKPOINT_PROVEN)
    proofs: list[Proof] = []
    for num_ranks in [ranks] if ranks else [1, other_world_size(saved, turn=turn)]:
        expected = (found.ref.state_digest or None) if found.ref else None
        proofs.append(prove(found.folder, num_ranks=num_ranks, dim=turn % 2, expected_state_digest=expected, limit_s=limit_s))
        if not proofs[-1].ok:
            break
    return proofs


def _prove_model(found: Found, *, limit_s: float) -> dict[str, Any] | None:
    """Whether it fits what the run's own config builds, in a clean process. `skipped` says why that could not be asked."""
    if found.run_dir is None:
        return None
    if not (found.run_dir / CONFIG_NAME).is_file():
        return {"skipped": f"the run has no {CONFIG_NAME}", "canary": None, "problems": []}
    size = found.ref.num_bytes if found.ref else 0
    if size > 2 * free_budget():
        what = f"model and optimizer need {show_bytes(size)}, and {show_bytes(2 * free_budget())} may be used here"
        return {"skipped": what, "canary": None, "problems": []}
    job = {"run_dir": str(found.run_dir.absolute()), "path": str(found.folder.absolute())}
    answer: dict[str, Any] = run_clean("surefoot.cli.model_proof", job, limit_s=limit_s)
    return answer


def _ledger(found: Found, proofs: Sequence[Proof], model_problems: Sequence[Problem]) -> bool:
    """Only what the ledger knows, and is not retired meanwhile: its bytes may be half gone for no other reason."""
    if found.run_dir is None or found.ref is None or found.id in lineage_of(found.run_dir).retired:
        return False
    if found.problems:
        fields = {"id": found.id, "host": socket.gethostname(), "problems": list(found.problems)}
        tell(found.run_dir, Event.CHECKPOINT_DAMAGED, rule=_RULE, fields=fields)
        return True
    for proof in proofs:
        event, told = proof.event()
        tell(found.run_dir, event, rule=_RULE, fields=told)
    if model_problems:
        reason = "; ".join(describe(problem) for problem in model_problems)
        tell(found.run_dir, Event.CHECKPOINT_REJECTED, rule=_RULE, reason=reason, fields={"id": found.id})
    return True


def _proof_row(proof: Proof) -> dict[str, Any]:
    return {
        "world_size": proof.world_size,
        "saved_world_size": proof.saved_world_size,
        "dim": proof.dim,
        "ok": proof.ok,
        "rung": proof.rung,
        "num_tensors": proof.num_tensors,
        "bytes": proof.num_bytes,
        "wall_s": proof.wall_s,
        "host": proof.host,
    }


def _lines(found: Found, proofs: Sequence[Proof], model: Mapping[str, Any] | None, problems: Sequence[Problem]) -> list[str]:
    lines = [describe(problem) for problem in problems]
    for proof in proofs:
        ranks = "a clean process" if proof.world_size == 1 else f"{proof.world_size} ranks (saved by {proof.saved_world_size})"
        what = f"{proof.rung}: {proof.num_tensors} tensors" if proof.ok else "failed"
        lines.append(f"{what}, loaded by {ranks} in {show_duration(proof.wall_s)}")
    if model is not None:
        lines.append(_model_line(model))
    return [*lines, f"{'failed' if problems else 'ok'}: {found.folder}"]


def _model_line(model: Mapping[str, Any]) -> str:
    if model["skipped"]:
        return f"the model was not built: {model['skipped']}"
    if model["problems"]:
        return "it does not fit the model that the config builds"
    canary = model["canary"]
    if canary is None:
        return "it fits the model that the config builds; no held-out loss was saved with it"
    return f"it fits the model that the config builds: held-out loss {canary['found']:.6g}, saved {canary['saved']:.6g}"
