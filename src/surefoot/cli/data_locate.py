"""`surefoot data locate`: from a step to the documents it trains on, and from a document to every step that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps

SCHEMA_VERSION = 1
_SHOWN_DIGITS: Final = 12
_MAX_FILE: Final = 36

Row = dict[str, Any]


def locate(
    path: Annotated[str, typer.Argument(metavar="RUN|PATH", help="The run folder; with --document also a folder or URL of prepared data.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="A training step, past or to come.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Only what this rank computes of it.")] = None,
    row: Annotated[int | None, typer.Option("--row", metavar="K", help="Only this row of the rank, counted over its micro-steps.")] = None,
    document: Annotated[
        str, typer.Option("--document", metavar="ID", help="8 digits or more of a document's hash, or SOURCE/NUMBER.")
    ] = "",
    excerpt: Annotated[bool, typer.Option("--excerpt", help="The beginning of the text at each place too.")] = False,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Where the run's prepared data lies now, or lay at that step.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which documents a step trains on, or when a document is trained on. Past and future steps alike; a live run is not disturbed.

    \b
    Examples:
      surefoot data locate runs/quickstart --step 120 --excerpt
      surefoot data locate runs/quickstart --step 120 --rank 0 --row 3 --json
      surefoot data locate runs/quickstart --document 3f2a9c01d4
      surefoot data locate data/mine --document web/1204
    """
    if (step is None) == (not document):
        raise ConfigError("name one step or one document", where="command line", hint="--step N, or --document ID")
    if step is None and (rank is not None or row is not None):
        raise ConfigError("a rank and a row are of a step", where="command line", hint="name it with --step N")
    answer = _of_step(path, step, rank=rank, row=row, data=data) if step is not None else _of_document(path, document, data=data)
    place = answer.pop("path")
    if excerpt:
        from surefoot.cli.locating import add_excerpts

        add_excerpts(answer["hits"], place)
    if json_output:
        say(dumps({"schema_version": SCHEMA_VERSION, **answer}))
        return
    for line in _lines(answer):
        say(line)


def _of_step(path: str, step: int, *, rank: int | None, row: int | None, data: str) -> Row:
    from surefoot.cli.locating import rows_of_step
    from surefoot.cli.run_data import is_prepared, open_run_data

    if is_prepared(path):
        raise ConfigError("prepared data has no steps", where=path, hint="give the folder of a run, or --document ID")
    run = open_run_data(Path(path), data=data, may_be_past=True)
    taken, rows = rows_of_step(run, step, rank=rank, row=row)
    told = {"step": step, "seen": taken.seen, "attempt": taken.attempt}
    told |= {"first_sample": int(taken.samples[0]), "num_samples": len(taken.samples)}
    return {**told, "hits": rows, "path": run.path}


def _of_document(path: str, document: str, *, data: str) -> Row:
    from surefoot.cli.locating import rows_of_document, rows_of_folder, stored_row
    from surefoot.cli.run_data import is_prepared, open_run_data

    if is_prepared(path):
        place: str | Path = path
        found, rows = rows_of_folder(path, document)
    else:
        run = open_run_data(Path(path), data=data)
        place = run.path
        found, rows = rows_of_document(run, document)
    return {"documents": [stored_row(stored) for stored in found], "hits": rows, "path": place}


def _lines(answer: Mapping[str, Any]) -> list[str]:
    rows = answer["hits"]
    if "step" in answer:
        seen = f"seen by attempt {answer['attempt']}" if answer["seen"] else "still to come"
        first, count = answer["first_sample"], answer["num_samples"]
        head = [f"step {answer['step']}, {seen}: {count} samples from {first} on"]
    else:
        head = [
            f"document {one['hash']} is {one['document']}: {one['file']} record {one['record']}, {one['byte_length']} bytes at "
            f"{one['offset']}; tokens {one['tokens'][0]}:{one['tokens'][1]} of shard {one['shard']}"
            for one in answer["documents"]
        ]
    if any(row["step"] is None for row in rows):
        return [*head, *(f"  in the {row['split']} split{_excerpt(row)}" for row in rows)]
    if not rows:
        return [*head, "no step of this run takes it"]
    width = max(len("document"), *(len(row["document"]) for row in rows))
    title = f"{'step':>8} {'rank':>5} {'row':>5}  {'span':<13} {'document':<{width}}  {'hash':<{_SHOWN_DIGITS}}  file, record, bytes"
    return [*head, title, *(_line(row, width=width) for row in rows)]


def _line(row: Row, *, width: int) -> str:
    span = f"{row['span'][0]}:{row['span'][1]}"
    when = f"{row['step']:>8} {row['rank']:>5} {row['row']:>5}  {span:<13}"
    where = f"{_short(row['file'])} record {row['record']}, {row['byte_length']} bytes at {row['offset']}"
    marks = "".join(f"  {mark}" for mark, is_set in (("to come", not row["seen"]), ("masked", row["masked"])) if is_set)
    return f"{when} {row['document']:<{width}}  {row['hash'][:_SHOWN_DIGITS]}  {where}{marks}{_excerpt(row)}"


def _excerpt(row: Row) -> str:
    return f"\n{'':>22}{row['excerpt']}" if "excerpt" in row else ""


def _short(file: str) -> str:
    return file if len(file) <= _MAX_FILE else f"...{file[-_MAX_FILE:]}"
