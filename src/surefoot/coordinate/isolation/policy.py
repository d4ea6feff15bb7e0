"""Whether a node is taken out of service. Pure: the wish, what is there, and the caps go in; a decision with its reason comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from surefoot.coordinate.isolation.records import Wish

DAY_S: Final = 86400.0

Mode = Literal["dry_run", "ask", "auto"]


@dataclass(frozen=True, slots=True)
class IsolationCaps:
    """At most `max_nodes`, and at most `max_share` of the fleet (but one), within a day; never fewer than `min_nodes` left."""

    mode: Mode
    max_nodes: int
    max_share: float
    min_nodes: int


@dataclass(frozen=True, slots=True)
class Past:
    """A node that this run took out of service, and how long ago. `is_out`: it is not back yet."""

    node: str
    age_s: float
    is_out: bool = True


@dataclass(frozen=True, slots=True)
class IsolationDecision:
    """isolate: do it. ask: a person confirms first. say: print the commands only. refuse: not at all. already: nothing is left to do."""

    kind: Literal["isolate", "ask", "say", "refuse", "already"]
    reason: str


def decide_isolation(
    wish: Wish, *, fleet: Sequence[str], past: Sequence[Past], caps: IsolationCaps, confirmed: bool = False
) -> IsolationDecision:
    """What becomes of `wish`. `fleet` are all nodes of the run, spares included; `confirmed`: a person said yes, which answers `ask` and
    `dry_run`, and lifts neither caps nor the refusal of what is not known."""
    if any(each.node == wish.node and each.is_out for each in past):
        return IsolationDecision("already", f"{wish.node} is out of service by this run already")
    if wish.confidence == "inconclusive":
        return IsolationDecision("refuse", f"the evidence against {wish.node} is inconclusive: no node goes on a guess")
    if wish.grade not in ("node", "planned"):
        return IsolationDecision("refuse", f"a fault of grade {wish.grade} is not one of a single node")
    if wish.node not in fleet:
        return IsolationDecision("refuse", f"{wish.node} is no node of this run: {', '.join(fleet) or 'none is known'}")
    if (why := _over_cap(wish, fleet=fleet, past=past, caps=caps)) is not None:
        return IsolationDecision("refuse", why)
    if confirmed or caps.mode == "auto":
        return IsolationDecision("isolate", wish.reason)
    if caps.mode == "ask":
        return IsolationDecision("ask", f"launch.isolation is ask: `surefoot drain {wish.node} --isolate --yes` confirms it")
    return IsolationDecision("say", "launch.isolation is dry_run: only said")


def _over_cap(wish: Wish, *, fleet: Sequence[str], past: Sequence[Past], caps: IsolationCaps) -> str | None:
    today = {each.node for each in past if each.age_s < DAY_S} - {wish.node}
    # One node may always go: of three, 5% is none, and a cap that allows nothing is spelled max_nodes = 0.
    limit = min(caps.max_nodes, max(1, int(caps.max_share * len(fleet))))
    if len(today) >= limit:
        return f"{len(today)} of {len(fleet)} nodes were taken out within a day, the cap is {limit}: more than single bad nodes is at work"
    out = {each.node for each in past if each.is_out} & set(fleet)
    left = len(fleet) - len(out) - 1
    if left < caps.min_nodes:
        return f"{left} nodes would be left, and the run needs {caps.min_nodes}"
    return None


def decide_readmission(*, passed_for_s: float, burn_in_s: float, num_failed: int, is_ours: bool) -> IsolationDecision:
    """Whether a node that was taken out may serve again: its probes have passed for `passed_for_s` without a failure between.

    `isolate` never comes out of this: `already` is yes, `refuse` no, `say` not yet.
    """
    if not is_ours:
        return IsolationDecision("refuse", "somebody else took it out of service: that is theirs to undo")
    if num_failed:
        return IsolationDecision("refuse", f"{num_failed} probes failed")
    if passed_for_s < burn_in_s:
        return IsolationDecision("say", f"probes have passed for {passed_for_s:.0f} s of {burn_in_s:.0f} s")
    return IsolationDecision("already", f"probes have passed for {passed_for_s:.0f} s")
