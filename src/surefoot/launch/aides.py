"""The aides of an agent over its life: started when wanted, again when they died, drained between generations, sent home at the end."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.sections import LaunchSection
from surefoot.launch.aide import AideLink, AideSpec, Lives, next_life
from surefoot.launch.ending import how_it_ended
from surefoot.launch.evidence import last_words
from surefoot.launch.logs import aide_log
from surefoot.launch.slots import SlotMemory
from surefoot.launch.watch import Watch
from surefoot.launch.wire import Drain

logger = logging.getLogger(__name__)

OnLost = Callable[[str, Mapping[str, object]], None]
"""Called with the reason and the fields of `aide.lost`."""

_WAIT_S = 0.05
_NOTICED_S = 1.0
_ANSWER_S = 2.0  # after the limit it says itself what it could not do; one that is stopped says nothing
_WANTED_INTERVAL_S = 1.0  # asking costs a look into a folder, and a second more or less means nothing to who works in idle time


class _Place:
    """One aide as the agent sees it: running, to be started at `due_s`, not wanted yet, or given up (`due_s` is None)."""

    def __init__(self, spec: AideSpec, *, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.link: AideLink | None = None
        self.lives = Lives()
        self.is_wanted = False
        self.due_s: float | None = 0.0
        self.started_s = 0.0
        self.is_ending = False


class Aides:
    """`look` is called a few times per second and never blocks; the rest is called while there are no ranks."""

    def __init__(
        self,
        specs: Sequence[AideSpec],
        *,
        run_dir: Path,
        slots: SlotMemory | None,
        limits: LaunchSection,
        generation: int,
        clock: Clock,
        on_lost: OnLost,
    ) -> None:
        self._places = [_Place(spec, log_path=aide_log(run_dir, spec.name)) for spec in specs]
        self._slots = slots
        self._limits = limits
        self._generation = generation
        self._clock = clock
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._ask_wanted_s = 0.0
        self._leaving = False

    @property
    def pids(self) -> dict[str, int]:
        return {place.spec.name: place.link.pid for place in self._places if place.link is not None}

    def look(self) -> None:
        """Reap who died, and start who is wanted and due."""
        if self._leaving:
            return
        now_s = self._clock.monotonic_s()
        ask = now_s >= self._ask_wanted_s
        if ask:
            self._ask_wanted_s = now_s + _WANTED_INTERVAL_S
        for place in self._places:
            if place.is_ending:
                continue
            self._reap(place)
            if place.link is None and place.due_s is not None and now_s >= place.due_s and self._is_wanted(place, ask=ask):
                self._start(place)

    def drain(self, watch: Watch, *, generation: int, limit_s: float) -> list[str]:
        """Have who keeps the slots finish what dead ranks staged, before `generation` begins; what that came short of, in words.

        One that is not done within `limit_s` is killed: it must not go on beside ranks that may sweep away what it works on.
        """
        failures: list[str] = []
        for place in self._places:
            if place.spec.keeps_slots:
                failures += self._drain(place, watch, generation=generation, limit_s=limit_s)
        self._generation = generation  # whoever dies while it drains is started again for what is drained
        return failures

    def dismiss(self, watch: Watch, *, finished: bool, left_s: Callable[[], float], say: Callable[[str], None]) -> None:
        """The run is over: let each finish, one after the other and within its own limit, then kill. None is left when this returns.

        `left_s` tells how long whoever asked to leave still waits. A wait that a person would notice is said.
        """
        for place in self._places:
            if place.spec.only_when_finished and (not finished or watch.asked):
                continue
            self._let_finish(place, watch, left_s=left_s, say=say)
        self.kill(watch)

    def kill(self, watch: Watch) -> None:
        """End all at once. One that hangs in the kernel is said: it is as good as dead, and its number is given back with this process."""
        self._leaving = True
        for place in self._places:
            place.due_s = None
            if place.link is not None:
                place.link.kill()  # all of them, before anything that waits
        for place in self._places:
            self._put_down(place, watch)

    def _is_wanted(self, place: _Place, *, ask: bool) -> bool:
        place.is_wanted = place.is_wanted or (ask and place.spec.wanted())
        return place.is_wanted

    def _start(self, place: _Place) -> None:
        slots = self._slots if place.spec.keeps_slots else None
        place.started_s = self._clock.monotonic_s()
        try:
            place.link = AideLink.spawn(place.spec.argv, generation=self._generation, log_path=place.log_path, slots=slots)
        except OSError as error:
            self._lose(place, f"the {place.spec.name} could not be started: {error}", code=None)

    def _reap(self, place: _Place) -> int | None:
        """How it ended, when it just did, unasked."""
        code = place.link.end() if place.link is not None else None
        if code is not None:
            place.link = None
            words = last_words(place.log_path) if code > 0 else None
            self._lose(place, how_it_ended(f"the {place.spec.name}", code) + (f"; last words: {words}" if words else ""), code=code)
        return code

    def _lose(self, place: _Place, reason: str, *, code: int | None) -> None:
        now_s = self._clock.monotonic_s()
        wait_s, place.lives = next_life(place.lives, lived_s=now_s - place.started_s, limits=self._limits)
        place.due_s = None if wait_s is None else now_s + wait_s
        if self._leaving:
            place.due_s, then = None, ""
        else:
            then = "it is not started again" if wait_s is None else f"started again{f' in {wait_s:g} s' if wait_s else ''}"
        logger.warning("%s%s (%s)", reason, f"; {then}" if then else "", place.log_path)
        exit_code, number = (code, None) if code is None or code >= 0 else (None, -code)
        fields = {"name": place.spec.name, "exit_code": exit_code, "signal": number, "wait_s": None if place.due_s is None else wait_s}
        self._on_lost(reason, fields)

    def _drain(self, place: _Place, watch: Watch, *, generation: int, limit_s: float) -> list[str]:
        name = place.spec.name
        deadline_s = self._clock.monotonic_s() + limit_s + _ANSWER_S
        if place.due_s is not None:
            place.due_s = 0.0  # a restart of ranks waits for it: now is the time
        asked: AideLink | None = None
        request = Drain(next(self._numbers), generation, limit_s)
        while not watch.kill_asked:
            watch.look()  # reaps it and starts it again
            if place.link is None and place.due_s is None:
                return [f"there is no {name} any more"]
            if place.link is not None and place.link is not asked:
                asked = place.link
                asked.ask_to_drain(request)
            if place.link is None:
                self._clock.sleep(_WAIT_S)
            elif (answer := place.link.hear(wait_s=_WAIT_S)) is not None and answer.number == request.number:
                return list(answer.failures)
            if self._clock.monotonic_s() >= deadline_s:
                self._put_down(place, watch)
                return [f"the {name} was not done within {limit_s:g} s and was killed"]
        return [f"the {name} was given no time: interrupted twice"]

    def _let_finish(self, place: _Place, watch: Watch, *, left_s: Callable[[], float], say: Callable[[str], None]) -> None:
        limit_s = min(left_s(), place.spec.end_limit_s)
        if limit_s <= 0.0:
            return
        if place.link is None and place.due_s is not None and place.spec.wanted():
            self._start(place)
        if (link := place.link) is None:
            return
        link.hang_up()
        say_s = self._clock.monotonic_s() + _NOTICED_S
        deadline_s = self._clock.monotonic_s() + limit_s
        self._leaving = True
        while (code := link.end()) is None and self._clock.monotonic_s() < deadline_s and left_s() > 0.0:
            if place.spec.only_when_finished and watch.asked:
                return
            if self._clock.monotonic_s() >= say_s:
                say_s = math.inf
                say(f"waiting at most {limit_s:.3g} s for the {place.spec.name} to finish")
            watch.look()
            self._clock.sleep(_WAIT_S)
        if code is not None:
            place.link = None
            if code != 0:
                self._lose(place, how_it_ended(f"the {place.spec.name}", code), code=code)

    def _put_down(self, place: _Place, watch: Watch) -> None:
        link, place.link = place.link, None
        if link is None:
            return
        link.kill()
        place.is_ending = True  # nobody takes its place while this looks after other things
        deadline_s = self._clock.monotonic_s() + self._limits.kill_limit_s
        while link.end() is None and self._clock.monotonic_s() < deadline_s:
            watch.look()
            self._clock.sleep(_WAIT_S / 5)
        place.is_ending = False
        if link.end() is None:
            logger.warning("the %s (pid %d) hangs in the kernel %g s after SIGKILL", place.spec.name, link.pid, self._limits.kill_limit_s)
