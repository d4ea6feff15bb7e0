"""The nursery over the life of an agent: warm when ranks are to be forked, kept over restarts, started again when it died."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.launch.ending import Ending, how_it_ended
from surefoot.launch.evidence import last_words
from surefoot.launch.nursery_link import NurseryLink
from surefoot.launch.watch import NurseryGone, Watch
from surefoot.launch.wire import Ready


class WarmNursery:
    """`link` is the living nursery, None while there is none. `last_code` tells how the last one ended, negative for a signal, None when
    we ended it. `kill_limit_s` bounds the wait for one that we ended."""

    def __init__(self, *, entry: str, warm: Sequence[str], log_path: Path, kill_limit_s: float) -> None:
        self._entry = entry
        self._warm = tuple(warm)
        self._log_path = log_path
        self._kill_limit_s = kill_limit_s
        self._ready = False
        self.link: NurseryLink | None = None
        self.last_code: int | None = None

    def warm_up(self, watch: Watch, *, limit_s: float, clock: Clock) -> Ending | None:
        """Have a nursery that can fork; the ending when that comes to nothing. Leaves at once when asked to: nothing is lost yet.

        Raises SurefootError when it ends by itself: a module that cannot be imported now cannot be imported by the next one.
        """
        deadline_s = clock.monotonic_s() + limit_s
        while not watch.asked:
            if self.link is None:
                self._log_path.parent.mkdir(exist_ok=True)
                self.link = NurseryLink.spawn(entry=self._entry, warm=self._warm, log_path=self._log_path)
            if self._ready:
                return None
            for event in watch.events(self.link):
                self._ready = self._ready or isinstance(event, Ready)
                if isinstance(event, NurseryGone):
                    return self._died_early(watch)
            if clock.monotonic_s() >= deadline_s and not self._ready:
                self.drop(watch)
                return Ending("failed", f"the nursery was not ready within {limit_s:g} s", what="nursery")
        return Ending("left", "asked to leave before any rank was started")

    def drop(self, watch: Watch) -> None:
        """End the nursery, and with it whatever it forked, by the kernel's hand. Raises SurefootError when it does not die."""
        if self.link is not None:
            link, self.link, self._ready = self.link, None, False
            self.last_code = link.close(limit_s=self._kill_limit_s, look=watch.look)

    def _died_early(self, watch: Watch) -> Ending:
        self.drop(watch)
        if self.last_code is not None and self.last_code > 0:
            raise SurefootError(
                f"the workers' modules cannot be imported: {last_words(self._log_path) or f'exit code {self.last_code}'}",
                where=str(self._log_path),
                hint="that file has the traceback; is the environment whole?",
            )
        return Ending(
            "failed", f"{how_it_ended('the nursery', self.last_code)} before it was ready", what="nursery", nursery_code=self.last_code
        )
