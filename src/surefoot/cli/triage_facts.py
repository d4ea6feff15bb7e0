"""What triage needs to know of a run, from its folder: ledger, config, rows of the metrics, documents of a step, what a resume loaded.

Nothing is changed, and whatever cannot be read is said: a damaged run is the one that needs triage most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from surefoot.cli.run_steps import Attempt, attempt_of, attempts_of, on_line
from surefoot.config import load_config
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt, DataError, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.heal.incident import INCIDENT_NAME, with_documents
from surefoot.heal.triage import Check, Name, Signs, Told, step_of
from surefoot.heal.triage_checks import DocumentLook, Facts
from surefoot.observe.ledger import LEDGER_NAME, manifest_positions, read_ledger, verify_ledger
from surefoot.observe.lineage import candidates, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME

if TYPE_CHECKING:
    from surefoot.cli.run_data import RunData

logger = logging.getLogger(__name__)

_ASKED_OF_DOCUMENTS: Final[tuple[Name, ...]] = ("spike", "nan", "occasional-nan", "divergence", "canary", "ranks-differ", "asked")
_MAX_LOOKS: Final = 3  # at the documents of so many steps: each reads the text of a thousand others to know what is usual
_USUAL_DOCUMENTS: Final = 1000
_ROWS_BEFORE: Final = 60
_STARTS: Final = (Event.GENERATION_STARTED, Event.ATTEMPT_STARTED)
_SAME_LR: Final = 4.0
"""A schedule that goes on moves the rate less than this from one step to the next, but for the first steps of a warm-up."""


_Fits = Callable[[int, int], bool]


def read_entries(run_dir: Path) -> tuple[list[LedgerEntry], list[str]]:
    """All that can be read, and what cannot."""
    path = run_dir / LEDGER_NAME
    try:
        return read_ledger(path), []
    except Corrupt as error:
        entries = read_ledger(path, up_to_damage=True)
        return entries, [f"the ledger is damaged behind entry {len(entries)}: what follows is not read ({error.what})"]


def ledger_fault(run_dir: Path) -> str:
    """What the checkpoints know of the ledger that it does not hold itself; empty when they agree."""
    manifests = manifest_positions(run_dir)  # before the ledger: a live run adds to both
    check = verify_ledger(run_dir / LEDGER_NAME, manifests=manifests)
    return "" if check.ok else f"{check.entries} entries; at entry {check.first_bad}: {check.detail}"


def gather(run_dir: Path, told: Told, entries: Sequence[LedgerEntry], *, data: str) -> tuple[Facts, list[str]]:
    """The facts about `told`, and notes on what could not be had."""
    config, notes = _config(run_dir)
    rows, lineage = _rows(run_dir, told.signs, entries), fold_lineage(entries)
    facts = Facts(
        run=str(run_dir),
        entries=tuple(entries),
        rows=rows,
        num_ranks=config.parallel.num_ranks,
        audit_interval_steps=config.monitor.audit_interval_steps,
        step=lineage.counters.step,
        clean_step=min((ref.step for ref in candidates(lineage)), default=None),
        is_stopped=_is_stopped(entries),
        has_data=bool(config.data.path or notes),
        inventory={attempt: inventory(run_dir, attempt, entries, rows, data=data) for attempt in _rebounds(told.signs)},
    )
    return replace(facts, documents=_documents(run_dir, told, entries, data=data)), notes


def inventory(
    run_dir: Path,
    attempt: int,
    entries: Sequence[LedgerEntry],
    rows: Mapping[int, Mapping[str, Any]],
    *,
    data: str,
) -> tuple[Check, ...]:
    """What the resume that began `attempt` brought back: moments, step, schedule, cursor."""
    began = _began(entries, attempt)
    if began is None:
        return ()
    checkpoint = str(began.fields.get("checkpoint") or "")
    manifest = _manifest(run_dir, checkpoint)
    if manifest is None:
        missing = f"checkpoint {checkpoint} cannot be read any more" if checkpoint else "it began without a checkpoint"
        return (Check("moments", "unknown" if checkpoint else "found", missing, "state"),)
    moments = sum(tensor.key.startswith("optim.") for tensor in manifest.tensors)
    return (
        Check("moments", "ok" if moments else "found", f"{checkpoint} holds {moments} tensors of optimizer state", "state"),
        Check(
            "step",
            "ok" if manifest.step == began.step else "found",
            f"{checkpoint} is of step {manifest.step}, and the attempt went on from step {began.step}",
            "code",
        ),
        _schedule(began.step, rows),
        _cursor(began, manifest.cursor, rows, steps=_step_plan(run_dir, began, entries, data=data)),
    )


def _schedule(step: int, rows: Mapping[int, Mapping[str, Any]]) -> Check:
    before, after = (rows.get(number, {}).get("lr") for number in (step, step + 1))
    if not before or not after:
        return Check("schedule", "unknown", f"the metrics do not hold the learning rates of steps {step} and {step + 1}", "code")
    is_same = max(after / before, before / after) < _SAME_LR
    return Check("schedule", "ok" if is_same else "found", f"the learning rate was {before:.4g}, then {after:.4g}", "code")


def _cursor(began: LedgerEntry, cursor: Mapping[str, Any], rows: Mapping[int, Mapping[str, Any]], *, steps: _Fits | str) -> Check:
    """`steps` tells whether a step takes the samples [first, end), or is why nobody can."""
    step = began.step
    saved, after = cursor.get("next_sample"), rows.get(step + 1, {}).get("next_sample")
    if saved is None or after is None:
        return Check("cursor", "unknown", "neither checkpoint nor metrics tell the samples", "data")
    detail = f"step {step + 1} took the samples from {saved} to {after - 1}"
    if isinstance(steps, str):
        return Check("cursor", "unknown", f"{detail}; {steps}", "data")
    return Check("cursor", "ok" if steps(saved, after) else "found", detail, "data")


def _step_plan(run_dir: Path, began: LedgerEntry, entries: Sequence[LedgerEntry], *, data: str) -> _Fits | str:
    """Ramps, stages and what is skipped say how many samples a step takes, so that without the data nobody can tell a wrong cursor."""
    from surefoot.cli.run_data import open_run_data

    later = [entry for entry in entries if entry.seq > began.seq]
    if any(entry.event == Event.STAGE_CHANGED or _changes_steps(entry) for entry in later):
        return "what a step takes was changed since"
    try:
        return open_run_data(run_dir, data=data, may_be_past=True).steps.fits
    except (SurefootError, OSError) as error:
        return f"what a step takes is not known here: {error.what if isinstance(error, SurefootError) else error}"


def _changes_steps(entry: LedgerEntry) -> bool:
    return entry.event == Event.CONFIG_ACCEPTED and entry.fields.get("section") in ("train", "data")


def _config(run_dir: Path) -> tuple[RunConfig, list[str]]:
    try:
        return load_config(run_dir / CONFIG_NAME).config, []
    except ConfigError as error:
        return RunConfig(), [f"{CONFIG_NAME} cannot be read, so defaults stand for it: {error.what}"]


def _rebounds(signs: Iterable[Signs]) -> set[int]:
    return {entry.attempt for one in signs if one.name == "rebound" for entry in one.entries}


def _began(entries: Sequence[LedgerEntry], attempt: int) -> LedgerEntry | None:
    """The newest word on what an attempt went on from."""
    names = (Event.ATTEMPT_STARTED, Event.RUN_RESUMED, Event.RUN_ROLLED_BACK)
    return next((entry for entry in reversed(entries) if entry.event in names and entry.attempt == attempt), None)


def _manifest(run_dir: Path, checkpoint: str) -> Any:
    from surefoot.checkpoint.manifest import read_manifest

    try:
        return read_manifest(run_dir / CHECKPOINTS_NAME / checkpoint) if checkpoint else None
    except CheckpointError:
        return None


def _rows(run_dir: Path, signs: Sequence[Signs], entries: Sequence[LedgerEntry]) -> dict[int, Mapping[str, Any]]:
    """Those on the present line of the steps that `signs` are about, and some before."""
    wanted = {step for one in signs for step in range(one.onset_step - _ROWS_BEFORE, one.onset_step + 2)}
    if not wanted or not (run_dir / "metrics").is_dir():
        return {}
    import numpy as np
    import pyarrow as pa

    from surefoot.observe.metrics import read_steps

    table = read_steps(run_dir, steps=range(min(wanted), max(wanted) + 1))
    chosen = table.filter(pa.array(np.isin(np.asarray(table.column("step")), sorted(wanted))))
    return {int(row["step"]): row for row in on_line(chosen.to_pylist(), attempts_of(entries))}


def _documents(run_dir: Path, told: Told, entries: Sequence[LedgerEntry], *, data: str) -> dict[int, DocumentLook]:
    """Of the gravest symptoms that documents can cause."""
    looks: dict[int, DocumentLook] = {}
    for one in told.signs:
        step = one.gravest_step
        if one.name not in _ASKED_OF_DOCUMENTS or step in looks:
            continue
        if len(looks) >= _MAX_LOOKS:
            looks[step] = DocumentLook(missing=f"not looked at: `surefoot triage {run_dir} --step {step}` does")
            continue
        samples = diagnosed.samples if (diagnosed := told.about(one)) is not None else None
        try:
            if not samples or samples[0] >= samples[1]:
                samples = _samples_then(run_dir, one, entries)
        except DataError as error:
            looks[step] = DocumentLook(missing=error.what)
        else:
            looks[step] = look_at_documents(run_dir, step, samples=samples, data=data)
    return looks


def _samples_then(run_dir: Path, signs: Signs, entries: Sequence[LedgerEntry]) -> tuple[int, int] | None:
    """What the gravest finding's step and the one before it took, where it is on a line that the run has left: there the same number may
    stand for other samples by now. None where it is on the present line. Raises DataError where the metrics do not tell.
    """
    found, step = signs.gravest, signs.gravest_step
    if found is None:
        return None
    of_then = attempts_of(entry for entry in entries if entry.seq <= found.seq)
    is_left = attempt_of(step, of_then) != attempt_of(step, attempts_of(entries))
    if not is_left and not _left_out_since(found, entries):
        return None
    ends = _ends_of(run_dir, range(step - 2, step + 1), of_then)
    first = ends.get(step - 2, ends.get(step - 1)) if step > 2 else 0
    end = ends.get(step)
    if first is not None and end is not None and first < end:
        return first, end
    if is_left:
        raise DataError(f"the metrics do not tell which samples step {step} took in attempt {found.attempt}", where=str(run_dir))
    return None


def _ends_of(run_dir: Path, steps: range, attempts: Sequence[Attempt]) -> dict[int, int]:
    """The first sample behind each of `steps` on the line of `attempts`, where the metrics have it."""
    if not (run_dir / "metrics").is_dir():
        return {}
    from surefoot.observe.metrics import read_steps

    rows = on_line(read_steps(run_dir, steps=steps).to_pylist(), attempts)
    return {int(row["step"]): int(row["next_sample"]) for row in rows if row["next_sample"] is not None}


def _left_out_since(found: LedgerEntry, entries: Sequence[LedgerEntry]) -> bool:
    return any(entry.event == Event.BLOCK_TAKEN and entry.seq > found.seq for entry in entries)


def _is_stopped(entries: Sequence[LedgerEntry]) -> bool:
    """Whether policy or a person stopped the run, and nobody let it go on since."""
    events = (Event.RUN_HALTED, Event.RUN_RELEASED, Event.RUN_RESUMED, Event.ATTEMPT_STARTED)
    return next((entry.event == Event.RUN_HALTED for entry in reversed(entries) if entry.event in events), False)


def furthest_step(run_dir: Path, entries: Sequence[LedgerEntry]) -> int:
    """The last step that the run reached at any time. A finding is written while its step is under way."""
    told = max((max(entry.step, step_of(entry)) for entry in entries), default=0)
    if not (run_dir / "metrics").is_dir():
        return told
    from surefoot.observe.metrics import read_steps

    return max([told, *map(int, read_steps(run_dir, newest=1).column("step").to_pylist())])


def num_ranks_ever(run_dir: Path, entries: Sequence[LedgerEntry]) -> int:
    """The most ranks that the run has had: by what its starts say, or else by its config."""
    sizes = []
    for entry in entries:
        environment = entry.fields.get("environment")
        for told in (entry.fields, environment if isinstance(environment, Mapping) else {}):
            sizes += [size] if isinstance(size := told.get("world_size"), int) and entry.event in _STARTS else []
    return max(sizes) if sizes else _config(run_dir)[0].parallel.num_ranks


def look_at_documents(run_dir: Path, step: int, *, samples: tuple[int, int] | None, data: str) -> DocumentLook:
    """Those of one step and the one before it, whose update made its weights, beside what is usual in their sources.

    With `samples`, [first, end), those instead: what an episode left out is not what the step takes now.
    """
    from surefoot.cli.run_data import open_run_data

    try:
        run = open_run_data(run_dir, data=data, may_be_past=True)
        window = _window(run, step, samples)
    except (SurefootError, OSError) as error:
        return DocumentLook(missing=f"the documents cannot be looked at: {error.what if isinstance(error, SurefootError) else error}")
    num_documents = int(window["looked_at"]["documents"])
    where = f"steps {max(1, step - 1)} to {step}" if samples is None else f"samples {samples[0]} to {samples[1] - 1}"
    return DocumentLook(tuple(window["documents"]), num_documents, where, limit_of(num_documents))


def documents_of_incident(run_dir: Path, record: Mapping[str, Any], *, data: str) -> dict[str, Any]:
    """`record` with the documents of its samples where the data is at hand, in its file too where that may be written."""
    told = record["samples"]
    samples = (int(told[0]), int(told[1])) if told and told[0] < told[1] else None
    look = look_at_documents(run_dir, int(record["steps"][1]), samples=samples, data=data)
    if look.missing:
        return with_documents(record, None, f"{look.missing}; `surefoot triage {run_dir} --incident {record['id']} --data DIR` looks there")
    standing = look.standing_out
    note = f"{len(standing)} of the {look.num_documents} documents of {look.where} stand out"
    found = with_documents(record, standing or look.documents[:3], note)
    path = run_dir / "incidents" / str(record["id"]) / INCIDENT_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, strict_json.dumps(found, indent=2))
    except (OSError, SurefootError) as error:
        logger.warning("%s could not be written: %s", path, error)
    return found


def _window(run: RunData, step: int, samples: tuple[int, int] | None) -> dict[str, Any]:
    import numpy as np

    from surefoot.cli.data_report import rules_off, window_of
    from surefoot.data.quality.look import baselines
    from surefoot.data.quality.rules_file import rule_set
    from surefoot.data.quality.stored import Shelf
    from surefoot.data.quality.window import window_report

    rules = rule_set(run.config.data.rules)
    off = rules_off(run.config, rules=rules)
    with Shelf(run.path, manifest=run.manifest) as shelf:
        if samples is None:
            return window_of(run, shelf, step=step, num_steps=2, rules=rules, off=off, limit=_USUAL_DOCUMENTS)
        usual = baselines(shelf, seq_len=run.order.seq_len_at(samples[0]), rules=rules, off=off, limit=_USUAL_DOCUMENTS)
        chosen = np.arange(*samples, dtype=np.int64)
        return window_report(shelf, run.order, chosen, rules=rules, off=off, usual=usual, blocks=run.blocklist.blocks)


def limit_of(num_documents: int) -> float:
    """Scores add up powers of ten. Among n documents the oddest in one respect has about log10(n) by chance; two more are one in a hundred
    such steps."""
    return math.log10(max(1, num_documents)) + 2.0
