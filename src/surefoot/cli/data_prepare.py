"""`surefoot data prepare`: text in, shards out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.sections import SourceSection
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_bytes, show_count

if TYPE_CHECKING:
    from surefoot.data.manifest import Manifest, SourceEntry
    from surefoot.data.quality.rules import RuleSet

_MAX_RECORD_BYTES = 64 << 20


def prepare(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make. It appears whole or not at all.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="JSONL, text or Parquet, folders, patterns in quotes, or builtin:python-stdlib."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME=INPUT[,INPUT]", help="Instead of INPUT, once or more: several sources in one folder."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="bpe:SIZE|bytes|FILE", help="Train a byte-level BPE, use bytes, or a tokenizer.json.")
    ] = "bpe:8192",
    name: Annotated[str, typer.Option("--name", help="Names the source of INPUT, as in [[data.sources]].")] = "text",
    heldout_fraction: Annotated[float, typer.Option("--heldout-fraction", help="Share of documents kept out of training.")] = 0.01,
    text_field: Annotated[str, typer.Option("--text-field", help="The field of JSONL, or the column of Parquet, with the text.")] = "text",
    on_bad_record: Annotated[
        Literal["fail", "skip"], typer.Option("--on-bad-record", help="Stop at a record that is no document, or leave it out and list it.")
    ] = "fail",
    max_record_bytes: Annotated[
        int, typer.Option("--max-record-bytes", metavar="N", help="A longer line, file or value is no document.")
    ] = _MAX_RECORD_BYTES,
    rules: Annotated[
        str, typer.Option("--rules", metavar="off|default|FILE", help="Drop documents that break a quality rule, and list them.")
    ] = "off",
    rules_off: Annotated[
        list[str] | None, typer.Option("--rules-off", metavar="SOURCE=RULE[,RULE]", help="Rules that do not suit a source.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes that share the work; 0: one per core.")] = 0,
    reprocess: Annotated[
        str, typer.Option("--reprocess", metavar="SOURCE/SHARD", help="Make one shard of DIR anew from INPUT; no other sample moves.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace other data that was prepared there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Turn text into a folder of checked token shards.

    One text file is one document, and so is a line of JSONL and a row of Parquet; text and JSONL may be packed, .gz or .zst. Exact copies
    and empty documents are dropped and counted. The same input gives the same bytes, and after a kill the same command goes on.

    \b
    Examples:
      surefoot data prepare corpus/ --out data/mine
      surefoot data prepare 'notes/**/*.md' --out data/notes
      surefoot data prepare a.jsonl b.jsonl.zst --out data/mine --tokenizer tokenizer.json --on-bad-record skip
      surefoot data prepare --source web='web/*.parquet' --source code=src/,lib/ --out data/mixed --rules default --rules-off code=byte-run
      surefoot data prepare mended.jsonl --out data/mixed --reprocess web/00012
      surefoot data prepare builtin:python-stdlib --out data/stdlib --json
    """
    settings: dict[str, Any] = {
        "on_bad_record": on_bad_record,
        "text_field": text_field,
        "rules": _rules(rules),
        "max_record_bytes": max_record_bytes,
        "workers": workers,
        "progress": lambda progress: say(str(progress), err=True),
    }
    if reprocess:
        from surefoot.data.reprocess import reprocess as reprocess_shard

        manifest = reprocess_shard(out, shard=reprocess, inputs=inputs or [], **settings)
    else:
        from surefoot.data.prepare import prepare as prepare_data

        sections = _without(rules_off or (), rules=settings["rules"], sections=_sections(inputs or (), named=source or (), name=name))
        settings |= {"tokenizer": tokenizer, "heldout_fraction": heldout_fraction, "force": force}
        manifest = prepare_data(sections, out=out, **settings)
    if as_json:
        say(dumps(_as_json(manifest, shown_as=str(out))))
    else:
        _say(manifest, shown_as=str(out), tokenizer=tokenizer if not reprocess else "")


def _sections(inputs: Sequence[str], *, named: Sequence[str], name: str) -> list[SourceSection]:
    if inputs and named:
        raise ConfigError("both INPUT and --source", where="command line", hint="give every input a source, or none")
    if not inputs and not named:
        raise ConfigError("no input", where="command line", hint="name files or folders, or --source NAME=INPUT")
    if inputs:
        return [SourceSection(name=name, files=tuple(inputs))]
    files: dict[str, list[str]] = {}
    for given in named:
        source, equals, of_source = given.partition("=")
        if not equals or not source or not of_source:
            raise ConfigError(f"{given!r} names no source", where="--source", hint="write NAME=INPUT or NAME=INPUT,INPUT")
        files.setdefault(source, []).extend(of_source.split(","))
    return [SourceSection(name=source, files=tuple(of_source)) for source, of_source in files.items()]


