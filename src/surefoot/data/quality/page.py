"""The data report as one page that a browser opens without the network: tables, and plots with their library. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from surefoot.core.errors import ConfigError
from surefoot.core.units import show_bytes, show_count

Answer = Mapping[str, Any]

_NUM_FINDINGS: Final = 100
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; } h3 { margin-bottom: .3rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid #eaeef2; }
code { font-size: 13px; overflow-wrap: anywhere; } .far { color: #a40e26; font-weight: 600; } .quiet { color: #59636e; }
"""


def write_page(path: Path, answer: Answer) -> None:
    """Raises ConfigError where plotly is missing or `path` cannot be written."""
    plots = _plots(answer)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>data report</title><style>{_STYLE}</style>",
        f"<h1>Data report</h1><p class=quiet><code>{escape(answer['path'])}</code> manifest <code>{answer['manifest_sha256']}</code></p>",
        *_totals(answer),
        *_run(answer),
        *_look_ahead(answer.get("look_ahead")),
        *_window(answer.get("window")),
        plots,
        *(part for name, source in answer["sources"].items() for part in _source(name, source)),
    ]
    try:
        path.write_text("\n".join(parts) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path), hint="name a file in a folder that is there") from error


def _plots(answer: Answer) -> str:
    try:
        from plotly.graph_objects import Bar, Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ConfigError("a page needs plotly", where="--html", hint="pip install surefoot[plots]") from error
    titles = ("zlib ratio", "byte entropy, bits", "tokens of a document", "share of documents that break a rule, along the stream")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles)
    for name, source in answer["sources"].items():
        shown = {"name": name, "legendgroup": name}
        for column, histogram in enumerate(source["histograms"].values(), start=1):
            figure.add_trace(Bar(x=_bins(histogram), y=_in_shares(histogram), **shown, showlegend=column == 1), row=1, col=column)
        percentiles = source["lengths"]["percentiles"]
        line = {**shown, "showlegend": False}
        figure.add_trace(Scatter(x=[int(percent) for percent in percentiles], y=list(percentiles.values()), **line), row=2, col=1)
        rates = source["stretches"]["rates"]
        places = [(place + 0.5) / len(rates) for place in range(len(rates))]
        figure.add_trace(Scatter(x=places, y=[one["share_broken"] for one in rates], mode="lines+markers", **line), row=2, col=2)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_xaxes(title_text="percent of documents", row=2, col=1)
    figure.update_layout(template="plotly_white", height=720, barmode="group")
    return str(figure.to_html(full_html=False, include_plotlyjs=True))


def _bins(histogram: Answer) -> list[str]:
    edges = histogram["edges"]
    return [f"{low:g} to {high:g}" if high is not None else f"above {low:g}" for low, high in pairwise(edges)]


def _in_shares(histogram: Answer) -> list[float]:
    total = sum(histogram["counts"])
    return [count / max(1, total) for count in histogram["counts"]]


def _totals(answer: Answer) -> list[str]:
    rows = []
    for name, source in answer["sources"].items():
        checks, drop = source["checks"], source["would_drop"]
        rows.append(
            [
                name,
                f"{source['documents']:,}",
                show_count(source["tokens"]),
                show_bytes(source["text_bytes"]),
                f"{source['duplicates']:,}",
                f"{source['near_copies']['share']:.2%}",
                f"{drop['share_of_documents']:.3%}",
                f"{checks['tokens_outside_vocabulary']:,}",
                f"{checks['documents_without_eos']:,}",
                f"{checks['replacement_characters']:,}",
            ]
        )
    heads = "source, documents, tokens, text, copies dropped, near copies, rules would drop, ids outside, no EOS, U+FFFD".split(", ")
    note = f"Totals are exact; the rest is of {answer['looked_at']:,} documents spread over the sources."
    return ["<h2>What is here</h2>", f"<p class=quiet>{note}</p>", _table(heads, rows)]


def _run(answer: Answer) -> list[str]:
    parts: list[str] = []
    if mix := answer.get("mix"):
        rows = [
            [f"{stage['first_sample']:,} to {stage['end_sample']:,}", name, f"{stage['planned'][name]:.2%}", f"{realised:.2%}"]
            for stage in mix["stages"]
            for name, realised in stage["realised"].items()
        ]
        parts += ["<h2>Mixture</h2>", _table(["samples", "source", "planned", "realised"], rows)]
    if (blocks := answer.get("blocks")) and (blocks["entries"] or blocks["open"]):
        told = (
            f"{blocks['entries']} entries and {blocks['open']} wishes: {blocks['masked_tokens']:,} tokens masked, "
            f"{blocks['replaced_tokens']:,} replaced, {blocks['skipped_samples']:,} samples skipped."
        )
        parts += ["<h2>Blocklist</h2>", f"<p>{told}</p>"]
    return parts


