"""What the agent says to the nursery and to its aides, and they to it: one JSON object per packet of a Unix socket pair, fds beside it.

agent -> nursery    start   {generation, ranks: [{rank, env, fds, out_path, err_path}], env, fds} + the fds that `fds` points into
nursery -> agent    ready   {pid, import_s}                          once, after the warm imports
                    started {generation, pids}                       + one pidfd per rank, in the order of the request
                    exited  {generation, rank, pid, exit_code, signal, mono_s}
agent -> aide       drain   {number, generation, limit_s}            finish what dead ranks left behind; work for `generation` from then on
aide -> agent       drained {number, failures}                       the answer; what could not be finished, in words

SOCK_SEQPACKET keeps message bounds and gives an empty read when the other side is gone. A pidfd is opened by the parent of the rank before
it can be reaped, so it names that process and never a later one with the same number.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.core import strict_json

_MAX_MESSAGE_BYTES = 1 << 17  # below the default socket buffer, so one packet always fits
MAX_FDS = 253  # SCM_MAX_FD of Linux


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank to fork: what is added to its environment, and where its output goes.

    `fds` maps the name of an environment variable to an index into the descriptors sent along; the rank gets the descriptor's number.
    """

    rank: int
    env: Mapping[str, str]
    out_path: str
    err_path: str
    fds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """The ranks of a generation. `env` and `fds` are for all of them, beside what each has for itself: the slots of many ranks are many."""

    generation: int
    ranks: tuple[RankSpec, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    fds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    pid: int
    import_s: float


@dataclass(frozen=True, slots=True)
class Started:
    generation: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended: by its own `exit_code`, or by `signal`. `mono_s` is the nursery's reading of the machine's monotonic clock."""

    generation: int
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    mono_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    number: int
    generation: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    number: int
    failures: tuple[str, ...]


Message = Start | Ready | Started | RankExit | Drain | Drained
_KINDS: Mapping[str, type[Any]] = {
    "start": Start,
    "ready": Ready,
    "started": Started,
    "exited": RankExit,
    "drain": Drain,
    "drained": Drained,
}
_NAMES: Mapping[type[Any], str] = {kind: name for name, kind in _KINDS.items()}


def control_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a fresh control channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(channel: socket.socket, message: Message, *, fds: Sequence[int] = ()) -> None:
    """Send one packet. Raises OSError when the other side is gone and ValueError when the message does not fit one packet."""
    data = strict_json.dumps({"kind": _NAMES[type(message)], **asdict(message)}).encode()
    if len(data) > _MAX_MESSAGE_BYTES or len(fds) > MAX_FDS:
        raise ValueError(f"a control message of {len(data)} bytes and {len(fds)} fds: limits are {_MAX_MESSAGE_BYTES} and {MAX_FDS}")
    socket.send_fds(channel, [data], list(fds))


def receive_message(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """Wait for one packet; (None, []) when the other side is gone. The caller owns the descriptors."""
    try:
        data, fds, flags, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, MAX_FDS)
    except ConnectionResetError:
        return None, []
    if not data:
        return None, []
    for fd in fds:
        os.set_inheritable(fd, False)  # recv_fds does not hand MSG_CMSG_CLOEXEC on to the kernel
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise ValueError(f"a control message was cut off after {len(data)} bytes and {len(fds)} fds")
    content = strict_json.loads(data)
    kind = _KINDS[content.pop("kind")]
    if kind is Start:
        content["ranks"] = tuple(RankSpec(**spec) for spec in content["ranks"])
    if kind is Started:
        content["pids"] = tuple(content["pids"])
    if kind is Drained:
        content["failures"] = tuple(content["failures"])
    message: Message = kind(**content)
    return message, list(fds)
