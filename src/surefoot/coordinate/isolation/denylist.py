"""A list of nodes that a run does not want, in a file: for sites where it may not drain, and beside those where it may.

`<run>/denylist.json` is the run's own; `launch.site_denylist` may name one that several runs share. `surefoot submit slurm` makes
`--exclude` of it, at each requeue too. An entry ends by itself when its time is over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from surefoot.coordinate.isolation.records import Isolation, NodeStanding, is_node_name, is_ours
from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.core.typed_json import record_from_json

DENYLIST_NAME: Final = "denylist.json"
DENYLIST_FORMAT: Final = 1
_LOCK_STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Denied:
    node: str
    reason: str
    since_utc: str
    until_utc: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


class DenylistIsolator:
    """The file at `path`, changed by one process at a time; the lock is waited for `limit_s`."""

    name = "denylist"

    def __init__(self, path: Path, *, clock: Clock, limit_s: float) -> None:
        self._path = path
        self._clock = clock
        self._limit_s = limit_s

    def isolate(self, node: str, *, reason: str, ttl_s: float, evidence: Mapping[str, Any]) -> Isolation:
        if not is_node_name(node):
            return Isolation(self.name, node, "failed", f"{node!r} is no name of a node")
        now = self._clock.utc()
        entry = Denied(node, reason, now, _later(now, ttl_s), evidence)
        return self._change(node, "isolated", lambda standing: entry if standing.state == "serving" else None)

    def status(self, node: str) -> NodeStanding:
        try:
            found = next((each for each in self._read() if each.node == node), None)
        except ConfigError as error:
            return NodeStanding(node, "unknown", str(error))
        if found is None:
            return NodeStanding(node, "serving")
        return NodeStanding(node, "ours" if is_ours(found.reason) else "others", found.reason)

    def release(self, node: str) -> Isolation:
        return self._change(node, "released", lambda standing: node if standing.state == "ours" else None)

    def _change(
        self, node: str, action: Literal["isolated", "released"], change: Callable[[NodeStanding], Denied | str | None]
    ) -> Isolation:
        """`change` says, from the standing under the lock, what to add (an entry), what to take out (a name), or nothing."""
        try:
            with _locked(self._path.parent, clock=self._clock, limit_s=self._limit_s):
                standing = self.status(node)
                done = change(standing)
                if done is None:
                    return self._unchanged(standing, action)
                kept = [each for each in self._read() if each.node != node]
                self._write([*kept, done] if isinstance(done, Denied) else kept)
        except (OSError, ConfigError) as error:
            return Isolation(self.name, node, "failed", f"{self._path}: {error}")
        return Isolation(self.name, node, action, done.reason if isinstance(done, Denied) else standing.reason, f"{action} in {self._path}")

    def _unchanged(self, standing: NodeStanding, action: Literal["isolated", "released"]) -> Isolation:
        wanted = {"isolated": "ours", "released": "serving"}[action]
        if standing.state == wanted:
            return Isolation(self.name, standing.node, "already", standing.reason)
        return Isolation(self.name, standing.node, "left_alone" if standing.state == "others" else "failed", standing.reason)

    def _read(self) -> list[Denied]:
        return read_denylist(self._path, now_utc=self._clock.utc())

    def _write(self, entries: Sequence[Denied]) -> None:
        content = {"version": DENYLIST_FORMAT, "nodes": [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.node)]}
        write_atomic(self._path, strict_json.dumps(content) + "\n")


def read_denylist(path: Path, *, now_utc: str) -> list[Denied]:
    """What is on the list at `now_utc`. Raises ConfigError when the file is there and cannot be read."""
    try:
        content = strict_json.loads(path.read_bytes())
        if not isinstance(content, dict) or not isinstance(content.get("version"), int) or content["version"] > DENYLIST_FORMAT:
            raise ValueError(f"no list of nodes of version {DENYLIST_FORMAT}")
        entries: list[Denied] = [record_from_json(Denied, each) for each in content["nodes"]]
        return [each for each in entries if datetime.fromisoformat(each.until_utc) > datetime.fromisoformat(now_utc)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "mend it or move it away: what stands on it is not excluded until then"
        raise ConfigError(f"the list of denied nodes cannot be read: {error}", where=str(path), hint=hint) from error


def denied_nodes(paths: Sequence[Path], *, now_utc: str) -> list[str]:
    """The names on all these lists, sorted. Raises ConfigError when one cannot be read."""
    return sorted({each.node for path in paths for each in read_denylist(path, now_utc=now_utc) if is_node_name(each.node)})


def _later(utc: str, ttl_s: float) -> str:
    return (datetime.fromisoformat(utc) + timedelta(seconds=ttl_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def _locked(folder: Path, *, clock: Clock, limit_s: float) -> Iterator[None]:
    """The folder itself is the lock, so that no file is left behind. Raises ConfigError when the wait is over."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up_s = clock.monotonic_s() + limit_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic_s() >= give_up_s:
                    raise ConfigError(f"somebody else changes it for more than {limit_s:g} s", where=str(folder)) from None
                clock.sleep(_LOCK_STEP_S)
        yield
    finally:
        os.close(fd)
