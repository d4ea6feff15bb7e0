"""What nodes and the coordinator say to each other: one JSON object per line over TCP. One connection may carry many nodes.

node -> coordinator   hello    {run, token, protocol}               first on every connection, or nothing else is heard
                      join     {node, name, address, capacity, machine, generation, step}  here I am; the generation of my ranks
                      ready    {node, port}                         no rank of mine is left; `port` is bound in case rank 0 is here
                      beat     {node, sent_s, generation, step, ranks}  every second; `sent_s` is the node's own monotonic clock
                      fault    {node, generation, fault}            a rank here is lost: said at once, before the evidence and the kill
                      ended    {node, generation, outcome, fault, step}  no rank of this generation is left here, and how it ended
                      leave    {node, reason}                       this node goes; in good order if its ranks run
                      drain    {node, reason, by}                   a person: that node (id or name) is to go at a step boundary
                      readmit  {node, reason, by}                   a person: what was drained or excluded may serve again
                      release  {reason, by}                         a person, or a passed check: what is held goes on
coordinator -> node   welcome  {run, epoch, beat_s, suspect_s, dead_s}  after a good hello
                      heard    {nodes}                              `sent_s` of the newest beat of each node: its lease counts from there
                      berth    {...}                                the place in a generation: start ranks
                      seated   {node, state, reason}                no place for now, and why
                      stop     {node, generation, reason, in_order} end those ranks: at a step boundary when `in_order`, else at once
                      instruct {node, generation, action, ...}      after `ended`: be `ready` again in wait_s, or stop with exit_code
                      refused  {node, generation, reason}           said too late, or of an older generation: kill those ranks

A node kills its own ranks when nine tenths of `dead_s` have passed since the `sent_s` of the last beat of its own that was `heard`. The
coordinator counts from when it received that beat, which is later: so no rank of a node that it takes for dead
is left. It never compares two clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.core import strict_json
from surefoot.core.typed_json import record_from_json

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 18
"""A beat of a node with 64 ranks has 2 KiB, an acknowledgement of 500 nodes 32 KiB."""
ADDRESS_NAME = "coordinator.json"


@dataclass(frozen=True, slots=True)
class Hello:
    run: str
    token: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Join:
    """`node` is machine id and boot id, `machine` the former alone; `address` is where other nodes reach a port of this one."""

    node: str
    name: str
    address: str
    capacity: int
    machine: str = ""
    generation: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    node: str
    port: int


@dataclass(frozen=True, slots=True)
class Beat:
    """`ranks`: (rank, step, phase) of each rank here."""

    node: str
    sent_s: float
    generation: int = 0
    step: int = 0
    ranks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FaultSeen:
    """`fault`: the fields of `records.Fault`."""

    node: str
    generation: int
    fault: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """finished: the run is done here. left: the ranks left as asked. failed: `fault` says by what. stopped: they were called off."""

    node: str
    generation: int
    outcome: Literal["finished", "left", "failed", "stopped"]
    fault: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    node: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Readmit:
    node: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Release:
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Welcome:
    run: str
    epoch: int
    beat_s: float
    suspect_s: float
    dead_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    nodes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BerthGiven:
    """The fields of `director.Berth`, without the listener: whoever leads has had it bound since its `ready`."""

    node: str
    generation: int
    num_restarts: int
    world_size: int
    first_rank: int
    num_local_ranks: int
    master_addr: str
    master_port: int
    node_rank: int
    num_nodes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Seated:
    node: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    node: str
    generation: int
    reason: str
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Instruct:
    """The fields of `records.Instruction`, whose kind is the `action`, for the generation that ended."""

    node: str
    generation: int
    action: Literal["restart", "stop"]
    reason: str
    grade: str
    exit_code: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    node: str
    generation: int
    reason: str


FromNode = Hello | Join | Ready | Beat | FaultSeen | Ended | Leave | Drain | Readmit | Release
ToNode = Welcome | Heard | BerthGiven | Seated | Stop | Instruct | Refused
Message = FromNode | ToNode

_KINDS: Mapping[str, type[Any]] = {
    "hello": Hello, "join": Join, "ready": Ready, "beat": Beat, "fault": FaultSeen, "ended": Ended, "leave": Leave, "drain": Drain,
    "readmit": Readmit, "release": Release, "welcome": Welcome, "heard": Heard, "berth": BerthGiven, "seated": Seated, "stop": Stop,
    "instruct": Instruct, "refused": Refused,
}  # fmt: skip
_NAMES: Mapping[type[Any], str] = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """One line. Raises ValueError when it is longer than MAX_LINE_BYTES."""
    line = strict_json.dumps({**asdict(message), "kind": _NAMES[type(message)]}).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a {_NAMES[type(message)]} of {len(line)} bytes: the limit is {MAX_LINE_BYTES}")
    return line


def decode(line: bytes) -> Message:
    """The message of one line. Raises ValueError when it is none: unknown, incomplete, or a field of another type. Unknown fields of a
    later version are passed over."""
    content = strict_json.loads(line)
    if not isinstance(content, dict) or (kind := _KINDS.get(str(content.get("kind")))) is None:
        raise ValueError("not a message of this protocol")
    message: Message = record_from_json(kind, content)
    return message


class Lines:
    """Cuts a stream into lines. `feed` raises ValueError once one is longer than MAX_LINE_BYTES: its sender is not heard any more."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return (bytes(line) for line in lines if line)


@dataclass(frozen=True, slots=True)
class Contact:
    """What `<run>/coordinator.json` says (mode 0600: the token is in it). Of two coordinators of one run the higher epoch is the one."""

    run: str
    host: str
    port: int
    token: str
    epoch: int
    pid: int
    boot_id: str


def read_contact(run_dir: Path) -> Contact | None:
    """None when there is none, or none that can be read: look again later."""
    try:
        return record_from_json(Contact, strict_json.loads((run_dir / ADDRESS_NAME).read_bytes()))
    except (OSError, ValueError):
        return None
