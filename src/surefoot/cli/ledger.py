"""`surefoot ledger`: what was seen, decided and done in a run, and whether that record is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.core import strict_json
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import LEDGER_NAME, manifest_positions, read_ledger, verify_ledger
from surefoot.observe.run_dir import require_run


def ledger(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print the entries as JSON lines; with --verify one JSON object.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every line; exit 1 at the first that is not what was written.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Only the last so many entries; 0 is all.")] = 0,
) -> None:
    """Print or verify the ledger of a run. --verify also finds a cut tail, by what the checkpoints know.

    Examples: surefoot ledger runs/quickstart --tail 20 | surefoot ledger runs/quickstart --verify
    """
    require_run(run_dir)
    if verify:
        _verify(run_dir, json_output=json_output)
        return
    for entry in read_ledger(run_dir / LEDGER_NAME)[-tail:]:
        typer.echo(strict_json.dumps(entry) if json_output else _line(entry))


def _verify(run_dir: Path, *, json_output: bool) -> None:
    manifests = manifest_positions(run_dir)  # Before the ledger: a live run adds to both.
    check = verify_ledger(run_dir / LEDGER_NAME, manifests=manifests)
    if json_output:
        answer = {"schema_version": 1, "ok": check.ok, "entries": check.entries, "first_bad": check.first_bad, "detail": check.detail}
        typer.echo(strict_json.dumps(answer))
    elif check.ok:
        typer.echo(f"ok: {check.entries} entries, none changed or missing ({len(manifests)} checkpoints agree)")
    else:
        typer.echo(f"bad at entry {check.first_bad} of {check.entries}: {check.detail}")
    if not check.ok:
        raise typer.Exit(1)


def _line(entry: LedgerEntry) -> str:
    where = f"g{entry.generation} a{entry.attempt} step {entry.step}"
    details = " ".join(f"{name}={_short(value)}" for name, value in entry.fields.items())
    words = [f"{entry.seq:>5}", entry.time_utc, f"{where:<18}", f"{entry.event:<22}", entry.rule, entry.reason, details, f"({entry.by})"]
    return " ".join(word for word in words if word)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else strict_json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
