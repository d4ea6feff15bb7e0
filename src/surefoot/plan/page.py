"""A plan as one page, for a terminal and as Markdown: every number with its reason and source. Pure.

One list of sections serves both; a section has lines of (label, figure, why) and may have a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from surefoot.core.units import show_bytes, show_count, show_duration
from surefoot.plan.composed import Plan
from surefoot.plan.layouts.judge import Judged
from surefoot.plan.layouts.layout_text import show_layout
from surefoot.plan.memory import estimate as device_memory
from surefoot.plan.records import Reason
from surefoot.plan.sizing.frontier import Row
from surefoot.plan.tuning.laws import SideBySide
from surefoot.plan.tuning.training_choice import is_a_loss

WIDTH = 120
NUM_LAYOUTS = 5
NUM_REJECTED = 6

Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    figure: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    lines: Sequence[Line] = ()
    head: Cells = ()
    rows: Sequence[Cells] = ()
    notes: Sequence[str] = field(default=())


def sections_of(plan: Plan) -> list[Section]:
    return [_budget(plan), _frontier(plan), _choice(plan), _training(plan), _layout(plan), _layouts(plan), _saves(plan), _failures(plan)]


def terminal_page(plan: Plan) -> str:
    lines = []
    for text in (_stamp(plan), *_summary(plan)):
        lines += _wrapped(text, indent=0)
    lines += ["", "Mind"]
    for warning in plan.warnings:
        lines += _wrapped(f"- {warning}", indent=2)
    for section in sections_of(plan):
        lines += ["", section.title]
        for line in section.lines:
            lines += [f"  {line.label:<20} {line.figure}", *_wrapped(line.why, indent=25)]
        lines += _aligned(section.head, section.rows)
        for note in section.notes:
            lines += _wrapped(note, indent=2)
    return "\n".join(lines)


def _wrapped(text: str, *, indent: int) -> list[str]:
    space = " " * indent
    return wrap(text, width=WIDTH, initial_indent=space, subsequent_indent=space + "  ", break_on_hyphens=False, break_long_words=False)


def markdown_page(plan: Plan) -> str:
    lines = ["# Plan", "", _stamp(plan), "", *[f"- {text}" for text in _summary(plan)]]
    lines += ["", "## Mind", "", *[f"- {warning}" for warning in plan.warnings]]
    for section in sections_of(plan):
        lines += ["", f"## {section.title}", ""]
        lines += [f"- **{line.label}**: {line.figure}" + (f" — {line.why}" if line.why else "") for line in section.lines]
        if section.head:
            lines += ["", f"| {' | '.join(section.head)} |", f"|{' --- |' * len(section.head)}"]
            lines += [f"| {' | '.join(row)} |" for row in section.rows]
        if section.notes:
            lines += ["", *[f"- {note}" for note in section.notes]]
    return "\n".join(lines) + "\n"


def _summary(plan: Plan) -> list[str]:
    """The plan in three lines."""
    choice, sizes, failures = plan.model.frontier.choice, plan.model.sizes, plan.reliability.failures
    layout = show_layout(plan.layout.layout)
    active = f" ({show_count(sizes.num_active_parameters)} active)" if sizes.num_experts else ""
    loss = f", to a loss of {choice.loss:.3f}" if plan.promise.loss else ""
    return [
        f"{show_count(sizes.num_parameters)} parameters{active} on {show_count(choice.tokens)} tokens{loss}",
        f"{plan.layout.layout.num_devices} {plan.model.budget.accelerator.name} as {layout}, MFU {plan.layout.mfu:.0%}",
        f"{show_duration(plan.run_s)} with {failures.expected:.2g} failures expected, {plan.run_usd:,.0f} USD; a save every "
        f"{plan.reliability.interval.steps} steps",
    ]


def _stamp(plan: Plan) -> str:
    return f"plan by `{plan.law.name}`: " + ("validated by a sweep" if plan.validated else "not validated")


def _aligned(head: Cells, rows: Sequence[Cells]) -> Iterator[str]:
    if not head:
        return
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _why(plan: Plan, path: str) -> str:
    reason = plan.reasons.get(path)
    return _told(reason) if reason else ""


def _told(reason: Reason) -> str:
    return reason.why if reason.source in ("arithmetic", "") else f"{reason.why}; {reason.source}"


def _budget(plan: Plan) -> Section:
    budget = plan.model.budget
    price = plan.request.cluster.usd_per_hour
    return Section(
        "Budget",
        [
            Line(
                "devices", f"{budget.num_devices} {budget.accelerator.name}, {plan.num_idle} of them in reserve", budget.accelerator.source
            ),
            Line("time", f"{budget.days:.3g} days, {show_count(budget.device_hours)} device hours", _why(plan, "budget.days")),
            Line("MFU", f"{budget.mfu:.1%} of {budget.peak_flops:.4g} FLOP/s", _why(plan, "budget.mfu")),
            Line("of it useful", f"{budget.goodput:.1%}", _why(plan, "budget.goodput")),
            Line("FLOPs for training", f"{budget.flops:.4g}, as the law counts {plan.model.law_flops:.4g}", _why(plan, "budget.law_flops")),
            Line("price", f"{plan.run_usd:,.0f} USD at {price:g} an hour, for the {show_duration(plan.run_s)} that the steps take"),
        ],
    )


def _frontier(plan: Plan) -> Section:
    frontier = plan.model.frontier
    notes = [f"law: {frontier.law.source}; corpus: {frontier.law.corpus}; N counts {frontier.law.counts}"]
    if frontier.n_band:
        low, high = frontier.n_band
        notes.append(f"N of the least loss: {show_count(frontier.best.n)}, 95% {show_count(low)} to {show_count(high)}")
    notes.append(f"a size twice the best costs {frontier.larger_by_2:.4f} nats, half of it {frontier.smaller_by_2:.4f}")
    head = ("N", "tokens", "tok/N", "loss", "95%", "over best", "as good at", "serving/training", "epochs", "")
    return Section("What the budget buys", head=head, rows=[_row(row, plan) for row in frontier.rows], notes=notes)


def _row(row: Row, plan: Plan) -> Cells:
    marks = [text for text in ("<- choice" if row is plan.model.frontier.choice else "", row.mark) if text]
    known = is_a_loss(row.loss, vocab_size=plan.model.sizes.vocab_size)
    return (
        show_count(row.n),
        show_count(row.tokens),
        f"{row.tokens_per_parameter:.3g}",
        f"{row.loss:.4f}" if known else "-",
        f"{row.loss_band[0]:.3f} to {row.loss_band[1]:.3f}" if known and row.loss_band else "-",
        f"+{row.over_best:.4f}" if known else "-",
        f"{row.as_good_at:.2f} C",
        f"{row.serve_ratio:.2f}" if row.serve_ratio is not None else "-",
        f"{row.epochs:.2g}" if row.epochs is not None else "-",
        ", ".join(marks),
    )


def _choice(plan: Plan) -> Section:
    model, choice = plan.model, plan.model.frontier.choice
    sizes = model.sizes
    heads = f"{sizes.num_heads} heads ({sizes.num_kv_heads} of keys)"
    shape = f"{sizes.num_layers} layers, width {sizes.d_model}, {heads}, feed-forward {sizes.d_ff}"
    if sizes.num_experts:
        shape += f", {sizes.num_experts} experts ({sizes.experts_per_token} for each token)"
    without = sizes.num_parameters - sizes.num_embedding_parameters
    return Section(
        "Model",
        [
            Line(
                "N",
                f"{show_count(choice.n)} by the law; {sizes.num_parameters:,} built, {without:,} without embedding",
                _why(plan, "choice.n"),
            ),
            Line(
                "tokens", f"{show_count(choice.tokens)}, {choice.tokens_per_parameter:.3g} for each parameter", _why(plan, "choice.tokens")
            ),
            Line(
                "loss", f"{choice.loss:.4f}" if plan.promise.loss else "not known this far from the law's runs", _why(plan, "choice.loss")
            ),
            Line("shape", shape, _why(plan, "choice.sizes")),
            Line("vocabulary", f"{sizes.vocab_size}", _why(plan, "choice.vocab_size")),
            Line("sequences", f"{model.seq_len} tokens", _why(plan, "choice.seq_len")),
            Line("FLOPs", f"{model.cost.exact:.4g} exact, {model.cost.ratio:.3f} x 6 N D", _why(plan, "choice.exact_flops")),
        ],
    )


def _training(plan: Plan) -> Section:
    training, seq_len = plan.training, plan.model.seq_len
    schedule = training.schedule
    ramp = ", ".join(f"{batch} from sample {first:,}" for first, batch in training.ramp) or "none"
    return Section(
        "Training",
        [
            Line(
                "batch",
                f"{training.batch.batch} sequences, {show_count(training.batch.batch * seq_len)} tokens",
                _why(plan, "training.global_batch_size"),
            ),
            Line("", _side_by_side(training.batch_laws)),
            Line("ramp", ramp, _why(plan, "training.batch_ramp")),
            Line("steps", f"{training.num_steps:,}, {show_duration(plan.run_s)} with failures and restarts"),
            Line("learning rate", f"{training.lr:.3g}", _why(plan, "training.lr")),
            Line("", _side_by_side(training.lr_laws)),
            Line(
                "schedule",
                f"{schedule.kind}, {schedule.warmup_steps} steps of warm-up, {schedule.decay_steps} of decay ({schedule.decay_shape})",
                f"{_why(plan, 'training.warmup_steps')}; {_why(plan, 'training.kind')}",
            ),
        ],
    )


def _side_by_side(found: SideBySide) -> str:
    return "laws: " + ", ".join(f"{one.law} {one.value:.3g}" for one in found.suggestions)


def _layout(plan: Plan) -> Section:
    judged = plan.layout
    terms = sorted(((value, name) for name, value, _ in device_memory.told(judged.memory)), reverse=True)
    bubble, timeline, pipelined = judged.bubble.closed, judged.bubble.played, judged.layout.pp > 1
    played = f"; played out {timeline.idle_of_total:.1%} of all" if timeline else ""
    lines = [
        Line("layout", f"{show_layout(judged.layout)} on {judged.layout.num_devices} devices", _why(plan, "layout")),
        Line("step", f"{judged.step_s:.3g} s, MFU {judged.mfu:.1%}, {show_count(judged.tokens_per_s)} tokens/s", _why(plan, "layout.mfu")),
        Line(
            "bubble",
            f"{bubble.idle_of_total:.1%} of all, {bubble.idle_of_ideal:.1%} of the ideal{played}" if pipelined else "none: one stage",
            _why(plan, "layout.bubble") if pipelined else "",
        ),
        Line(
            "memory",
            f"{show_bytes(judged.memory.total)} of {show_bytes(plan.request.cluster.accelerator.memory_bytes)}",
            _why(plan, "layout.memory"),
        ),
        *[Line(f"  {name}", show_bytes(value)) for value, name in terms if value > 0.005 * judged.memory.total],
    ]
    notes = [f"not counted: {'; '.join(device_memory.EXCLUDED)}"]
    return Section("Layout", lines, notes=notes)


def _layouts(plan: Plan) -> Section:
    head = ("", "layout", "step", "MFU", "memory", "bubble", "")
    rows = [_layout_row(f"{place + 1}", judged) for place, judged in enumerate(plan.ranked.layouts[:NUM_LAYOUTS])]
    if plan.recipe:
        rows.append(_layout_row("recipe", plan.recipe.judged, note=f"{1.0 + plan.recipe.slower:.2f} times the step: {plan.recipe.why}"))
    counts = plan.ranked.counts
    rejected = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.rejected.items(), key=lambda item: -item[1]))
    notes = [f"{counts.considered} considered, {counts.ranked} timed to the end, {counts.slower} slower; rejected: {rejected or 'none'}"]
    notes += [f"not {show_layout(one.layout)}: {one.reason}" for one in plan.ranked.rejected[:NUM_REJECTED]]
    return Section("Other layouts", head=head, rows=rows, notes=notes)


def _layout_row(place: str, judged: Judged, *, note: str = "") -> Cells:
    idle = f"{judged.bubble.closed.idle_of_total:.1%}" if judged.layout.pp > 1 else "-"
    told = note or judged.untrainable
    return (place, show_layout(judged.layout), f"{judged.step_s:.3g} s", f"{judged.mfu:.1%}", show_bytes(judged.memory.total), idle, told)


def _saves(plan: Plan) -> Section:
    found = plan.reliability
    interval, retention, size = found.interval, found.retention, found.bytes
    return Section(
        "Checkpoints",
        [
            Line("interval", f"{interval.steps} steps, {interval.seconds:.3g} s", _why(plan, "checkpoint.interval_s")),
            Line("stall", f"{interval.stall_s:.3g} s of a save", _why(plan, "checkpoint.stall_s")),
            Line(
                "written in",
                f"{interval.write_s:.3g} s: {found.times.stage_s:.2g} s to the host, {found.times.flush_s:.2g} s to a node's disk",
            ),
            Line(
                "size",
                f"{show_bytes(size.total)}, {show_bytes(size.per_rank)} for each rank, {show_bytes(size.per_node)} for each node",
                _why(plan, "checkpoint.bytes"),
            ),
            Line(
                "kept",
                f"keep_last {retention.keep_last}, cover_steps {retention.cover_steps}, milestone_steps {retention.milestone_steps}: "
                f"{size.num_kept} checkpoints, {show_bytes(size.peak)} at the most",
                _why(plan, "checkpoint.retention"),
            ),
        ],
    )


def _failures(plan: Plan) -> Section:
    found = plan.reliability
    failures, goodput, cost = found.failures, found.goodput, found.cost
    low, high = failures.band
    held = f"{plan.num_idle} devices"
    return Section(
        "Failures",
        [
            Line(
                "expected",
                f"{failures.expected:.3g}, one in {show_duration(failures.mtbf_s)}; {failures.low:.3g} to {failures.high:.3g} between "
                f"published fleets, {low} to {high} with luck (95% of runs)",
                _why(plan, "reliability.failures"),
            ),
            Line("goodput", f"{goodput.value:.2%}, 95% {goodput.band[0]:.2%} to {goodput.band[1]:.2%}", _why(plan, "reliability.goodput")),
            Line(
                "lost to",
                f"saving {goodput.saving:.2%}, work done again {goodput.lost_work:.2%}, restarts {goodput.restarting:.2%}",
            ),
            Line(
                "a failure costs",
                f"{cost.failure_usd:,.0f} USD, at worst {cost.failure_worst_usd:,.0f}, {show_count(cost.failure_tokens)} tokens",
                _why(plan, "reliability.cost"),
            ),
            Line("a minute of restart", f"{cost.restart_minute_usd:,.0f} USD each time, {cost.restart_minutes_usd:,.0f} over the run"),
            Line(
                "spare nodes",
                f"{found.spares.num_nodes} for 99% of the time; held: {held}",
                _why(plan, "reliability.spares"),
            ),
        ],
    )
