"""The telemetry of a node as a process beside a run: it samples, ledgers an alarm once, and ends with the run."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.coordinate.telemetry.store import nodes_of, read_samples
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.heal.alert_kinds import kind_of
from surefoot.launch.aide import AideLink
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger

_LIMIT_S = 60.0  # against a hang: it works in time that nobody else wants

CONFIG = """
[launch]
telemetry_s = 0.1
telemetry_limits = { disk_space = 2.0 }  # no disk has more room than it has: this one alarms at once
"""


def until(look: Callable[[], bool], aide: AideLink) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not look():
        assert aide.end() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_node_is_sampled_and_an_alarm_is_ledgered_once(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    Ledger(tmp_path / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.RUN_CREATED, generation=3, attempt=2, step=7)
    argv = (sys.executable, "-m", "surefoot.cli.telemetry", "--run-dir", str(tmp_path))
    aide = AideLink.spawn(argv, generation=3, log_path=tmp_path / "logs" / "telemetry.log", slots=None)
    try:
        until(lambda: len([sample for node in nodes_of(tmp_path) for sample in read_samples(tmp_path, node)]) >= 4, aide)
        aide.hang_up()
        deadline_s = time.monotonic() + _LIMIT_S
        while (code := aide.end()) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert code == 0
    finally:
        aide.kill()
        aide.end()
    alarms = [entry for entry in read_ledger(tmp_path / LEDGER_NAME) if entry.event == Event.NODE_ALARMED]
    assert [(entry.rule, entry.by, entry.generation, entry.step) for entry in alarms] == [("disk_space", "telemetry", 3, 7)]
    assert alarms[0].fields["advice"] == "watch"
    assert f"disk {tmp_path.name}: " in alarms[0].reason
    assert kind_of(alarms[0]) == "node-alarm"
    (node,) = nodes_of(tmp_path)
    samples = read_samples(tmp_path, node)
    assert all(sample["host"]["memory_total_bytes"] > 0 for sample in samples)
    assert all(before["mono_s"] < after["mono_s"] for before, after in itertools.pairwise(samples))
