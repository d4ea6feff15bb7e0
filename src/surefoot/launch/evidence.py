"""What is written down about a failed generation before anything of it is killed: `incidents/g<generation>.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.coordinate.culprit import Culprit, find_culprit
from surefoot.coordinate.isolation.site import facts_of, site_commands, this_node
from surefoot.coordinate.witness import Alarm, Witness
from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import SurefootError, error_for_exit_code
from surefoot.core.records import Instruction
from surefoot.launch.crew import Crew
from surefoot.launch.ending import Ending
from surefoot.launch.logs import generation_logs, last_lines, nursery_log, rank_paths


def incident_path(run_dir: Path, generation: int) -> Path:
    return run_dir / "incidents" / f"g{generation}.json"


def write_incident(run_dir: Path, crew: Crew, ending: Ending, *, witnesses: Sequence[Witness], clock: Clock) -> Path:
    """Who ended how, what each rank did last, and the last lines that each wrote. Takes milliseconds: the ranks wait for their end."""
    record = {
        "generation": crew.generation,
        "time_utc": clock.utc(),
        "kind": ending.kind,
        "what": ending.what,
        "reason": ending.reason,
        "culprit": ending.verdict,
        "alarm": ending.alarm,
        "detected_mono_s": ending.detected_mono_s,
        "collective": ending.verdict.collective if ending.verdict else None,
        "exits": crew.exits,
        "witnesses": witnesses,
        "ranks": [_rank_record(run_dir, crew, rank, now_s=clock.monotonic_s()) for rank in crew.ranks],
        "commands": _commands(run_dir, crew.generation),
        "nursery_lines": last_lines(nursery_log(run_dir), num_lines=10),
    }
    path = incident_path(run_dir, crew.generation)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, strict_json.dumps(record, indent=2))
    return path


def _commands(run_dir: Path, generation: int) -> dict[str, str]:
    """What a person types about this node at this site."""
    return site_commands(facts_of(os.environ, run=str(run_dir), node=this_node(os.environ), incident=f"g{generation}"))


def find_out(run_dir: Path, crew: Crew, ending: Ending, witnesses: Sequence[Witness], *, asked_to_leave: bool) -> Culprit | None:
    """Who is to blame for an ending of ranks; None where it was the nursery's, a deadline's, or nobody's."""
    if ending.what not in ("rank", "node"):
        return None
    alarm = ending.alarm or Alarm(
        "node" if ending.what == "node" else "exit",
        (ending.culprit.rank,) if ending.culprit else (),
        ending.reason,
        ending.detected_mono_s,
    )
    if ending.what == "node":
        return None if ending.alarm is None else find_culprit(alarm, witnesses)
    return find_culprit(alarm, witnesses, facts=crew.host.facts(asked_to_leave=asked_to_leave))


def complaints(run_dir: Path, generation: int) -> dict[int, Mapping[str, Any]]:
    """By rank: the error that its entry point left as `rank_<r>.error.json`; one that cannot be read counts with its text as `what`."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in generation_logs(run_dir, generation).glob("rank_*.error.json"):
        rank = int(path.name.removeprefix("rank_").removesuffix(".error.json"))
        text = path.read_text(errors="replace")
        try:
            found[rank] = {"what": text, **strict_json.loads(text)["error"]}
        except (ValueError, KeyError, TypeError):
            found[rank] = {"what": text}
    return found


def last_words(path: Path) -> str | None:
    """The last line of a file that says anything: of a traceback, the error itself."""
    return next((line.strip() for line in reversed(last_lines(path)) if line.strip()), None)


def ending_words(run_dir: Path, generation: int, ending: Ending) -> str | None:
    """The last words of whoever is blamed, on stderr. Who was killed had no time for any: what stands there is about something else."""
    if ending.what == "nursery":
        return last_words(nursery_log(run_dir)) if ending.nursery_code is not None and ending.nursery_code >= 0 else None
    if ending.culprit is None or ending.culprit.signal is not None:
        return None
    return last_words(rank_paths(run_dir, generation, ending.culprit.rank)[1])


def where_to_look(run_dir: Path, generation: int, ending: Ending) -> Path:
    """The evidence about this ending; where none was written, what the processes said themselves."""
    if ending.evidence is not None:
        return ending.evidence
    return nursery_log(run_dir) if ending.what == "nursery" else generation_logs(run_dir, generation)


def stop_error(run_dir: Path, generation: int, ending: Ending, instruction: Instruction) -> SurefootError:
    """The error that ends the agent: in the worker's words where it meant to stop the run, else in those of the policy."""
    kind = error_for_exit_code(instruction.exit_code)
    rank = ending.culprit.rank if ending.culprit is not None else None
    complaint = complaints(run_dir, generation).get(rank) if rank is not None else None
    who = f"rank {rank}, " if rank is not None else ""
    where = "the nursery" if ending.what == "nursery" else f"{who}generation {generation}"
    hint = f"evidence: {where_to_look(run_dir, generation, ending)}"
    if complaint is not None and ending.culprit is not None and ending.culprit.exit_code == instruction.exit_code:
        kind = next((refined for refined in kind.__subclasses__() if refined.code == complaint.get("code")), kind)
        return kind(str(complaint["what"]), where=str(complaint.get("where") or where), hint=str(complaint.get("hint") or hint))
    words = ending_words(run_dir, generation, ending)
    return kind(instruction.reason + (f"; last words: {words}" if words else ""), where=where, hint=hint)


def _rank_record(run_dir: Path, crew: Crew, rank: int, *, now_s: float) -> dict[str, object]:
    beat = crew.board.read(rank)
    out_path, err_path, _ = rank_paths(run_dir, crew.generation, rank)
    return {
        "rank": rank,
        "pid": crew.pid(rank),
        "alive": rank in crew.alive(),
        "last_beat": {"phase": beat.phase.label, "step": beat.step, "age_s": round(now_s - beat.mono_s, 3)} if beat.num_beats else None,
        "last_lines": last_lines(out_path, num_lines=5),
        "last_error_lines": last_lines(err_path),
        "error": complaints(run_dir, crew.generation).get(rank),
    }
