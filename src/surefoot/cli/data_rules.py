"""`surefoot data rules`: the quality rules that there are, rules proposed from bad documents, and the person who accepts them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.cli.run_data import RunData
    from surefoot.data.provenance import StoredDocument
    from surefoot.data.quality.propose import Measured, Proposal
    from surefoot.data.quality.siblings import Sibling
    from surefoot.data.quality.stored import Shelf

SCHEMA_VERSION: Final = 1
_NUM_SHOWN: Final = 10
_MAX_SIBLINGS: Final = 100
_MAX_BELOW: Final = 100

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def rules() -> None:
    """The quality rules, and new ones from documents that were bad.

    \b
    Examples:
      surefoot data rules list
      surefoot data rules propose runs/mine --out rules.toml
      surefoot data rules accept rules.toml --rule phrases-of-blocked
    """


@app.command("list")
def list_rules(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A rules file, to be shown beside the catalogue.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show every rule with what it measures, its threshold and where that is from.

    Examples: surefoot data rules list | surefoot data rules list rules.toml --json
    """
    from surefoot.data.quality.rules import CATALOGUE
    from surefoot.data.quality.rules_file import FiledRule, read_rules

    filed = {one.rule.id: one for one in (read_rules(file) if file else ())}
    shown = [*(filed.pop(rule.id, FiledRule(rule, accepted=True)) for rule in CATALOGUE), *filed.values()]
    if json_output:
        told = [{**_plain(one.rule), "accepted": one.accepted, "measured": dict(one.measured)} for one in shown]
        say(dumps({"schema_version": SCHEMA_VERSION, "rules": told}))
        return
    for one in shown:
        rule = one.rule
        kind = " natural language" if rule.natural_language else ""
        state = "" if one.accepted else "  not accepted"
        say(f"{rule.id:<26} {rule.action:<5} {rule.fires} {rule.threshold:<8g} {rule.anchor or rule.measure}{kind}{state}")


@app.command()
def propose(
    path: Annotated[Path, typer.Argument(metavar="RUN|PATH", help="The folder of a run, or a folder of prepared data.")],
    document: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="ID", help="A bad document, by its hash or SOURCE/NUMBER; repeat. Else those that are blocked."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the proposed rules go; nothing that is there is replaced.")
    ] = Path("rules.toml"),
    min_similarity: Annotated[
        float, typer.Option("--min-similarity", min=0.0, max=1.0, help="From which on a document is a sibling.")
    ] = 0.3,
    clean: Annotated[
        int, typer.Option("--clean", min=100, help="Clean documents to choose by and to measure on, over all sources.")
    ] = 10_000,
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where the run's prepared data lies now.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List the siblings of bad documents, and write rules that catch them and hardly any clean document.

    Each rule is measured on clean documents that it was not made with; one that rejects more than 0.1% of them is refused. Nothing is used
    before somebody accepts it.

    \b
    Examples:
      surefoot data rules propose runs/mine
      surefoot data rules propose data/mine --document 3f2a9c01d4 --out rules.toml --json
    """
    from surefoot.cli.run_data import is_prepared, open_run_data
    from surefoot.data.quality.propose import propose as propose_rules
    from surefoot.data.quality.rules_file import write_rules
    from surefoot.data.quality.stored import Shelf

    if out.exists():
        raise ConfigError("it is there already", where=str(out), hint="name another file by --out, or move it away")
    run = None if is_prepared(path) else open_run_data(path, data=data)
    with Shelf(run.path if run else path, manifest=run.manifest if run else None) as shelf:
        given = _given(shelf, run, ids=document or [], where=str(path))
        found, below = _siblings(shelf, given, min_similarity=min_similarity)
        left_out = {one.hash for one in given} | {sibling.document.hash for sibling in found}
        num_documents = sum(shelf.num_documents(source) for source in shelf.manifest.sources)
        proposals = propose_rules(
            [shelf.read(one).text for one in given],
            siblings=[shelf.read(sibling.document).text for sibling in found],
            chosen_by=_clean_texts(shelf, limit=clean // 2, part=0, without=left_out),
            measured_on=_clean_texts(shelf, limit=clean // 2, part=1, without=left_out),
        )
    proposed = [one for one in proposals if not one.refused]
    if proposed:
        about = [f"proposed from {', '.join(one.hash[:12] for one in given)}", "`surefoot data rules accept FILE` makes them hold"]
        write_rules(out, [one.as_filed() for one in proposed], about=about)
    if json_output:
        say(dumps(_answer(given, found, below, proposals, out=str(out) if proposed else None)))
        return
    for line in (*_sibling_lines(given, found, below), *_rule_lines(proposals, num_documents=num_documents)):
        say(line)
    accepting = f"written   {out}; `surefoot data rules accept {out}` makes them hold"
    say(accepting if proposed else "no rule is proposed: none tells these documents from clean ones")


@app.command()
def accept(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rules file.")],
    rule: Annotated[list[str] | None, typer.Option("--rule", metavar="ID", help="Only this one; repeat. Else all of them.")] = None,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who accepts; the user where nothing is said.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Make the rules of a file hold: for `data prepare --rules`, for the look-ahead, for the report. The catalogue holds beside them.

    Examples: surefoot data rules accept rules.toml | surefoot data rules accept rules.toml --rule phrases-of-blocked --by ada
    """
    from surefoot.cli.ledgering import user_name
    from surefoot.data.quality.rules_file import accept as accept_rules
    from surefoot.data.quality.rules_file import read_rules, write_rules

    utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    filed = accept_rules(read_rules(file), ids=rule or (), by=by or user_name(), utc=utc, where=str(file))
    write_rules(file, filed)
    ids = [one.rule.id for one in filed if one.accepted]
    if json_output:
        say(dumps({"schema_version": SCHEMA_VERSION, "file": str(file), "accepted": ids}))
        return
    say(f"accepted: {', '.join(ids)}")
    say(f"`surefoot data prepare ... --rules {file}` leaves out what breaks them, or a rule of the catalogue that drops")


