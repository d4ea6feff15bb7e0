"""`surefoot data block`: ask a run to leave something out, by one line in its ledger. The run answers in its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_count

if TYPE_CHECKING:
    from surefoot.cli.blocking import Scope, Target, Wish
    from surefoot.cli.run_data import RunData
    from surefoot.core.blocking import Block

SCHEMA_VERSION = 1


def block(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    document: Annotated[
        list[str], typer.Option("--document", metavar="ID", help="A document, as `data locate` names it: every copy. May be given again.")
    ] = [],  # noqa: B006 - never changed
    file: Annotated[str, typer.Option("--file", metavar="NAME", help="All documents of a source file, as `data locate` names it.")] = "",
    shard: Annotated[str, typer.Option("--shard", metavar="SOURCE/SHARD", help="All documents of a shard.")] = "",
    samples: Annotated[str, typer.Option("--samples", metavar="FIRST:END", help="Global samples, to be skipped.")] = "",
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="The samples of a step, to be skipped.")] = None,
    mode: Annotated[
        Literal["mask", "replace"] | None, typer.Option("--mode", help="Silence the text where it stands (mask), or take other samples.")
    ] = None,
    from_sample: Annotated[int, typer.Option("--from-sample", metavar="G", min=0, help="Not before this sample.")] = 0,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")] = "",
    evidence_step: Annotated[int | None, typer.Option("--evidence-step", metavar="N", help="The step that showed it.")] = None,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Where the run's prepared data lies now, if it was moved.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would be, and ask for nothing.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show what was asked for, taken and refused so far.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a run to leave out a document, a file, a shard or a range of samples. A live run takes it between two steps.

    \b
    Examples:
      surefoot data block runs/quickstart --document 3f2a9c01d4 --reason "one line 4000 times" --evidence-step 120
      surefoot data block runs/quickstart --shard web/00003 --mode replace --reason "wrong encoding" --dry-run
      surefoot data block runs/quickstart --samples 1904:1920 --reason "loss spike"
      surefoot data block runs/quickstart --list --json
    """
    targets = _targets(document, file, shard, samples, step, wanted=not list_)
    if list_:
        _say_list(run_dir, json_output=json_output)
        return
    if not reason.strip() and not dry_run:
        raise ConfigError("why?", where="--reason", hint="the ledger keeps it: --reason TEXT")
    from surefoot.cli.blocking import Wish
    from surefoot.cli.ledgering import user_name

    by = user_name()
    wishes = [Wish(target, mode, from_sample=from_sample, reason=reason, by=by, evidence_step=evidence_step) for target in targets]
    answers = _ask(run_dir, wishes, data=data, dry_run=dry_run)
    if json_output:
        told = answers[0] if len(answers) == 1 else {"answers": answers}
        say(dumps({"schema_version": SCHEMA_VERSION, **told}))
        return
    for answer in answers:
        for line in _lines(answer):
            say(line)


def _targets(documents: list[str], file: str, shard: str, samples: str, step: int | None, *, wanted: bool) -> list[Target]:
    from surefoot.cli.blocking import Target, sample_range

    num_named = sum(map(bool, (documents, file, shard, samples))) + (step is not None)
    if num_named != int(wanted):
        what = "name one thing to leave out" if wanted else "--list takes nothing to leave out"
        hint = "--document (several, if you like), --file, --shard, --samples or --step"
        raise ConfigError(what, where="command line", hint=hint)
    if samples:
        sample_range(samples)
    return [Target(document=document) for document in documents] or [Target(file=file, shard=shard, samples=samples, step=step)]


def _ask(run_dir: Path, wishes: list[Wish], *, data: str, dry_run: bool) -> list[dict[str, Any]]:
    """All are resolved before the first is asked for."""
    from surefoot.cli.blocking import is_compared, resolve, scope_of, when_it_holds
    from surefoot.cli.run_data import open_run_data

    run = open_run_data(run_dir, data=data)
    entries = [resolve(run, wish) for wish in wishes]
    answers = []
    for entry in entries:
        compared, holds = is_compared(run, entry), when_it_holds(run, entry)
        told = {"block": entry.as_json(), **_scope_row(scope_of(run, entry)), "files_compared": compared}
        answers.append({**told, "next_sample": run.steps.newest[1], "holds": holds})
    return [_ledgered(run, entry, dry_run=dry_run) | answer for entry, answer in zip(entries, answers, strict=True)]


