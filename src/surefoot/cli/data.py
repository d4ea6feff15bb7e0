"""`surefoot data prepare`: text in, shards out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surefoot.cli.console import say
from surefoot.cli.data_block import block
from surefoot.cli.data_locate import locate
from surefoot.core.sections import SourceSection
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_bytes, show_count

if TYPE_CHECKING:
    from surefoot.data.manifest import Manifest, SourceEntry

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command("locate", short_help="Which documents a step trains on, and when a document is.")(locate)
app.command("block", short_help="Ask a run to leave something out.")(block)


@app.callback()
def data() -> None:
    """Prepare text for training."""


@app.command()
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT", help="JSONL or text files, folders, patterns in quotes, or builtin:python-stdlib.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make. It appears whole or not at all.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="bpe:SIZE|bytes|FILE", help="Train a byte-level BPE, use bytes, or a tokenizer.json.")
    ] = "bpe:8192",
    name: Annotated[str, typer.Option("--name", help="Names the source, as in [[data.sources]].")] = "text",
    heldout_fraction: Annotated[float, typer.Option("--heldout-fraction", help="Share of documents kept out of training.")] = 0.01,
    text_field: Annotated[str, typer.Option("--text-field", help="The field of a JSONL record that holds the text.")] = "text",
    on_bad_record: Annotated[
        Literal["fail", "skip"], typer.Option("--on-bad-record", help="Stop at a record that is no document, or leave it out and list it.")
    ] = "fail",
    force: Annotated[bool, typer.Option("--force", help="Replace other data that was prepared there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Turn text into a folder of checked token shards.

    One text file is one document, one line of a .jsonl file is one document. Exact copies and empty documents are dropped and counted.
    The same input gives the same bytes.

    \b
    Examples:
      surefoot data prepare corpus/ --out data/mine
      surefoot data prepare 'notes/**/*.md' --out data/notes
      surefoot data prepare a.jsonl b.jsonl --out data/mine --tokenizer tokenizer.json --on-bad-record skip
      surefoot data prepare builtin:python-stdlib --out data/stdlib --json
    """
    from surefoot.data.prepare import prepare as prepare_data

    source = SourceSection(name=name, files=tuple(inputs))
    manifest = prepare_data(
        [source],
        out=out,
        tokenizer=tokenizer,
        heldout_fraction=heldout_fraction,
        on_bad_record=on_bad_record,
        text_field=text_field,
        force=force,
        progress=lambda progress: say(str(progress), err=True),
    )
    if as_json:
        say(dumps(_as_json(manifest, shown_as=str(out))))
        return
    for source_name, entry in manifest.sources.items():
        _say_source(source_name, entry, shown_as=str(out))
    say(f"tokenizer     {manifest.tokenizer.recipe}, {manifest.tokenizer.vocab_size} ids")
    say(f"manifest      {manifest.sha256}")
    say("use it        in the config, paths being relative to it:")
    say(f"              [data] path = {dumps(str(out))}, tokenizer = {dumps(tokenizer)}, heldout_fraction = {heldout_fraction}")
    say(f"              no [[data.sources]], or one with name = {dumps(name)}")


def _say_source(name: str, entry: SourceEntry, *, shown_as: str) -> None:
    for split_name, split in entry.splits.items():
        size = f"{split.docs} documents, {show_count(split.tokens)} tokens, {show_bytes(split.text_bytes)} of text"
        say(f"{f'{name}/{split_name}':<13} {size}")
    say(f"left out      {entry.duplicates} copies, {entry.empty} empty, {entry.bad_records} bad records")
    if entry.bad_records:
        say(f"              listed in {Path(shown_as, name, 'rejects.jsonl')}")


def _as_json(manifest: Manifest, *, shown_as: str) -> dict[str, object]:
    return {
        "schema_version": 1,
        "path": shown_as,
        "manifest_sha256": manifest.sha256,
        "tokenizer": manifest.tokenizer,
        "dtype": manifest.dtype,
        "heldout_fraction": manifest.heldout_fraction,
        "sources": {
            name: {
                "documents": sum(split.docs for split in entry.splits.values()),
                "duplicates": entry.duplicates,
                "empty": entry.empty,
                "bad_records": entry.bad_records,
                "splits": {
                    split: {"docs": totals.docs, "tokens": totals.tokens, "text_bytes": totals.text_bytes, "shards": len(totals.shards)}
                    for split, totals in entry.splits.items()
                },
            }
            for name, entry in manifest.sources.items()
        },
    }