def _given(shelf: Shelf, run: RunData | None, *, ids: Sequence[str], where: str) -> list[StoredDocument]:
    """One place of each of `ids`, or of the documents that the run has blocked or was asked to."""
    from surefoot.cli.run_data import found_in
    from surefoot.data.quality.stored import is_padding

    if not ids and run is not None:
        asked = [str(wish.block.get("name", "")) for wish in run.blocklist.open if wish.block.get("kind") == "document"]
        ids = [*(block.name for block in run.blocklist.blocks if block.kind == "document"), *asked]
    if not ids:
        what = "no document is blocked" if run is not None else "no document is given"
        raise ConfigError(
            what, where=where, hint="--document ID names a bad one; `surefoot data locate` and `data report --window` find it"
        )
    given = [(found_in(run, shelf.provenance, name) if run is not None else shelf.provenance.find(name))[0] for name in dict.fromkeys(ids)]
    if padding := next((one for one in given if is_padding(one)), None):
        what = f"{padding.id} is what fills shard {padding.source}/{padding.shard} up, and no document"
        raise ConfigError(what, where="--document", hint="`surefoot data locate` and `data report --window` name documents")
    return given


def _siblings(shelf: Shelf, given: Sequence[StoredDocument], *, min_similarity: float) -> tuple[list[Sibling], list[Sibling]]:
    """(at least so much like one of `given`, a little like it), those nearest first."""
    from surefoot.data.quality.minhash import signatures
    from surefoot.data.quality.siblings import LEAST_SIMILARITY, siblings

    wanted = signatures([shelf.tokens(one.span) for one in given])
    near = siblings(
        shelf,
        wanted,
        min_similarity=min(min_similarity, LEAST_SIMILARITY),
        limit=_MAX_SIBLINGS + _MAX_BELOW,
        without=[one.hash for one in given],
    )
    found = [one for one in near if one.similarity >= min_similarity][:_MAX_SIBLINGS]
    return found, [one for one in near if one.similarity < min_similarity]


