"""The state of membership while one batch of happenings is worked in: one copy for the batch, not one for each of ten thousand nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.coordinate.members import Decision, Instructed, Membership, Node, Refusal, Seat, SeatGiven
from surefoot.core.records import Instruction


class Draft:
    """Lives within one call of `membership.advance`. `nodes` and `outstanding` are its own; everything else changes through `set`."""

    def __init__(self, state: Membership, *, at_s: float) -> None:
        self.at_s = at_s
        self.nodes: dict[str, Node] = dict(state.nodes)
        self.outstanding = set(state.outstanding)  # ten thousand that end at once must not copy it as often
        self.state = replace(state, nodes=self.nodes, outstanding=self.outstanding, at_s=at_s)
        self.decisions: list[Decision] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def frozen(self) -> Membership:
        return replace(self.state, outstanding=frozenset(self.outstanding))

    def seat(self, node: str, seat: Seat, reason: str) -> None:
        """Move a node, and say so when that is news."""
        before = self.nodes[node]
        self.nodes[node] = replace(before, seat=seat, reason=reason)
        if before.seat is not seat or before.reason != reason:
            self.decisions.append(SeatGiven(self.state.generation, reason, node, seat))

    def tell(self, node: str, reason: str) -> None:
        """Where a node stands now, when silence changed it."""
        self.decisions.append(SeatGiven(self.state.generation, reason, node, self.nodes[node].state))

    def refuse(self, node: str, reason: str) -> None:
        self.decisions.append(Refusal(self.state.generation, reason, node))

    def instruct(self, nodes: tuple[str, ...], instruction: Instruction) -> None:
        if nodes:
            self.decisions.append(Instructed(self.state.generation, instruction.reason, nodes, instruction))