def _look_ahead(ahead: Answer | None) -> list[str]:
    if ahead is None or not (ahead["findings"] or ahead["missed_samples"]):
        return []
    rows = [
        [f"{one['step']:,}", f"{one['sample']:,}", one["rule"], f"{one['score']:.4g}", f"{one['threshold']:g}", _where(one)]
        for one in ahead["findings"][:_NUM_FINDINGS]
    ]
    note = f"Judged up to sample {ahead['judged_until']:,}; {len(ahead['findings']):,} findings are to come. "
    missed = f"{ahead['missed_samples']:,} samples were not looked at: the run was there first." if ahead["missed_samples"] else ""
    heads = ["step", "sample", "rule", "score", "threshold", "document"]
    return ["<h2>Look-ahead</h2>", f"<p class=quiet>{note}{missed}</p>", _table(heads, rows)]


def _window(window: Answer | None) -> list[str]:
    if window is None:
        return []
    steps = f"Steps {window['first_step']} to {window['step']}, samples {window['first_sample']:,} to {window['last_sample']:,}"
    documents = [
        [f"{one['score']:.1f}", _where(one), "; ".join([*filter(None, [blocked_words(one)]), *one["reasons"]]), one["excerpt"]]
        for one in window["documents"][:10]
        if one["reasons"]
    ]
    tokens = [[one["id"], one["text"], f"{one['count']:,}", f"{one['expected']:.1f}", f"{one['z']:.1f}"] for one in window["tokens"]]
    rules = [
        [name, f"{one['share']:.2%}", f"{one['usual']:.2%}", f"{one['z']:.1f}"] for name, one in window["rules"].items() if one["far_out"]
    ]
    return [
        "<h2>Window</h2>",
        f"<p>{steps}: {window['looked_at']['documents']:,} documents, {window['copies']['documents']:,} of them copies of another.</p>",
        "<h3>Documents that stand out</h3>",
        _table(["score", "document", "why", "text"], documents),
        "<h3>Unusual tokens</h3>",
        _table(["id", "text", "count", "expected", "z"], tokens),
        "<h3>Rules broken more often than usual</h3>",
        _table(["rule", "here", "usual", "z"], rules),
    ]


def _source(name: str, source: Answer) -> list[str]:
    rules = [
        [rule, one["action"], f"{one['documents']:,}", f"{one['share']:.2%}", f"{one['threshold']:g}", _example(one["examples"])]
        for rule, one in source["rules"].items()
    ]
    far = [
        [one["stretch"], one["rule"], f"{one['z']:.1f}", f"{one['share']:.2%}", f"{one['share_elsewhere']:.2%}"]
        for one in source["stretches"]["far_out"]
    ]
    percentiles = source["lengths"]["percentiles"]
    parts = [
        f"<h2>{escape(name)}</h2>",
        "<h3>Lengths in tokens</h3>",
        _table([f"{percent}%" for percent in percentiles], [[f"{value:,}" for value in percentiles.values()]]),
        "<h3>Longest documents</h3>",
        _table(["tokens", "document"], [[f"{one['tokens']:,}", _where(one)] for one in source["lengths"]["longest"][:10]]),
        f"<h3>Broken rules, of {source['looked_at']['documents']:,} documents</h3>",
        _table(["rule", "action", "documents", "share", "threshold", "furthest out"], rules),
    ]
    if source["rejected"]:
        parts += ["<h3>Left out when it was prepared</h3>", _table(["for", "records"], [*map(list, source["rejected"].items())])]
    if far:
        head = ["stretch", "rule", "z", "share", "share elsewhere"]
        parts += ['<h3 class="far">Stretches unlike the others</h3>', _table(head, far)]
    if odd := source["reject_rates"]["far_out"]:
        rows = [[one["part"], f"{one['rejects']:,}", f"{one['rate']:.2%}", f"{one['z']:.1f}"] for one in odd]
        parts += ['<h3 class="far">Files of which more or less was left out</h3>', _table(["file", "left out", "rate", "z"], rows)]
    if passages := source["shared_passages"]:
        rows = [[one["documents"], one["text"]] for one in passages]
        parts += ["<h3>Passages that many documents share</h3>", _table(["documents", "passage"], rows)]
    return parts


def blocked_words(one: Answer) -> str:
    """What is left out of a document that stands in a window; empty where nothing is."""
    if one["blocked_from_sample"] is None:
        return ""
    if not one["masked_tokens"]:
        return f"blocked from sample {one['blocked_from_sample']:,} on, not masked here"
    if one["masked_tokens"] == one["tokens_in_samples"]:
        return "masked"
    return f"masked: {one['masked_tokens']:,} of {one['tokens_in_samples']:,} tokens here"


def _example(examples: Sequence[Answer]) -> str:
    return f"{examples[0]['score']:.4g}: {_where(examples[0])} {examples[0]['excerpt'][:80]}" if examples else ""


def _where(one: Answer) -> str:
    return f"{one['file']}:{one['record']} {one['hash'][:12]}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    if not body:
        return "<p class=quiet>none</p>"
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{body}</table>"


def _cell(value: object) -> str:
    text = str(value)
    kind = " class=number" if text.replace(",", "").replace(".", "").replace("-", "").rstrip("%").isdigit() else ""
    return f"<td{kind}>{escape(text)}</td>"