def _clean_texts(shelf: Shelf, *, limit: int, part: int, without: set[str]) -> Iterator[str]:
    """Every other document of a sample of all sources, each source by its share of the documents: the odd ones or the even ones."""
    total = sum(shelf.num_documents(source) for source in shelf.manifest.sources)
    for source in shelf.manifest.sources:
        wanted = max(2, 2 * limit * shelf.num_documents(source) // max(1, total))
        for place, stored in enumerate(shelf.sample(source, limit=wanted, purpose="clean")):
            if place % 2 == part and stored.document.hash not in without:
                yield stored.text


def _answer(
    given: Sequence[StoredDocument], found: Sequence[Sibling], below: Sequence[Sibling], proposals: Sequence[Proposal], *, out: str | None
) -> Mapping[str, Any]:
    from surefoot.data.quality.stored import told

    return {
        "schema_version": SCHEMA_VERSION,
        "given": [told(one) for one in given],
        "siblings": [{**told(sibling.document), "similarity": sibling.similarity} for sibling in found],
        "below": [{**told(sibling.document), "similarity": sibling.similarity} for sibling in below],
        "proposals": [_told_proposal(one) for one in proposals if not one.refused],
        "refused": [{**_told_proposal(one), "why": one.refused} for one in proposals if one.refused],
        "file": out,
    }


def _told_proposal(one: Proposal) -> dict[str, Any]:
    return {**_plain(one.rule), "measured": one.measured.as_json()}


def _plain(rule: Any) -> dict[str, Any]:
    told: dict[str, Any] = {name: getattr(rule, name) for name in rule.__slots__}
    return told


def _sibling_lines(given: Sequence[StoredDocument], found: Sequence[Sibling], below: Sequence[Sibling]) -> Iterator[str]:
    for one in given:
        yield f"given     {one.hash[:12]}  {one.id} {one.file}:{one.record}"
    yield f"siblings  {len(found)} documents are like them"
    yield from map(_sibling_line, found[:_NUM_SHOWN])
    if below:
        least, most = below[-1].similarity, below[0].similarity
        lower = math.floor(least * 100.0) / 100.0
        count = f"{len(below)} documents are" if len(below) < _MAX_BELOW else f"at least {len(below)} documents are"
        yield f"below     {count} {least:.0%} to {most:.0%} like them, and count as clean: --min-similarity {lower:g} makes them siblings"
        yield from map(_sibling_line, below[:_NUM_SHOWN])


def _sibling_line(sibling: Sibling) -> str:
    stored = sibling.document
    return f"  {sibling.similarity:>4.0%}  {stored.hash[:12]}  {stored.id} {stored.file}:{stored.record}"


def _rule_lines(proposals: Sequence[Proposal], *, num_documents: int) -> Iterator[str]:
    for proposal in proposals:
        rule, measured = proposal.rule, proposal.measured
        verdict = "refused" if proposal.refused else "proposed"
        caught = f"{measured.given} of {measured.of_given} given, {measured.siblings} of {measured.of_siblings} siblings"
        clean = f"{measured.clean} of {measured.of_clean} clean documents (at most {measured.clean_at_most:.2%}, at 95%)"
        yield f"{verdict:<9} {rule.id}: {rule.measure} {rule.fires} {rule.threshold:.4g}"
        yield f"          catches {caught}, {clean}"
        if proposal.refused:
            yield f"          {proposal.refused}"
    yield from _promise([one.measured for one in proposals if not one.refused], num_documents=num_documents)


def _promise(proposed: Sequence[Measured], *, num_documents: int) -> Iterator[str]:
    """What it takes to promise the share that is allowed, where that is not promised of all."""
    from surefoot.data.quality.propose import MAX_CLEAN_SHARE, clean_wanted

    if all(measured.clean_at_most <= MAX_CLEAN_SHARE for measured in proposed):
        return
    wanted = 2 * clean_wanted(max(measured.clean for measured in proposed))  # one half is to choose by
    what = f"promise   at most {MAX_CLEAN_SHARE:.1%} takes {wanted:,} clean documents"
    yield f"{what}: --clean {wanted}" if num_documents >= wanted else f"{what}, and there are {num_documents:,} documents in all"
