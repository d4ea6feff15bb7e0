"""The site's half of `surefoot drain`: nodes out of service and back, by the policy, each in the ledger."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from surefoot.cli.ledgering import tell
from surefoot.cli.operators import Told, user_at_host
from surefoot.config import load_config
from surefoot.coordinate.isolation.burn_in import burn_in
from surefoot.coordinate.isolation.policy import IsolationCaps, Past, decide_isolation
from surefoot.coordinate.isolation.records import Isolation, Isolator, Wish
from surefoot.coordinate.isolation.site import account, backends_of, carry_out, facts_of, site_commands, this_node
from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import is_sound
from surefoot.coordinate.probes.run import THOROUGH, run_probes
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import LaunchSection
from surefoot.observe.isolations import past_isolations
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.run_dir import CONFIG_NAME, require_run

_PROBE_EVERY_S: Final = 10.0
_PROBE_LIMIT_S: Final = 180.0  # a cold import of torch from a slow disk included


def isolate_node(run_dir: Path, node: str, *, cause: str, confirmed: bool) -> Told:
    """Take `node` out of service, or say what would be done. Raises ConfigError when the policy refuses, SurefootError when all failed.

    The site knows which nodes it has, so the fleet is not asked for: a person names the node.
    """
    limits, clock = _limits(run_dir), SystemClock()
    entries = read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)
    past = [Past(each.node, each.age_s, each.is_out) for each in past_isolations(entries, now_utc=clock.utc())]
    wish = Wish(node, "by-hand", cause or "asked for by a person", grade="planned")
    caps = IsolationCaps("auto" if confirmed else "dry_run", limits.isolation_max_nodes, 1.0, min_nodes=0)
    fleet = tuple(dict.fromkeys((node, *(each.node for each in past))))
    decision = decide_isolation(wish, fleet=fleet, past=past, caps=caps)
    if decision.kind == "refuse":
        raise ConfigError(decision.reason, where=node, hint="launch.isolation_max_nodes is the cap; by hand: the site's own command")
    backends = _backends(run_dir, limits, clock=clock)
    done = carry_out(decision, wish, backends=backends, ttl_s=limits.isolation_ttl_s)
    more = account(
        decision, wish, done=done, facts=facts_of(os.environ, run=str(run_dir), node=node, incident=wish.incident, reason=wish.reason)
    )
    if decision.kind != "isolate":
        commands = "\n".join(f"  {name:<10} {command}" for name, command in more["commands"].items())
        words = decision.reason if decision.kind == "already" else f"nothing is done without --yes; at this site:\n{commands}"
        return Told("drain", run_dir, "done" if decision.kind == "already" else "given", words, by=user_at_host(), more=more)
    _refuse_failed(done, node)
    entry = tell(
        run_dir, Event.NODE_ISOLATED, rule="drain", reason=cause, fields={"node": node, "by": user_at_host(), "done": _plain(done)}
    )
    words = f"{node} is out of service: {_in_words(done)}; `surefoot drain {node} --run {run_dir} --readmit` lets it back"
    return Told("drain", run_dir, "done", words, by=user_at_host(), step=entry.step, seq=entry.seq, more=more)


def readmit_node(run_dir: Path, node: str, *, cause: str, confirmed: bool) -> Told:
    """Let `node` serve again where this run, or another of ours, took it out: after a burn-in on that very node, or on a person's word."""
    limits, clock = _limits(run_dir), SystemClock()
    backends = _backends(run_dir, limits, clock=clock)
    standings = {backend.name: backend.status(node) for backend in backends}
    ours = [backend for backend in backends if standings[backend.name].state == "ours"]
    if not ours:
        words = "; ".join(f"{name}: {each.state}{f' ({each.reason})' if each.reason else ''}" for name, each in standings.items())
        raise ConfigError(f"{node} was not taken out by surefoot: {words}", where=node, hint="what somebody else did is theirs to undo")
    passed_for_s = None if confirmed else _burnt_in(run_dir, node, limits=limits, clock=clock)
    done = tuple(backend.release(node) for backend in ours)
    _refuse_failed(done, node)
    fields = {"node": node, "by": user_at_host(), "passed_for_s": passed_for_s, "done": _plain(done)}
    entry = tell(run_dir, Event.NODE_READMITTED, rule="drain", reason=cause, fields=fields)
    how = "on your word" if passed_for_s is None else f"its probes passed for {passed_for_s:.0f} s"
    words = f"{node} serves again, {how}: {_in_words(done)}"
    return Told("drain", run_dir, "done", words, by=user_at_host(), step=entry.step, seq=entry.seq, more=fields)


def _burnt_in(run_dir: Path, node: str, *, limits: LaunchSection, clock: Clock) -> float:
    """Raises ConfigError on another machine than `node`, SurefootError when a probe failed."""
    names = {this_node(os.environ), socket.gethostname(), socket.gethostname().partition(".")[0]}
    if node not in names:
        command = site_commands(facts_of(os.environ, run=str(run_dir), node=node, incident="by-hand"))["readmit"]
        what = f"the burn-in of {node} runs on {node}, and this is {socket.gethostname()}"
        raise ConfigError(what, where=node, hint=f"run it there: `{command}`; --yes vouches for it without one")
    shown = burn_in(lambda: _failed_probes(run_dir), burn_in_s=limits.burn_in_s, every_s=_PROBE_EVERY_S, clock=clock)
    if shown.failures:
        what = f"a probe failed after {shown.passed_for_s:.0f} s: {'; '.join(shown.failures)}"
        raise SurefootError(what, where=node, hint="it stays out of service", got=shown.passed_for_s, limit=limits.burn_in_s)
    return shown.passed_for_s


def _failed_probes(run_dir: Path) -> list[str]:
    """What the thorough probes hold against this machine. Its storage is that of the run."""
    found = run_probes(THOROUGH, ProbeWish(folder=str(run_dir)), limit_s=_PROBE_LIMIT_S)
    return [f"{probe.name}: {probe.reason}" for probe in found if not is_sound((probe,))]


def _limits(run_dir: Path) -> LaunchSection:
    require_run(run_dir)
    return load_config(run_dir / CONFIG_NAME).config.launch


def _backends(run_dir: Path, limits: LaunchSection, *, clock: Clock) -> tuple[Isolator, ...]:
    return backends_of(os.environ, run_dir=run_dir, site_denylist=limits.site_denylist, limit_s=limits.isolation_limit_s, clock=clock)


def _refuse_failed(done: Sequence[Isolation], node: str) -> None:
    if not any(each.is_done for each in done):
        raise SurefootError(f"nothing was changed about {node}: {_in_words(done)}", where=node, hint="the ledger has no line of it")


def _in_words(done: Sequence[Isolation]) -> str:
    return "; ".join(f"{each.backend}: {each.action.replace('_', ' ')}{f' ({each.reason})' if each.reason else ''}" for each in done)


def _plain(done: Sequence[Isolation]) -> list[dict[str, object]]:
    return [asdict(each) for each in done]