def _rules(spec: str) -> RuleSet | None:
    if spec == "off":
        return None
    from surefoot.data.quality.rules_file import rule_set

    return rule_set(None if spec == "default" else spec)


def _without(rules_off: Sequence[str], *, rules: RuleSet | None, sections: list[SourceSection]) -> list[SourceSection]:
    """The sections with what `--rules-off` names in them."""
    off: dict[str, tuple[str, ...]] = {}
    for given in rules_off:
        source, _, names = given.partition("=")
        if source not in {section.name for section in sections}:
            raise ConfigError(f"no source {source!r}", where="--rules-off", hint="write SOURCE=RULE or SOURCE=RULE,RULE")
        off[source] = (*off.get(source, ()), *names.split(","))
        if rules is None:
            raise ConfigError("no rules to switch off", where="--rules-off", hint="give --rules default or a rules file too")
        rules.refuse_unknown(off[source], where="--rules-off")
    return [replace(section, rules_off=off.get(section.name, ())) for section in sections]


def _say(manifest: Manifest, *, shown_as: str, tokenizer: str) -> None:
    for source, entry in manifest.sources.items():
        _say_source(source, entry, shown_as=shown_as)
    for replaced in manifest.replaced[-1:] if not tokenizer else ():
        documents = f"{replaced.documents_kept} documents kept, {replaced.documents_gone} gone, {replaced.documents_new} new"
        filled = f"{replaced.padded_tokens} tokens of padding, {replaced.cut_documents} documents cut"
        say(f"made anew     {replaced.source}/{replaced.shard} as {replaced.by}: {documents}; {filled}")
        say(f"parent        {manifest.parent}")
    say(f"tokenizer     {manifest.tokenizer.recipe}, {manifest.tokenizer.vocab_size} ids")
    say(f"manifest      {manifest.sha256}")
    if not tokenizer:
        say("use it        runs on the data before go on with `surefoot train RUN.toml --on-data-change map`")
        return
    say("use it        in the config, paths being relative to it:")
    fraction = manifest.heldout_fraction
    say(f"              [data] path = {dumps(shown_as)}, tokenizer = {dumps(tokenizer)}, heldout_fraction = {fraction}")
    names = " and ".join(f"name = {dumps(name)}" for name in manifest.sources)
    say(f"              no [[data.sources]], or {'one' if len(manifest.sources) == 1 else 'those'} with {names}")


def _say_source(name: str, entry: SourceEntry, *, shown_as: str) -> None:
    for split_name, split in entry.splits.items():
        size = f"{split.docs} documents, {show_count(split.tokens)} tokens, {show_bytes(split.text_bytes)} of text"
        say(f"{f'{name}/{split_name}':<13} {size}")
    num_rejected = sum(entry.rejected.values())
    by_rules = f", {num_rejected} by rules" if num_rejected else ""
    say(f"left out      {entry.duplicates} copies, {entry.empty} empty, {entry.bad_records} bad records{by_rules}")
    if entry.bad_records or num_rejected:
        say(f"              listed in {Path(shown_as, name, 'rejects.jsonl')}")
    for rule, count in entry.rejected.items():
        say(f"              {rule}: {count}")
    if entry.shared:
        say(f"also          {entry.shared} documents are in another source too; they stay in both")


def _as_json(manifest: Manifest, *, shown_as: str) -> dict[str, object]:
    return {
        "schema_version": 1,
        "path": shown_as,
        "manifest_sha256": manifest.sha256,
        "parent": manifest.parent,
        "tokenizer": manifest.tokenizer,
        "dtype": manifest.dtype,
        "heldout_fraction": manifest.heldout_fraction,
        "rules": manifest.rules,
        "replaced": manifest.replaced,
        "sources": {
            name: {
                "documents": sum(split.docs for split in entry.splits.values()),
                "duplicates": entry.duplicates,
                "empty": entry.empty,
                "bad_records": entry.bad_records,
                "rejected": entry.rejected,
                "shared": entry.shared,
                "splits": {
                    split: {"docs": totals.docs, "tokens": totals.tokens, "text_bytes": totals.text_bytes, "shards": len(totals.shards)}
                    for split, totals in entry.splits.items()
                },
            }
            for name, entry in manifest.sources.items()
        },
    }
