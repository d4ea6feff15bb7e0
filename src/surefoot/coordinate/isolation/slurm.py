"""Nodes of a Slurm site: drained by `scontrol`, when this user may, and never when somebody else did it first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from surefoot.coordinate.isolation.commands import ask_site
from surefoot.coordinate.isolation.records import Isolation, NodeStanding, State, is_node_name, is_ours

_OUT: Final = ("DRAIN", "DOWN", "FAIL", "MAINT", "RESERVED", "FUTURE")


class SlurmIsolator:
    """`limit_s` bounds every command. A drained node ends what runs on it and takes nothing new; jobs there are not killed."""

    name = "slurm"

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s

    def isolate(self, node: str, *, reason: str, ttl_s: float, evidence: Mapping[str, Any]) -> Isolation:
        """Slurm forgets no drain by itself: `ttl_s` is for those who look, in the list of the run."""
        before = self.status(node)
        if before.state in ("ours", "others"):
            return Isolation(self.name, node, "already" if before.state == "ours" else "left_alone", before.reason)
        if before.state != "serving":
            return Isolation(self.name, node, "failed", before.reason)
        return self._update(node, "State=DRAIN", f"Reason={reason}", action="isolated", wanted="ours")

    def status(self, node: str) -> NodeStanding:
        if not is_node_name(node):
            return NodeStanding(node, "absent", f"{node!r} is no name of a node")
        answer = ask_site(("scontrol", "show", "node", node, "--oneliner"), limit_s=self._limit_s)
        if not answer.is_good:
            known = "not found" not in f"{answer.output} {answer.error}"
            return NodeStanding(node, "unknown" if known else "absent", answer.why())
        return parse_node(node, answer.output)

    def release(self, node: str) -> Isolation:
        before = self.status(node)
        if before.state == "serving":
            return Isolation(self.name, node, "already", "it serves")
        if before.state != "ours":
            return Isolation(self.name, node, "left_alone" if before.state == "others" else "failed", before.reason)
        return self._update(node, "State=RESUME", action="released", wanted="serving")

    def _update(self, node: str, *changes: str, action: Literal["isolated", "released"], wanted: State) -> Isolation:
        """Say it, then look: an exit code of 0 alone is the controller's, not the node's."""
        answer = ask_site(("scontrol", "update", f"NodeName={node}", *changes), limit_s=self._limit_s)
        if not answer.is_good:
            return Isolation(self.name, node, "denied" if answer.is_denied else "failed", answer.why(), answer.command)
        after = self.status(node)
        if after.state != wanted:
            return Isolation(self.name, node, "failed", f"the node is {after.state} all the same: {after.reason}", answer.command)
        return Isolation(self.name, node, action, after.reason, answer.command)


def parse_node(node: str, text: str) -> NodeStanding:
    """What `scontrol show node --oneliner` says. A state like IDLE+DRAIN or DOWN* is out of service, whoever did it."""
    state = re.search(r"\bState=(\S+)", text)
    if state is None:
        return NodeStanding(node, "unknown", f"scontrol says no state: {text.strip()[:200]}")
    told = re.search(r"\bReason=(.*?)(?: \[[^\]]*\])?\s*$", text)
    reason = told[1].strip() if told else ""
    if not any(word in state[1].upper() for word in _OUT):
        return NodeStanding(node, "serving", state[1])
    return NodeStanding(node, "ours" if is_ours(reason) and "DRAIN" in state[1].upper() else "others", reason or state[1])
