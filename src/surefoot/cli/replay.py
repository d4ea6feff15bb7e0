"""`surefoot replay`: steps of a run computed again from its ledger, its config and its data, and compared bit for bit."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot.cli.console import say
from surefoot.cli.new_folder import refuse_taken
from surefoot.cli.replay_compare import COUNTS, FIGURES, Compared, compare_steps, rows_of_line
from surefoot.cli.replay_folder import config_for_replay, lay_out, seen_path
from surefoot.cli.replay_plan import Original, changed_surroundings, read_original, recorded_to, refuse_other_config, script_for
from surefoot.cli.replay_words import first_nonfinite, heads_by_layer, lines_of
from surefoot.coordinate.lock import RunLock
from surefoot.core import strict_json
from surefoot.core.clock import SystemClock
from surefoot.core.errors import EXIT_DONE, CheckpointError, ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef
from surefoot.guard.script import ReplayTask
from surefoot.observe.interventions import segment_at
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_counters
from surefoot.observe.run_dir import CONFIG_NAME, require_run

SCHEMA_VERSION = 1
ENTRY = "surefoot.cli.replay_rank:main"


@dataclass(frozen=True, slots=True)
class _Asked:
    from_step: int
    num_steps: int
    name_nonfinite: bool
    logits: bool

    @property
    def last_step(self) -> int:
        return self.from_step + self.num_steps


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a replay in `folder` that began with `start`."""

    start: CheckpointRef | None
    compared: Compared
    seen: Sequence[dict[str, Any]]
    notes: Sequence[str]

    @property
    def start_step(self) -> int:
        return self.start.step if self.start else 0


