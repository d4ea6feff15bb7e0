"""`surefoot doctor --node`: the probes of this node, one line each."""

from __future__ import annotations

from pathlib import Path

import typer

from surefoot.cli.console import say
from surefoot.coordinate.probes.checks import ProbeWish
from surefoot.coordinate.probes.records import ProbeResult, is_sound
from surefoot.coordinate.probes.run import QUICK, THOROUGH, run_probes
from surefoot.core.errors import EXIT_FAILED
from surefoot.core.strict_json import dumps, plain

QUICK_LIMIT_S = 30.0
"""As long as a driver under load may take to answer."""
LIMIT_S = 120.0
"""Of each probe that moves data or imports torch: a cold import from a slow disk takes tens of seconds."""


def probe_node(folder: Path, *, quick: bool, as_json: bool) -> None:
    """Exits with 1 when something was found against the node. What cannot be asked here is `unknown`, and no finding."""
    from surefoot.coordinate.telemetry.collect import Gpus

    num_gpus = len(Gpus(limit_s=5.0).read()) if not quick else 0
    wish = ProbeWish(folder=str(folder), device="cuda" if num_gpus else "cpu", num_ranks=max(2, num_gpus))
    results = run_probes(QUICK, wish, limit_s=QUICK_LIMIT_S)
    if not quick:
        names = [name for name in THOROUGH if name not in QUICK and (name != "bandwidth" or num_gpus != 1)]
        results += run_probes(names, wish, limit_s=LIMIT_S, at_once=False)  # each alone, so that none measures the others
    if as_json:
        say(dumps({"schema_version": 1, "ok": is_sound(results), "probes": [plain(result) for result in results]}))
    else:
        _tell(results)
    if not is_sound(results):
        raise typer.Exit(EXIT_FAILED)


def _tell(results: tuple[ProbeResult, ...]) -> None:
    for result in results:
        say(f"{result.verdict:<8} {result.name:<10} {result.reason}")
    bad = [result.name for result in results if result.verdict in ("failed", "hung")]
    say(f"\nfound against this node: {', '.join(bad)}" if bad else "\nnothing was found against this node")
