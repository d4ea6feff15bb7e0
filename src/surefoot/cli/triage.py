"""`surefoot triage`: what is wrong with a run, whom to suspect, and the command to type next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps

SCHEMA_VERSION: Final = 1
MAX_SYMPTOMS: Final = 20

Answer = dict[str, Any]


def triage(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder. Nothing in it is changed; it may be live.")],
    step: Annotated[int | None, typer.Option("--step", min=1, metavar="N", help="Only what concerns this step.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Also run the replay that the gravest open question asks for.")] = False,
    incident: Annotated[str, typer.Option("--incident", metavar="ID", help="What is known of one incident, as e57.")] = "",
    vendor: Annotated[int | None, typer.Option("--vendor", min=0, metavar="RANK", help="Write the file for the machine's vendor.")] = None,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Where the run's prepared data lies now.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is wrong with a run: symptoms with their onset, checks from data over code to the cluster, and the next command for each.

    Ends with 0 with and without symptoms. Works on live, stopped, halted and damaged runs.

    \b
    Examples:
      surefoot triage runs/quickstart
      surefoot triage runs/quickstart --step 120 --json
      surefoot triage runs/quickstart --replay
      surefoot triage runs/quickstart --incident e57
      surefoot triage runs/quickstart --vendor 3
    """
    from surefoot.observe.run_dir import require_run

    require_run(run_dir)
    if incident:
        answer, lines = _incident(run_dir, incident, data=data)
    elif vendor is not None:
        answer, lines = _vendor(run_dir, vendor)
    else:
        answer = _symptoms(run_dir, step=step, with_replay=replay, data=data)
        lines = list(_page(answer))
    for line in [dumps({"schema_version": SCHEMA_VERSION, **answer})] if json_output else lines:
        say(line)


def _symptoms(run_dir: Path, *, step: int | None, with_replay: bool, data: str) -> Answer:
    from surefoot.cli.triage_facts import furthest_step, gather, ledger_fault, read_entries
    from surefoot.heal.triage import Signs, read_signs
    from surefoot.heal.triage_checks import symptom

    entries, notes = read_entries(run_dir)
    if step is not None and step > (furthest := furthest_step(run_dir, entries)):
        raise ConfigError(
            f"the run has not reached step {step}", where="--step", hint=f"it reached step {furthest}", got=step, limit=furthest
        )
    told = read_signs(entries, step=step)
    fault = "" if notes else ledger_fault(run_dir)
    if fault:
        last_step = entries[-1].step if entries else 0
        told = replace(told, signs=(Signs("ledger-cut", last_step, last_step), *told.signs))
    shown = replace(told, signs=told.signs[:MAX_SYMPTOMS])
    facts, more = gather(run_dir, shown, entries, data=data)
    facts = replace(facts, ledger_fault=fault)
    found = [symptom(signs, told, facts) for signs in shown.signs]
    if with_replay:
        from surefoot.cli.triage_replay import replay_for

        number, replayed = replay_for(found, run_dir)
        if number is not None:
            found[number] = symptom(shown.signs[number], told, replace(facts, replayed=replayed))
        else:
            more.append("no symptom asks for a replay")
    if len(told.signs) > MAX_SYMPTOMS:
        more.append(f"{len(told.signs) - MAX_SYMPTOMS} more symptoms; --step N shows those of a step")
    return {
        "run": str(run_dir),
        "step": facts.step,
        "num_symptoms": len(told.signs),
        "symptoms": [one.as_json() for one in found],
        "notes": [*notes, *more],
    }


def _incident(run_dir: Path, incident: str, *, data: str) -> tuple[Answer, list[str]]:
    from surefoot.cli.triage_facts import documents_of_incident, read_entries
    from surefoot.heal.incident import episode_ids, incident_of

    entries, _ = read_entries(run_dir)
    found = incident_of(entries, incident)
    if found is None:
        known = episode_ids(entries)
        hint = f"there are {', '.join(known[-8:])}" if known else "this run has none"
        raise ConfigError(f"there is no incident {incident}", where="--incident", hint=hint)
    found = documents_of_incident(run_dir, found, data=data)
    first, last = found["steps"]
    lines = [
        f"{incident}, {found['state']}, opened {found['opened_utc']}: {found['what']}",
        f"  cause      {found['cause'] or 'not known yet'}{': ' + found['why'] if found['why'] else ''}",
        f"  steps      {first} to {last}; samples {found['samples'] or 'not known'}; ranks {found['ranks'] or 'none named'}",
        *(f"  done       step {one['step']}: {one['event']} {one['reason']}" for one in found["actions"]),
        *(f"  document   {str(one.get('hash', ''))[:12]}  {one.get('file')}:{one.get('record')}" for one in found["documents"] or ()),
        f"  documents  {found['documents_note']}",
        f"next: surefoot data report {run_dir} --window {last}",
    ]
    return {"run": str(run_dir), "incident": found}, lines


def _vendor(run_dir: Path, rank: int) -> tuple[Answer, list[str]]:
    from surefoot.cli.triage_facts import num_ranks_ever, read_entries
    from surefoot.cli.vendor_file import write_vendor_file

    if rank >= (num_ranks := num_ranks_ever(run_dir, read_entries(run_dir)[0])):
        hint = f"it has ranks 0 to {num_ranks - 1}"
        raise ConfigError(f"the run has no rank {rank}", where="--vendor", hint=hint, got=rank, limit=num_ranks - 1)
    file, paths = write_vendor_file(run_dir, rank)
    lines = [f"written: {', '.join(map(str, paths))}", *(f"  missing: {words}" for words in file.missing)]
    return {"run": str(run_dir), "vendor": file.as_json(), "files": [str(path) for path in paths]}, lines


def _page(answer: Mapping[str, Any]) -> list[str]:
    count = answer["num_symptoms"]
    words = "no symptoms" if count == 0 else "1 symptom" if count == 1 else f"{count} symptoms"
    lines = [f"{answer['run']}, step {answer['step']}: {words}", *(f"note: {note}" for note in answer["notes"])]
    for number, one in enumerate(answer["symptoms"], start=1):
        lines += ["", f"{number}. {one['name']} from step {one['onset_step']} on; suspect: {one['suspect']} ({one['reason']})"]
        lines += [f"     {check['name']:<18} {check['outcome']:<8} {check['detail']}" for check in one["checks"]]
        for document in one["documents"][:3]:
            why = "; ".join(map(str, document.get("reasons", ())[:3]))
            lines.append(f"     document {str(document.get('hash', ''))[:12]}  {document.get('file')}:{document.get('record')}  {why}")
        lines.append(f"   next: {one['action']}")
    return lines
