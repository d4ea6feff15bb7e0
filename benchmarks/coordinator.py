"""One coordinator and many simulated nodes on few connections: how soon a death is seen, what it costs.

    python -m benchmarks.coordinator [--nodes 10000] [--connections 100] [--deaths 10] [--measure-s 20] [--json]

The coordinator is the real process, over real sockets; a node here is a row in a table that beats every second. Deaths are nodes that stop
beating at a drawn moment. They are seen when the journal has them, on the wall clock of this one machine. CPU and memory are those of the
coordinator's process while nothing happens but beats, then over the deaths.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import selectors
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from surefoot.coordinate.members import MemberLimits
from surefoot.coordinate.silence import SilenceLimits
from surefoot.launch.coordinator_claim import journal_path
from surefoot.launch.coordinator_settings import CoordinatorSettings, start_coordinator
from surefoot.launch.coordinator_wire import (
    BerthGiven,
    Contact,
    Ended,
    Heard,
    Hello,
    Instruct,
    Join,
    Lines,
    Ready,
    Stop,
    decode,
    encode,
    read_contact,
)

LIMIT_S = 120.0
_TICKS_PER_BEAT = 20
_AFTER_S = 12.0  # the last death is 2 s in; the rest is for a machine that others use too


@dataclass(frozen=True, slots=True)
class Measured:
    """`death_s` from the last moment that a node could have beaten; CPU in cores."""

    num_nodes: int
    num_connections: int
    formed_s: float
    death_s: tuple[float, ...]
    num_false_deaths: int
    called_off_s: float
    quiet_cores: float
    cores: float
    peak_memory_bytes: int
    heard_share: float


@dataclass
class Fleet:
    """The simulated nodes: all of what they do happens in `turn`."""

    contact: Contact
    names: list[str]
    num_connections: int
    dead: set[str] = field(default_factory=set)
    generation: dict[str, int] = field(default_factory=dict)
    called_off_s: float | None = None
    num_sent: int = 0
    num_heard: int = 0

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channels = []
        self._lines = [Lines() for _ in range(self.num_connections)]
        self._unsent = [bytearray() for _ in range(self.num_connections)]
        for number in range(self.num_connections):
            channel = socket.create_connection((self.contact.host, self.contact.port))
            channel.setblocking(False)
            self._channels.append(channel)
            self._selector.register(channel, selectors.EVENT_READ, number)
            self._unsent[number] += encode(Hello(self.contact.run, self.contact.token))
        self._beat_heads = {name: f'{{"kind":"beat","node":"{name}","sent_s":'.encode() for name in self.names}
        self._number_of = {name: index % self.num_connections for index, name in enumerate(self.names)}

    def join(self) -> None:
        for name in self.names:
            self._say(name, encode(Join(name, name, "127.0.0.1", 8)) + encode(Ready(name, 1000)))

    def run(self, duration_s: float, *, die_at: dict[str, float] | None = None) -> dict[str, float]:
        """Beat for so long. `die_at`: seconds from now; gives the wall-clock time of each death."""
        start_s, died, tick = time.monotonic(), dict[str, float](), 0
        while (now_s := time.monotonic() - start_s) < duration_s:
            for name, death_s in (die_at or {}).items():
                if name not in self.dead and now_s >= death_s:
                    self.dead.add(name)
                    died[name] = time.time()
            self._beat(tick)
            tick += 1
            until_s = start_s + tick / _TICKS_PER_BEAT
            while (left_s := until_s - time.monotonic()) > 0:
                self._hear(left_s)
        return died

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._selector.close()

    def _beat(self, tick: int) -> None:
        now = f"{time.monotonic():.6f}".encode()
        for name in self.names[tick % _TICKS_PER_BEAT :: _TICKS_PER_BEAT]:
            if name not in self.dead:
                tail = b',"generation":%d,"step":%d}\n' % (self.generation.get(name, 0), tick)
                self._say(name, self._beat_heads[name] + now + tail)
                self.num_sent += 1
        for number in range(self.num_connections):
            self._flush(number)

    def _say(self, name: str, data: bytes) -> None:
        self._unsent[self._number_of[name]] += data

    def _flush(self, number: int) -> None:
        try:
            while self._unsent[number]:
                sent = self._channels[number].send(self._unsent[number])
                del self._unsent[number][:sent]
        except BlockingIOError:
            return

    def _hear(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            number = key.data
            data = self._channels[number].recv(1 << 16)
            if not data:
                raise RuntimeError("the coordinator hung up")
            for line in self._lines[number].feed(data):
                self._take(line)
            self._flush(number)

    def _take(self, line: bytes) -> None:
        message = decode(line)
        if isinstance(message, Heard):
            self.num_heard += len(message.nodes)
        elif isinstance(message, BerthGiven):
            self.generation[message.node] = message.generation
        elif isinstance(message, Stop) and message.node not in self.dead:
            self.called_off_s = self.called_off_s or time.time()
            self.generation[message.node] = 0
            self._say(message.node, encode(Ended(message.node, message.generation, "stopped")))
        elif isinstance(message, Instruct) and message.action == "restart" and message.node not in self.dead:
            self._say(message.node, encode(Ready(message.node, 1000)))


@contextmanager
def coordinator(run_dir: Path, settings: CoordinatorSettings) -> Iterator[tuple[subprocess.Popen[bytes], Contact]]:
    process = start_coordinator(run_dir, settings)
    try:
        give_up_s = time.monotonic() + LIMIT_S
        while (contact := read_contact(run_dir)) is None or contact.pid != process.pid:
            if time.monotonic() > give_up_s or process.poll() is not None:
                raise RuntimeError((run_dir / "logs" / "coordinator.log").read_text())
            time.sleep(0.02)
        yield process, contact
    finally:
        process.kill()
        process.wait()


def measure(*, num_nodes: int, num_connections: int, num_deaths: int, measure_s: float, leases: SilenceLimits, seed: int = 0) -> Measured:
    """A generation of all but `num_deaths` nodes, which are spares; quiet; deaths among all of them, at drawn moments of two beats."""
    names = [f"machine-{index:05d}.boot" for index in range(num_nodes)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        limits = MemberLimits(min_nodes=1, max_nodes=num_nodes - num_deaths, ranks_per_node=8)
        settings = CoordinatorSettings("bench", "job", limits, leases=leases)
        with coordinator(run_dir, settings) as (process, contact):
            fleet = Fleet(contact, names, num_connections)
            try:
                started_s = time.monotonic()
                fleet.join()
                while not fleet.generation:
                    fleet.run(1 / _TICKS_PER_BEAT)
                    if time.monotonic() - started_s > LIMIT_S:
                        raise RuntimeError("no generation began")
                formed_s = time.monotonic() - started_s
                fleet.run(2.0)
                sent, heard, cpu_s = fleet.num_sent, fleet.num_heard, _cpu_s(process.pid)
                fleet.run(measure_s)
                quiet_cores = (_cpu_s(process.pid) - cpu_s) / measure_s
                heard_share = (fleet.num_heard - heard) / max(1, fleet.num_sent - sent)
                rng = random.Random(seed)
                die_at = {name: rng.uniform(0.0, 2.0) for name in rng.sample(names, num_deaths)}
                cpu_s, died = _cpu_s(process.pid), fleet.run(leases.dead_s + _AFTER_S, die_at=die_at)
                cores = (_cpu_s(process.pid) - cpu_s) / (leases.dead_s + _AFTER_S)
                seen, peak = _lapses(run_dir), _peak_memory_bytes(process.pid)
                called_off_s = (fleet.called_off_s or float("nan")) - min(seen.values(), default=float("nan"))
            finally:
                fleet.close()
    death_s = tuple(seen[name] - at_s if name in seen else float("inf") for name, at_s in died.items())
    false = len(seen.keys() - died.keys())
    return Measured(
        num_nodes, num_connections, formed_s, death_s, false, called_off_s, quiet_cores, cores, peak, heard_share
    )  # fmt: skip


def _lapses(run_dir: Path) -> dict[str, float]:
    """When the journal says that each node lapsed."""
    seen: dict[str, float] = {}
    for line in journal_path(run_dir).read_text().splitlines():
        batch = json.loads(line)
        for happening in batch["happenings"]:
            if happening["kind"] == "lapsed":
                seen.setdefault(happening["node"], datetime.fromisoformat(batch["time_utc"]).timestamp())
    return seen


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_memory_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--measure-s", type=float, default=20.0)
    parser.add_argument("--dead-s", type=float, default=SilenceLimits().dead_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    result = measure(
        num_nodes=args.nodes, num_connections=args.connections, num_deaths=args.deaths, measure_s=args.measure_s,
        leases=SilenceLimits(dead_s=args.dead_s), seed=args.seed,
    )  # fmt: skip
    if args.json:
        print(json.dumps(asdict(result)))
        return
    worst, median = max(result.death_s), statistics.median(result.death_s)
    print(f"{args.nodes} nodes on {args.connections} connections; a generation of {args.nodes - args.deaths} after {result.formed_s:.1f} s")
    print(f"deaths seen after     median {median:.2f} s, worst {worst:.2f} s, of {len(result.death_s)}")
    print("each                  " + ", ".join(f"{death_s:.2f}" for death_s in sorted(result.death_s)))
    print(f"alive, taken for dead {result.num_false_deaths}; beats answered {100 * result.heard_share:.1f}%")
    print(f"survivors told        {result.called_off_s:.2f} s after the first was seen")
    print(f"coordinator           {result.quiet_cores:.2f} cores while all is quiet, {result.cores:.2f} over the deaths")
    print(f"peak memory           {result.peak_memory_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