def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder. Nothing in it is changed; it may be live.")],
    from_: Annotated[int, typer.Option("--from", metavar="N", min=0, help="The steps after step N.")],
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="So many of them: N + 1 to N + K.")],
    without: Annotated[
        list[int] | None, typer.Option("--without", metavar="SEQ", help="Leave out this intervention: the seq of its ledger entry.")
    ] = None,
    name_nonfinite: Annotated[
        bool, typer.Option("--name-nonfinite", help="Name the first tensor with a value that is not finite: module, direction, sample.")
    ] = False,
    logits: Annotated[bool, typer.Option("--logits", help="The largest attention logit of each head, layer and step.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Compute in this new folder, and keep it.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute steps of a run again and compare them with what was recorded, bit for bit. Exit 1 when they differ.

    \b
    Examples:
      surefoot replay runs/quickstart --from 100 --steps 20
      surefoot replay runs/quickstart --from 100 --steps 20 --without 57
      surefoot replay runs/quickstart --from 119 --steps 1 --name-nonfinite --logits
    """
    require_run(run_dir)
    if not (run_dir / CONFIG_NAME).is_file():
        raise ConfigError(f"the run has no {CONFIG_NAME}, which says what it computes", where=str(run_dir))
    if out is not None:
        refuse_taken(out, option="--out")
    asked = _Asked(from_, steps, name_nonfinite, logits)
    original = read_original(run_dir, from_step=from_, num_steps=steps, without=tuple(without or ()))
    _refuse_unrecorded(original, asked)
    with _folder(out) as folder:
        done = _first_that_loads(original, asked, folder, quiet=json_output)
    answer = _answer(original, asked, done, out)
    typer.echo(strict_json.dumps(answer) if json_output else "\n".join(lines_of(answer)))
    if not answer["same"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="surefoot-replay-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _recorded(original: Original, steps: range) -> dict[int, Any]:
    """What the present line has of these steps."""
    return dict(rows_of_line(_rows(original.run_dir, steps), original.segments))


def _refuse_unrecorded(original: Original, asked: _Asked) -> None:
    """Raises ConfigError where the present line ends before the last step that is asked for."""
    if not _recorded(original, range(asked.last_step, asked.last_step + 1)):
        first, found = original.segments[0].first_step, _recorded(original, range(1, asked.last_step + 1))
        last = recorded_to(original.segments, list(found))
        if not found:
            what = f"steps up to {asked.last_step} were asked for, and none of them is recorded: there is nothing to compare with"
            hint = f"bring back {original.run_dir / 'metrics'}, which is gone or damaged, or `surefoot status {original.run_dir}`"
            raise ConfigError(what, where=str(original.run_dir), hint=hint)
        raise ConfigError(
            f"steps {asked.from_step + 1} to {asked.last_step} were asked for, and the present line has steps {first} to {last} recorded",
            where=str(original.run_dir),
            hint=f"--steps {last - asked.from_step}" if last > asked.from_step else f"--from {max(first - 1, last - 1)} --steps 1",
        )


def _rows(run_dir: Path, steps: range) -> list[dict[str, Any]]:
    from surefoot.observe.metrics import read_steps

    rows: list[dict[str, Any]] = read_steps(run_dir, steps=steps, columns=(*FIGURES, *COUNTS)).to_pylist()
    return rows


def _first_that_loads(original: Original, asked: _Asked, folder: Path, *, quiet: bool) -> _Done:
    """From the newest checkpoint that loads. Each try has a folder of its own."""
    notes: list[str] = []
    for number, start in enumerate(original.starts, start=1):
        place = folder / (start.id if start else "start")
        place.mkdir()
        try:
            return _compute(original, asked, place, start=start, notes=notes, quiet=quiet)
        except CheckpointError as error:
            if number == len(original.starts) or start is None:
                raise
            notes.append(f"{start.id} is not taken: {error.what}")
    raise AssertionError("the last try returns or raises")


def _compute(
    original: Original,
    asked: _Asked,
    place: Path,
    *,
    start: CheckpointRef | None,
    notes: Sequence[str],
    quiet: bool,
) -> _Done:
    first_step = (start.step if start else 0) + 1
    segment = segment_at(original.segments, asked.from_step + 1)
    loaded = config_for_replay(original.run_dir, place, facts=segment.facts if segment else {})
    refuse_other_config(original, loaded.config, first_step=first_step, last_step=asked.last_step)
    script = script_for(original, first_step=first_step, last_step=asked.last_step)
    task = ReplayTask(asked.from_step + 1, asked.last_step, script, asked.name_nonfinite, asked.logits)
    without = [one.seq for one in original.left_out]
    ledger = lay_out(place, loaded, task, run_dir=original.run_dir, start=start, entries=original.entries, without=without)
    _run_ranks(loaded.config, place, ledger, quiet=quiet)
    steps = range(first_step, asked.last_step + 1)
    replayed = {int(row["step"]): row for row in _rows(place, steps)}
    compared = compare_steps(_recorded(original, steps), replayed, steps=steps, skipped=script.skips)
    seen = [strict_json.loads(seen_path(place, rank=rank).read_bytes()) for rank in range(loaded.config.parallel.num_ranks)]
    began = next(entry for entry in read_ledger(ledger.path) if entry.event == Event.ATTEMPT_STARTED)
    environment = dict(began.fields.get("environment") or {})  # type: ignore[call-overload]  # JSON of our own
    told = changed_surroundings(original, environment, first_step=first_step, last_step=asked.last_step)
    return _Done(start, compared, seen, (*notes, *told))


def _run_ranks(config: Any, place: Path, ledger: Ledger, *, quiet: bool) -> None:
    """As `train` does, without anything beside the ranks. Raises what ended them before their last step."""
    from surefoot.cli.train import WARM
    from surefoot.launch.agent import Agent
    from surefoot.launch.director import LocalDirector
    from surefoot.launch.logs import logging_aside

    clock = SystemClock()
    with RunLock.acquire(place, job=uuid.uuid4().hex[:12], clock=clock, lease_s=config.launch.lease_s) as lock:
        agent = Agent(
            config,
            run_dir=place,
            director=LocalDirector(config.launch, num_ranks=config.parallel.num_ranks, counters=fold_counters(read_ledger(ledger.path))),
            entry=ENTRY,
            warm=(*WARM[:-1], "surefoot.cli.replay_rank"),
            ledger=ledger,
            lock=lock,
            clock=clock,
            console=lambda line: say(line) if line.startswith("step ") and not quiet else None,
        )
        with logging_aside():
            exit_code = agent.run()
    if exit_code != EXIT_DONE:
        raise SurefootError("it was asked to leave before it was done", where="replay", hint="the same command begins again")


def _answer(original: Original, asked: _Asked, done: _Done, out: Path | None) -> dict[str, Any]:
    compared = done.compared
    left_out = {one.seq for one in original.left_out}
    interventions = [
        {**asdict(one), "left_out": one.seq in left_out} for one in original.interventions if done.start_step < one.step <= asked.last_step
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(original.run_dir),
        "from": asked.from_step,
        "steps": asked.num_steps,
        "start": {"checkpoint": done.start.id if done.start else None, "step": done.start_step},
        "same": compared.first is None,
        "num_compared": compared.num_compared,
        "num_differing": compared.num_differing,
        "first_difference": asdict(compared.first) if compared.first else None,
        "not_recorded": list(compared.missing),
        "did_not_recur": list(compared.gone),
        "interventions": interventions,
        "without": sorted(left_out),
        "first_nonfinite": first_nonfinite(done.seen),
        "looked_for_nonfinite": asked.name_nonfinite,
        "logits": heads_by_layer(done.seen),
        "notes": list(done.notes),
        "out": str(out) if out is not None else None,
    }