def _ledgered(run: RunData, entry: Block, *, dry_run: bool) -> dict[str, Any]:
    """Look and write are one: of several who ask for the same at once, the first writes."""
    from surefoot.cli.blocking import already_there
    from surefoot.cli.ledgering import tell, users_ledger
    from surefoot.core.events import Event
    from surefoot.observe.blocks import asked_fields, fold_blocks
    from surefoot.observe.ledger import read_ledger

    if dry_run:
        before = already_there(run, entry, run.blocklist)
        return {"asked": False, "dry_run": True, "before": before, "seq": before}
    ledger = users_ledger(run.run_dir)
    with ledger.alone():
        before = seq = already_there(run, entry, fold_blocks(read_ledger(ledger.path)))
        if before is None:
            fields = asked_fields(entry)
            seq = tell(run.run_dir, Event.BLOCK_ASKED, rule="data block", reason=entry.reason, fields=fields, ledger=ledger).seq
    return {"asked": before is None, "dry_run": False, "before": before, "seq": seq}


def _scope_row(scope: Scope) -> dict[str, Any]:
    told = asdict(scope)
    return {"documents": told["documents"], "tokens": told["tokens"], "shares": told["shares"]} | {
        "samples_to_come": told["to_come"],
        "samples_seen": told["seen"],
        "unreplaced": told["unreplaced"],
    }


def _lines(answer: Mapping[str, Any]) -> list[str]:
    wish = answer["block"]
    lines = [f"{wish['mode']:<8} {wish['kind']} {wish['name']}"]
    if wish["spans"]:
        shares = ", ".join(f"{100 * share:.3g}% of {name}" for name, share in answer["shares"].items())
        documents = f"{answer['documents']} document{'s' * (answer['documents'] != 1)}"
        lines.append(f"{'it is':<8} {documents}, {show_count(answer['tokens'])} tokens: {shares}")
    if not answer["files_compared"]:
        lines.append(f"{'files':<8} not compared with the manifest in full: it has no hashes of them, or they are too many")
    lines.append(f"{'samples':<8} {answer['samples_to_come']} to come hold it, {answer['samples_seen']} were seen")
    if answer["unreplaced"]:
        lines.append(f"{'reserve':<8} too small for up to {answer['unreplaced']} of them in an epoch: these are masked")
    if answer["before"] is not None:
        return [*lines, f"ledger entry {answer['before']} asks for the same: nothing was added"]
    if answer["dry_run"]:
        return [*lines, f"nothing was asked for; else {answer['holds']}"]
    return [*lines, f"{'asked':<8} ledger entry {answer['seq']}: {answer['holds']}"]


def _say_list(run_dir: Path, *, json_output: bool) -> None:
    from surefoot.observe.blocks import fold_blocks
    from surefoot.observe.ledger import LEDGER_NAME, read_ledger
    from surefoot.observe.run_dir import require_run

    require_run(run_dir)
    log = fold_blocks(read_ledger(run_dir / LEDGER_NAME))
    rows = [{"state": "taken", "seq": one.seq, "time_utc": one.time_utc, "asked": one.asked, **one.block.as_json()} for one in log.taken]
    rows += [{**one.block, "state": "asked", "seq": one.seq, "time_utc": one.time_utc, "asked": one.seq} for one in log.open]
    refused = [asdict(one) for one in log.refused]
    if json_output:
        told = {"count": log.count, "head": log.head, "blocks": rows, "refused": refused}
        say(dumps({"schema_version": SCHEMA_VERSION, **told}))
        return
    for row in rows:
        since = f"from sample {row['effective_sample']}" if row["state"] == "taken" else "no answer yet"
        why = f" ({row['reason']})" if row.get("reason") else ""
        say(f"{row['seq']:>6} {row['state']:<6} {row.get('mode', '?'):<8} {row.get('kind', '?')} {row.get('name', '?')}, {since}{why}")
    for one in log.refused:
        say(f"{one.seq:>6} refused, asked in entry {one.asked}: {one.reason}")
    say(f"{log.count} entries taken, head {log.head[:16]}" if log.count else "nothing is left out")
