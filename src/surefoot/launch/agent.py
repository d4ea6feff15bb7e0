"""The agent: supervises the ranks of a run on this machine, from the first fork to the end of the run. Torch-free.

Per generation it opens a fresh port and a fresh beats board, has the warm nursery fork the ranks, and watches them. When one is lost it
writes the evidence down, kills the rest, makes sure that none is left, ledgers it, and asks a pure policy whether to start again.

What ranks stage of a save lies in memory of the agent's, and aides beside them bring it to where it is kept. So between two generations
the agent has what the dead ones staged whole brought home (`drain`): the next ones resume from it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from surefoot.coordinate.budget import utc_s
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock
from surefoot.core.errors import EXIT_DONE, EXIT_RETRY, PeerLost, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import Fault, Instruction
from surefoot.core.sections import RunConfig
from surefoot.launch.aide import AideSpec
from surefoot.launch.aides import Aides
from surefoot.launch.crew import Crew
from surefoot.launch.director import Berth, Director
from surefoot.launch.ending import Ending
from surefoot.launch.evidence import ending_words, stop_error
from surefoot.launch.fault import fault_of, loss_fields
from surefoot.launch.generation import Post, follow, fork_ranks, put_down
from surefoot.launch.lead import Lead
from surefoot.launch.logs import Echo, nursery_log
from surefoot.launch.probing import probe_after_fault
from surefoot.launch.recovery_split import RecoverySplit, begin_split
from surefoot.launch.signals import LeaveSignals
from surefoot.launch.slots import SlotMemory
from surefoot.launch.status import Pulse
from surefoot.launch.trim import LogTrimmer
from surefoot.launch.warm import WarmNursery
from surefoot.launch.watch import NurseryGone, Watch
from surefoot.observe.halts import refuse_halted, refuse_stopped
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_counters, fold_lineage

logger = logging.getLogger(__name__)

# Ranks that were killed at the end of the grace may have staged a save: it gets this moment even then. No setting: it adds to the grace.
_LAST_MOMENT_S = 5.0


class Agent:
    """Runs `entry` ("pkg.mod:function") as ranks until the run is over; how many, and when again, says `director`. `warm` are the modules
    imported before the fork. `aides` work beside the ranks.

    The caller holds `lock`; the agent renews it. On one of several machines `lead` says how it comes and goes with rank 0. `console` gets
    the lines that rank 0 writes to its stdout, from a thread of their own.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        director: Director,
        entry: str,
        warm: Sequence[str],
        ledger: Ledger,
        lock: RunLock | None,
        clock: Clock,
        console: Callable[[str], None],
        aides: Sequence[AideSpec] = (),
        lead: Lead | None = None,
    ) -> None:
        self._launch, self._observe, self._checkpoint = config.launch, config.observe, config.checkpoint
        self._run_dir = run_dir.absolute()
        self._director = director
        self._ledger = ledger
        self._lead = lead or Lead.here(lock, ledger=ledger)
        self._job = self._lead.job
        self._clock = clock
        self._console = console
        self._nursery = WarmNursery(entry=entry, warm=warm, log_path=nursery_log(self._run_dir), kill_limit_s=config.launch.kill_limit_s)
        self._pulse = Pulse(
            self._run_dir, lock=lock, status_interval_s=config.observe.status_interval_s, lease_s=config.launch.lease_s, clock=clock
        )
        self._crew: Crew | None = None
        self._watch: Watch | None = None
        self._aide_specs = tuple(aides)
        self._aides: Aides | None = None
        counters = fold_counters(read_ledger(ledger.path))
        self._generation, self._attempt, self._step = counters.generation, counters.attempt, counters.step
        self._step_known = False
        self._num_restarts = 0
        self._opened_s = 0.0
        self._split: RecoverySplit | None = None

    def run(self) -> int:
        """Supervise until the run is over: 0 when it is finished, 75 when it was asked to leave. Call it in the main thread.

        Raises what a worker meant by its exit code, with its words; Deterministic when restarts make no progress; SurefootError when they
        are used up or a killed rank does not die; PeerLost when the run was taken over. Whatever happens, no rank outlives it.
        """
        with LeaveSignals() as signals, self._slot_memory() as slots:
            self._watch = watch = Watch(signals, clock=self._clock, on_look=self._look)
            echo, trimmer = Echo(self._console), LogTrimmer(self._run_dir, max_bytes=self._observe.max_log_bytes)
            post = Post(self._run_dir, self._launch, self._observe, self._clock, watch, self._nursery, echo, trimmer, slots)
            self._aides = aides = self._beside(slots)
            finished = False
            try:
                while (ending := self._run_generation(post)).kind == "failed" or self._goes_on(ending, post):
                    if ending.kind == "failed":
                        self._wait(post, wait_s=self._decide(ending, post).wait_s)
                finished = ending.kind == "finished"
                return EXIT_DONE if finished else EXIT_RETRY
            except PeerLost:
                aides.kill(watch)  # the run is somebody else's now
                raise
            finally:
                self._close(post, aides, finished=finished)

    @contextmanager
    def _slot_memory(self) -> Iterator[SlotMemory | None]:
        """For as long as the agent lives; None where no copies are kept in memory, so that ranks have their own."""
        if "memory" not in self._checkpoint.tiers or not self._director.is_alone:
            yield None
            return
        slots = SlotMemory.create(num_ranks=self._director.num_local_ranks, num_slots=self._checkpoint.num_slots)
        try:
            yield slots
        finally:
            slots.close()

    def _beside(self, slots: SlotMemory | None) -> Aides:
        def on_lost(reason: str, fields: Mapping[str, object]) -> None:
            self._append_if_possible(Event.AIDE_LOST, rule="launch", reason=reason, fields=fields)

        return Aides(
            [self._lead.only(spec) for spec in self._aide_specs if slots is not None or not spec.keeps_slots],
            run_dir=self._run_dir,
            slots=slots,
            limits=self._launch,
            generation=self._generation + 1,
            clock=self._clock,
            on_lost=on_lost,
        )

    def _close(self, post: Post, aides: Aides, *, finished: bool) -> None:
        """No rank is left by now, so a process that cannot be ended changes nothing about how the run ended."""
        try:
            self._nursery.drop(post.watch)
            aides.dismiss(post.watch, finished=finished, left_s=lambda: self._time_to_leave_s(post), say=post.echo.say)
        except SurefootError as error:
            logger.warning("%s", error)
        self._director.close()
        self._lead.close()
        post.trimmer.close()
        post.echo.close()

    def _time_to_leave_s(self, post: Post) -> float:
        """Whoever asked to leave waits no longer than the grace, and not at all after a second Ctrl-C."""
        if post.watch.kill_asked:
            return 0.0
        if post.watch.asked_s is None:
            return math.inf
        return max(0.0, post.watch.asked_s + self._launch.grace_s - self._clock.monotonic_s())

    def _run_generation(self, post: Post) -> Ending:
        """One start of the ranks and how it ended. Nothing of it is left when this returns."""
        post.watch.look()  # starts the aides, which get ready beside the nursery
        ending = self._nursery.warm_up(post.watch, limit_s=self._launch.init_limit_s, clock=self._clock)
        berth = self._director.berth(look=lambda: _look_whether_asked(post)) if ending is None else None
        if ending is None and berth is None:
            ending = Ending("left", "asked to leave before there was a place for its ranks", in_good_order=True)
        if berth is not None:
            self._open_generation(berth)
            self._crew = crew = fork_ranks(post, berth, job=self._job)
            try:
                self._director.begun(crew)
                ending = follow(post, crew, called_off=self._director.called_off, asked_to_leave=self._director.asked_to_leave)
                self._step, self._step_known = crew.step() or self._step, crew.knows_its_step()
                if not ending.in_good_order:
                    if ending.kind == "failed" and ending.what != "node":
                        self._director.lost(self._fault(ending))
                    ending = put_down(post, crew, ending)
            finally:
                self._crew = None
                self._director.emptied()
                crew.close()
        assert ending is not None
        self._attempt = fold_counters(read_ledger(self._ledger.path)).attempt
        if not ending.in_good_order:
            self._record(ending)
            self._probe(ending, post)
        self._drain(post)
        self._split = begin_split(ending, stopped_s=self._clock.monotonic_s())
        return ending

    def _probe(self, ending: Ending, post: Post) -> None:
        """Whether the node is sound, while none of its ranks runs. A finding is evidence beside the rest, and no decision."""
        if ending.kind == "failed":
            since_s, evidence = self._opened_s, ending.evidence
            probe_after_fault(self._launch, run_dir=self._run_dir, evidence=evidence, since_boot_s=since_s, look=post.watch.look)

    def _drain(self, post: Post) -> None:
        """No rank is left: what they staged whole is committed before anybody resumes. What cannot be is said, and stops nothing."""
        if self._aides is None:
            return
        limit_s = min(self._checkpoint.upload_limit_s, max(_LAST_MOMENT_S, self._time_to_leave_s(post)))
        for failure in self._aides.drain(post.watch, generation=self._generation + 1, limit_s=limit_s):
            logger.warning("what the ranks staged may be lost: %s", failure)
            self._append_if_possible(Event.SAVE_FAILED, rule="drain", reason=failure, fields={})

    def _open_generation(self, berth: Berth) -> None:
        """Fence the past: from this line on the ledger refuses every writer of an older generation."""
        self._lead.follow(berth, lock_of=self._pulse)
        self._generation, self._num_restarts = berth.generation, berth.num_restarts
        self._opened_s = self._clock.monotonic_s()
        pids = {"agent_pid": os.getpid(), "nursery_pid": self._nursery.link.pid if self._nursery.link else None}
        pids |= {f"{name}_pid": pid for name, pid in self._aides.pids.items()} if self._aides else {}
        self._append(Event.GENERATION_STARTED, fields={"world_size": berth.world_size, "num_nodes": berth.num_nodes, **pids})
        self._pulse.now_due()

    def _record(self, ending: Ending) -> None:
        """What the ranks could not ledger themselves."""
        if ending.what is not None:
            event = Event.NURSERY_LOST if ending.what == "nursery" else Event.RANK_LOST
            fault = self._fault(ending)
            fields = {**loss_fields(ending, fault), "incident": self._relative(ending.evidence)}
            self._append_if_possible(event, rule=ending.what, reason=fault.reason, fields=fields)
        if ending.kind == "left":
            logger.warning("%s", ending.reason)
            self._append(Event.RUN_LEFT, rule="launch", reason=ending.reason)

    def _goes_on(self, ending: Ending, post: Post) -> bool:
        """Whether the ranks start again although they ended in good order: where another machine joins, or leaves. Raises where the job is
        held, or ended, for a reason of its own."""
        outcome: Literal["finished", "left"] = "finished" if ending.kind == "finished" else "left"
        instruction = self._director.over(outcome, look=post.watch.look)
        if instruction is None or instruction.kind == "restart":
            return instruction is not None
        if instruction.exit_code not in (EXIT_DONE, EXIT_RETRY):
            raise stop_error(self._run_dir, self._generation, ending, instruction)
        return False

    def _decide(self, ending: Ending, post: Post) -> Instruction:
        """Restart, with the wait before it; a stop is raised as the error that it stands for."""
        entries = read_ledger(self._ledger.path)
        head = fold_lineage(entries).head
        fault = self._fault(ending, committed_step=head.step if head is not None else -1)
        instruction = self._director.ended(fault, look=post.watch.look)  # other machines are told even where a line of the ledger ends it
        refuse_halted(entries)  # in the words of the rule that halted it, or of the person who did
        refuse_stopped(entries, generation=self._generation)
        fields = {
            "kind": instruction.kind,
            "exit_code": instruction.exit_code,
            "wait_s": instruction.wait_s,
            "grade": instruction.grade.value,
        }
        self._append_if_possible(Event.RESTART_DECIDED, rule=instruction.grade.value, reason=instruction.reason, fields=fields)
        if instruction.kind == "stop":
            raise stop_error(self._run_dir, self._generation, ending, instruction)
        words = ending_words(self._run_dir, self._generation, ending)
        parts = [
            instruction.reason,
            f"in {instruction.wait_s:g} s" if instruction.wait_s else "",
            f"last words: {words}" if words else "",
            f"evidence: {ending.evidence}" if ending.evidence else "",
        ]
        logger.warning("%s", "; ".join(part for part in parts if part))
        return instruction

    def _fault(self, ending: Ending, *, committed_step: int = -1) -> Fault:
        fault = fault_of(ending, step=self._step, step_known=self._step_known)
        return replace(fault, committed_step=committed_step, utc_s=utc_s(self._clock.utc()))

    def _relative(self, evidence: Path | None) -> str | None:
        return str(evidence.relative_to(self._run_dir)) if evidence else None

    def _wait(self, post: Post, *, wait_s: float) -> None:
        """Before a restart; a wish to leave ends it."""
        until_s = self._clock.monotonic_s() + wait_s
        while self._clock.monotonic_s() < until_s and not post.watch.asked:
            if NurseryGone() in post.watch.events(self._nursery.link):
                self._nursery.drop(post.watch)

    def _append(self, event: Event, *, rule: str = "", reason: str = "", fields: Mapping[str, object] | None = None) -> None:
        self._lead.append(
            event, generation=self._generation, attempt=self._attempt, step=self._step, rule=rule, reason=reason, fields=fields
        )

    def _append_if_possible(self, event: Event, *, rule: str, reason: str, fields: Mapping[str, object]) -> None:
        """For the account of a failure whose cause, a full disk say, may hit the ledger too: it must not take the failure's place."""
        try:
            self._append(event, rule=rule, reason=reason, fields=fields)
        except PeerLost:
            raise  # the run is somebody else's now
        except SurefootError as error:
            logger.warning("%s could not be ledgered: %s", event, error)

    def _look(self) -> None:
        if self._watch is not None and self._watch.asked:
            self._director.leave(f"its agent received {self._watch.asked[0].name}")
        self._director.look()
        if self._aides is not None:
            self._aides.look()
        if self._split is not None and self._crew is not None and self._split.take(self._crew.board.read_all()):
            split, self._split = self._split, None
            self._step = self._crew.step()
            words = "from the fault to the first new step"
            self._append_if_possible(Event.RECOVERY_MEASURED, rule="launch", reason=words, fields={"recovery": split.as_json()})
        try:
            self._pulse.beat(
                self._crew,
                generation=self._generation,
                attempt=self._attempt,
                step=self._step,
                num_restarts=self._num_restarts,
            )
        except PeerLost:
            if self._crew is not None or not self._lead.is_passed_on():
                raise  # ranks of a past generation, or another job: this one must end
            self._pulse.lock = None


def _look_whether_asked(post: Post) -> bool:
    post.watch.look()
    return bool(post.watch.asked)
