"""Classic rules of pre-training, each with its figure, the right one as this code computes it, and why: `plan --textbook`.

`docs/textbook.md` is written by `python -m surefoot.plan.textbook > docs/textbook.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from textwrap import wrap

from surefoot.plan.textbook import detectors as textbook_detectors
from surefoot.plan.textbook import laws as textbook_laws
from surefoot.plan.textbook import memory as textbook_memory
from surefoot.plan.textbook import recovery as textbook_recovery
from surefoot.plan.textbook import stability as textbook_stability
from surefoot.plan.textbook.row import Chapter, Row

_HEAD = """# Rules of thumb, computed again

<!-- Written by `python -m surefoot.plan.textbook > docs/textbook.md`; a test fails when it is out of date. -->

Rules and worked examples that are told again and again about pre-training runs. Each stands with its figure, the figure that this code
computes, and why. What is marked *measured* was taken from published curves, logs or papers and is cited; everything else is computed.
Budgets, sizes, memory, intervals and prices are by the functions that `surefoot plan` uses, so such a figure is the figure of a plan; plain
sums are by arithmetic. Two formulas are here alone, for a plan has no use for them: Korthikanti's for the activations of a layer of
Megatron-LM, beside the plan's own count tensor by tensor (surefoot keeps more), and the false alarms of detectors.
"""

_WIDTH = 120


def chapters() -> tuple[Chapter, ...]:
    return (
        Chapter("Budgets, scaling laws, batches", textbook_laws.rows()),
        Chapter("Memory, pipelines, layouts", textbook_memory.rows()),
        Chapter("Failures, checkpoints, money", textbook_recovery.rows()),
        Chapter("Spikes, canaries, number formats", (*textbook_stability.rows(), *textbook_detectors.rows())),
    )


def textbook() -> tuple[Row, ...]:
    """All rows, in the order of the page."""
    return tuple(row for chapter in chapters() for row in chapter.rows)


def summary() -> str:
    """How many of which verdict, in one line."""
    counts = Counter(row.verdict for row in textbook())
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "imprecise", "incomplete", "wrong", "contradiction"))
    return f"{counts.total()} rules: {told}"


def markdown() -> str:
    """The whole page."""
    lines = [_HEAD, f"{summary()}.", ""]
    for chapter in chapters():
        lines += [f"## {chapter.title}", "", "| the rule | right is | verdict | why | by |", "| --- | --- | --- | --- | --- |"]
        lines += [_table_row(row) for row in chapter.rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def terminal_lines() -> Iterator[str]:
    """The same for a terminal of 120 columns."""
    yield summary()
    for chapter in chapters():
        yield from ("", chapter.title)
        for row in chapter.rows:
            yield from ("", *_wrapped(row.claim, "  "))
            yield from _wrapped(f"{row.verdict}: {row.right}", "    ")
            yield from _wrapped(f"{row.why} ({row.source}; {row.basis})", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, width=_WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _table_row(row: Row) -> str:
    cells = (row.claim, row.right, f"**{row.verdict}**", row.why, f"{row.source}; *{row.basis}*")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in cells)} |"
