"""What is said about a node that is to be, or is, out of service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

PREFIX: Final = "surefoot:"
"""How every reason of ours begins. What begins otherwise was put there by somebody else, and is left alone."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")

State = Literal["serving", "ours", "others", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class Wish:
    """A node that an incident speaks against. `confidence` is that of the culprit, `grade` that of the fault."""

    node: str
    incident: str
    reason: str
    confidence: Literal["certain", "likely", "inconclusive"] = "certain"
    grade: str = "node"

    def words(self) -> str:
        """One line, as it stands in the site's own lists."""
        return reason_of(self.incident, self.reason)


@dataclass(frozen=True, slots=True)
class NodeStanding:
    """serving; ours: out of service by us; others: by somebody else; absent: the site knows no such node; unknown: it did not answer."""

    node: str
    state: State
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What one backend was asked and what came of it. `action`: isolated, released, already, left_alone (another's), failed, denied."""

    backend: str
    node: str
    action: Literal["isolated", "released", "already", "left_alone", "failed", "denied"]
    reason: str
    command: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the node is now as it was wanted."""
        return self.action in ("isolated", "released", "already")


class Isolator(Protocol):
    """A place where a node can be taken out of service. Idempotent; never undoes another's doing; every call ends by its deadline."""

    @property
    def name(self) -> str: ...

    def isolate(self, node: str, *, reason: str, ttl_s: float, evidence: Mapping[str, Any]) -> Isolation: ...

    def status(self, node: str) -> NodeStanding: ...

    def release(self, node: str) -> Isolation: ...


def reason_of(incident: str, reason: str) -> str:
    """`surefoot:<incident>: <reason>`, printable, without quotes, at most 200 characters: schedulers show it in a column."""
    text = " ".join(f"{PREFIX}{incident}: {reason}".split())
    return "".join(letter for letter in text if letter.isprintable() and letter not in "\"'`$\\=")[:200]


def is_ours(reason: str) -> bool:
    return reason.startswith(PREFIX)


def is_node_name(node: str) -> bool:
    """Whether `node` can be a host's name. Nothing else is ever put into a command: schedulers read lists and patterns in it."""
    return _NAME.fullmatch(node) is not None and node.upper() != "ALL"
