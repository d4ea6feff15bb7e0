"""The answer of `surefoot data report` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from surefoot.core.units import show_bytes, show_count
from surefoot.data.quality.page import blocked_words

Answer = Mapping[str, Any]

NUM_SHOWN: Final = 6


def lines(answer: Answer) -> Iterator[str]:
    """Totals, one block per source, what the run makes of them, and the window last."""
    totals = answer["totals"]
    size = f"{totals['documents']:,} documents, {show_count(totals['tokens'])} tokens, {show_bytes(totals['text_bytes'])} of text"
    yield f"{answer['path']}  {size}; {answer['looked_at']:,} documents looked at"
    for name, source in answer["sources"].items():
        yield from _source_lines(name, source)
    if mix := answer.get("mix"):
        for stage in mix["stages"]:
            shares = ", ".join(f"{name} {stage['planned'][name]:.1%} got {share:.1%}" for name, share in stage["realised"].items())
            yield f"mixture of samples {stage['first_sample']:,} to {stage['end_sample']:,}: planned {shares}"
    if (blocks := answer.get("blocks")) and blocks["entries"]:
        told = f"{blocks['masked_tokens']:,} tokens masked, {blocks['replaced_tokens']:,} replaced, {blocks['skipped_samples']:,} samples"
        yield f"blocklist  {blocks['entries']} entries: {told} skipped"
    ahead = answer.get("look_ahead", {"missed_samples": 0, "findings": ()})
    if ahead["missed_samples"]:
        yield f"look-ahead {ahead['missed_samples']:,} samples were not looked at: the run was there first"
    for finding in ahead["findings"][:NUM_SHOWN]:
        yield f"to come    step {finding['step']}: {finding['rule']} {finding['score']:.4g} in {finding['file']} {finding['hash'][:12]}"
    if more := len(ahead["findings"][NUM_SHOWN:]):
        yield f"           and {more} more: --json or --html has them"
    if window := answer.get("window"):
        yield from _window_lines(window)


def _source_lines(name: str, source: Answer) -> Iterator[str]:
    lengths, checks, copies, drop = (source[key] for key in ("lengths", "checks", "near_copies", "would_drop"))
    yield ""
    yield f"{name}  {source['documents']:,} documents, {show_count(source['tokens'])} tokens, {show_bytes(source['text_bytes'])}"
    percentiles = ", ".join(
        f"{percent}% {value:,}" for percent, value in lengths["percentiles"].items() if percent in ("1", "50", "99", "100")
    )
    yield f"  lengths    {percentiles} tokens"
    left_out = ", ".join(f"{count:,} {what}" for what, count in source["rejected"].items())
    yield f"  left out   {source['duplicates']:,} copies, {source['empty']:,} empty, {source['bad_records']:,} bad" + (
        f" ({left_out})" if left_out else ""
    )
    yield f"  copies     {copies['copies']:,} of {copies['compared']:,} documents are at least {copies['similarity']:.0%} like another"
    outside, open_ended = checks["tokens_outside_vocabulary"], checks["documents_without_eos"]
    broken = checks["documents_with_replacement_characters"]
    yield f"  tokens     {outside} outside the vocabulary, {open_ended} documents without EOS, {broken} with U+FFFD"
    yield f"  rules      would drop {drop['share_of_documents']:.3%} of documents, {drop['share_of_tokens']:.3%} of tokens"
    drops = [rule for rule, hits in source["rules"].items() if hits["action"] == "drop"]
    flags = [rule for rule in source["rules"] if rule not in drops]
    for rule in [*drops, *flags[:NUM_SHOWN]]:
        hits = source["rules"][rule]
        worst = hits["examples"][0]
        where = f"{worst['file']}:{worst['record']} {worst['hash'][:12]}"
        yield f"    {rule:<26} {hits['action']:<5} {hits['share']:>8.3%}  furthest {worst['score']:.4g} in {where}"
    for far in source["stretches"]["far_out"][:NUM_SHOWN]:
        shares = f"in {far['share']:.1%}, elsewhere {far['share_elsewhere']:.1%} (z {far['z']:.1f})"
        yield f"    unlike the rest: {source['stretches']['kind']} {far['stretch']} breaks {far['rule']} {shares}"
    for odd in source["reject_rates"]["far_out"][:NUM_SHOWN]:
        yield f"    unlike the rest: of {odd['part']} {odd['rate']:.1%} was left out (z {odd['z']:.1f})"
    for passage in source["shared_passages"][:2]:
        yield f"    in {passage['documents']} documents: {passage['text']}"


def _window_lines(window: Answer) -> Iterator[str]:
    yield ""
    looked_at = window["looked_at"]
    yield (
        f"steps {window['first_step']} to {window['step']}: samples {window['first_sample']:,} to {window['last_sample']:,}, "
        f"{looked_at['documents']:,} documents"
    )
    ids = window["reserved_ids"]
    yield f"  copies {window['copies']['documents']}, reserved ids {ids['tokens']}, outside the vocabulary {ids['outside_vocabulary']}"
    for name, share in window["sources"].items():
        yield f"  {name:<12} {share['share']:.1%} of samples, planned {share['usual']:.1%} (z {share['z']:.1f})"
    for rule, one in window["rules"].items():
        if one["far_out"]:
            yield f"  {rule} broken by {one['share']:.1%}, usually {one['usual']:.1%} (z {one['z']:.1f})"
    for token in window["tokens"][:NUM_SHOWN]:
        yield f"  token {token['id']} {token['text']!r}: {token['count']} times, expected {token['expected']:.1f} (z {token['z']:.1f})"
    yield "  documents that stand out:"
    for one in window["documents"][:NUM_SHOWN]:
        if one["reasons"]:
            where = f"{one['hash'][:12]} {one['file']}:{one['record']} at {one['offset']}"
            blocked = blocked_words(one)
            yield f"    {one['score']:>5.1f}  {where}{f' ({blocked})' if blocked else ''}: {one['reasons'][0]}"
            yield f"           {one['passage']}"
