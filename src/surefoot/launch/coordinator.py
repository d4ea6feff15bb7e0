"""The coordinator of a job on several nodes: `python -m surefoot.launch.coordinator RUN SETTINGS`, a process of its own, one thread.

It listens, keeps the time, writes down what happened, asks the pure machine, and tells the nodes what was decided. It may be killed at any
moment: what its journal holds is what it knows, and a new one goes on from there while the ranks run. It is tied to no agent's life: it
ends when the job is over and nobody listens any more, when nobody was heard for `idle_s`, or when it sees a newer coordinator.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.coordinate.budget import utc_s
from surefoot.coordinate.members import (
    Begin,
    Decision,
    Happening,
    JobOpened,
    LimitsChanged,
    Membership,
    Refusal,
    Seat,
    SeatGiven,
)
from surefoot.coordinate.membership import advance, due_s, is_acknowledged, why_stale
from surefoot.coordinate.membership_journal import MembershipJournal, read_journal, replay
from surefoot.coordinate.membership_judge import judge_by
from surefoot.coordinate.silence import Silence, look
from surefoot.core import strict_json
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import EXIT_DONE, PeerLost, SurefootError
from surefoot.core.holder import this_process
from surefoot.core.typed_json import record_from_json
from surefoot.launch.coordinator_claim import FOLDER, claim_epoch, is_newest, journal_path, write_contact
from surefoot.launch.coordinator_links import Link, Links
from surefoot.launch.coordinator_settings import CoordinatorSettings
from surefoot.launch.coordinator_wire import (
    Beat,
    Contact,
    Drain,
    Ended,
    FaultSeen,
    Heard,
    Join,
    Leave,
    Message,
    Readmit,
    Ready,
    Refused,
    Release,
    Seated,
    Welcome,
)
from surefoot.launch.coordinator_words import happening_of, happening_of_silence, messages_of

logger = logging.getLogger(__name__)

_HEARD_PER_LINE = 500
_STATE_INTERVAL_S = 5.0


class Coordinator:
    """State, links and journal of one process. `serve` is its life."""

    def __init__(self, run_dir: Path, settings: CoordinatorSettings, *, clock: Clock) -> None:
        self._run_dir, self._settings, self._clock = run_dir, settings, clock
        self._judge = judge_by(settings.launch)
        self.epoch = claim_epoch(run_dir)
        clock.sleep(2 * settings.leases.look_s)  # whoever was about to write has written, or looks at the epoch first
        self._journal = MembershipJournal(journal_path(run_dir))
        self._state = replay(Membership(settings.members), read_journal(journal_path(run_dir)), judge=self._judge)
        self._start_s, self._base_s = clock.monotonic_s(), self._state.at_s
        self._silence = Silence(dict.fromkeys(self._acknowledged(), self._start_s), looked_s=self._start_s)
        self._beats: dict[str, Beat] = {}
        self._heard: set[str] = set()
        self._gone: set[str] = set()
        self._joining: set[str] = set()  # in this turn: not yet in the state
        self._askers: list[tuple[Link, str]] = []
        self._heard_any_s = self._state_written_s = self._start_s
        token = secrets.token_hex(32)
        leases = settings.leases
        welcome = Welcome(settings.run, self.epoch, settings.beat_s, leases.suspect_s, leases.dead_s)
        listener = socket.create_server((settings.bind, settings.port), backlog=1024)
        self._links = Links(listener, token=token, run=settings.run, welcome=welcome)
        self._open_job()
        me = this_process()
        port = int(listener.getsockname()[1])
        write_contact(run_dir, Contact(settings.run, settings.advertise, port, token, self.epoch, os.getpid(), me.boot_id))
        logger.info("epoch %d of the coordinator of %s listens at %s:%d", self.epoch, settings.run, settings.advertise, port)

    def serve(self) -> None:
        """Until the job is over and all have left, or nobody is heard. Raises PeerLost when a newer coordinator is there."""
        try:
            while not self._is_over():
                self.turn(wait_s=self._settings.leases.look_s / 2)
        finally:
            self._links.close()
            self._journal.close()

    def turn(self, *, wait_s: float) -> None:
        """Once: hear, look, decide, tell."""
        happenings = []
        for link, message in self._links.receive(wait_s=wait_s, now_s=self._clock.monotonic_s()):
            happenings += self._hear(link, message)
        now_s = self._clock.monotonic_s()
        if self._silence.looked_s is None or now_s - self._silence.looked_s >= self._settings.leases.look_s:
            happenings += self._look(now_s)
        due = due_s(self._state)
        if happenings or (due is not None and self._at_s(now_s) >= due):
            self._advance(happenings)

    def _open_job(self) -> None:
        settings, opening = self._settings, list[Happening]()
        if self._state.limits != settings.members or self._state.at_s == 0.0:
            opening.append(LimitsChanged(settings.members))
        if self._state.job != settings.job:
            opening.append(JobOpened(settings.job, settings.generation, settings.history, utc_s(self._clock.utc())))
        if opening:
            self._advance(opening)

    def _at_s(self, now_s: float) -> float:
        return self._base_s + now_s - self._start_s

    def _acknowledged(self) -> list[str]:
        return [name for name in self._state.nodes if is_acknowledged(self._state, name)]

    def _is_over(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._state.phase == "over" and self._links.num_open == 0:
            return now_s - self._heard_any_s > self._settings.leases.dead_s
        return now_s - self._heard_any_s > self._settings.idle_s

    def _hear(self, link: Link, message: Message) -> list[Happening]:
        if isinstance(message, Beat):
            self._hear_beat(link, message)
            return []
        if isinstance(message, Join | Ready | FaultSeen | Ended | Leave):
            self._links.speaks_for(link, message.node)
        try:
            happening = happening_of(message)
        except ValueError as error:
            logger.warning("%s says what cannot be understood: %s", link.peer, error)
            return []
        if happening is None:
            return []
        if isinstance(message, Join):
            self._heard.add(message.node)
            self._joining.add(message.node)
        if isinstance(message, Drain | Readmit | Release):
            self._askers.append((link, "" if isinstance(message, Release) else message.node))
        return [happening]

    def _hear_beat(self, link: Link, beat: Beat) -> None:
        """An answer counts for the lease: it is given to those alone that the job counts."""
        node = self._state.nodes.get(beat.node)
        self._links.speaks_for(link, beat.node)
        self._heard_any_s = self._clock.monotonic_s()
        if beat.node in self._joining:
            return  # its join, in this same turn, decides what it is
        if node is None or not is_acknowledged(self._state, beat.node):
            reason = "join first" if node is None else f"it is {node.seat.value}: {node.reason}"
            self._links.answer(link, Refused(beat.node, beat.generation, reason))
            return
        if beat.generation and (stale := why_stale(self._state, beat.node, generation=beat.generation)) is not None:
            self._links.answer(link, Refused(beat.node, beat.generation, stale))
        self._beats[beat.node] = beat
        self._heard.add(beat.node)
        link.heard[beat.node] = beat.sent_s

    def _look(self, now_s: float) -> list[Happening]:
        if not is_newest(self._run_dir, self.epoch):
            raise PeerLost("a newer coordinator has taken over", where=str(self._run_dir / FOLDER), hint="nodes find it by its file")
        self._silence, changes = look(self._silence, heard=self._heard, gone=self._gone, now_s=now_s, limits=self._settings.leases)
        self._heard, self._gone = set(), set()
        for link in self._links.links():
            heard = list(link.heard.items())
            link.heard.clear()
            for start in range(0, len(heard), _HEARD_PER_LINE):
                self._links.answer(link, Heard(dict(heard[start : start + _HEARD_PER_LINE])))
        if now_s - self._state_written_s >= _STATE_INTERVAL_S:
            self._write_state(now_s)
        step = max((beat.step for beat in self._beats.values()), default=0) if changes else 0
        return [happening_of_silence(change, mono_s=now_s, step=step) for change in changes]

    def _advance(self, happenings: Sequence[Happening]) -> None:
        """Written down first, then told: what nobody could read again after a crash has not happened."""
        at_s = self._at_s(self._clock.monotonic_s())
        state, decisions = advance(self._state, happenings, at_s=at_s, judge=self._judge)
        if not is_newest(self._run_dir, self.epoch):
            raise PeerLost("a newer coordinator has taken over", where=str(self._run_dir / FOLDER), hint="nodes find it by its file")
        self._journal.append(happenings, decisions, at_s=at_s, time_utc=self._clock.utc())
        self._state = state
        self._joining.clear()
        for decision in decisions:
            self._tell(decision)
        self._answer_askers(decisions)
        if any(isinstance(decision, Begin) for decision in decisions):
            self._write_state(self._clock.monotonic_s())

    def _answer_askers(self, decisions: Sequence[Decision]) -> None:
        """A person is told on the connection that asked: `refused`, or `seated` with what stands now."""
        refusals = {decision.node: decision.reason for decision in decisions if isinstance(decision, Refusal)}
        for link, target in self._askers:
            if target in refusals:
                self._links.answer(link, Refused(target, self._state.generation, refusals[target]))
            else:
                self._links.answer(link, Seated(target, self._state.phase, self._state.why))
        self._askers.clear()

    def _tell(self, decision: Decision) -> None:
        if not isinstance(decision, SeatGiven | Refusal):
            logger.info("generation %d: %s: %s", decision.generation, type(decision).__name__, decision.reason)
        if isinstance(decision, SeatGiven) and decision.seat is Seat.DEAD:
            self._gone.add(decision.node)
            self._beats.pop(decision.node, None)
        for node, message in messages_of(decision):
            self._links.send(node, message)

    def _write_state(self, now_s: float) -> None:
        """For people and for `status`: what stands in the journal, as it is now. Losing it loses nothing."""
        self._state_written_s = now_s
        state, heard_s = self._state, self._silence.heard_s
        places = {name: index * state.limits.ranks_per_node for index, name in enumerate(state.members)}
        nodes = [
            {
                "node": node.node,
                "name": node.name,
                "state": node.state.value,
                "reason": node.reason,
                "first_rank": places.get(node.node) if node.seat is Seat.ACTIVE else None,
                "silent_s": round(now_s - heard_s[node.node], 3) if node.node in heard_s else None,
                "step": self._beats[node.node].step if node.node in self._beats else None,
            }
            for node in state.nodes.values()
        ]
        content = {
            "format_version": 1,
            "time_utc": self._clock.utc(),
            "epoch": self.epoch,
            "phase": state.phase,
            "generation": state.generation,
            "reason": state.why,
            "num_restarts": state.num_restarts,
            "dropped": dict(self._links.dropped),
            "nodes": nodes,
        }
        write_atomic(self._run_dir / FOLDER / "state.json", strict_json.dumps(content) + "\n", durable=False)


def main(argv: Sequence[str]) -> int:
    """RUN SETTINGS (JSON). Exit 0 when the job is over or nobody is left, 75 when another coordinator has taken over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_dir, settings = Path(argv[0]), record_from_json(CoordinatorSettings, strict_json.loads(argv[1]))
    try:
        Coordinator(run_dir, settings, clock=SystemClock()).serve()
    except SurefootError as error:
        logger.error("%s", error)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
