"""The telemetry of a node: samples it, keeps the samples, ledgers alarms. `python -m surefoot.cli.telemetry`, an aide.

It works in time that nobody else wants. A look that takes long (a driver or a disk that hangs) delays the next one and nothing else.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from surefoot.cli.ledgering import tell
from surefoot.config import load_config
from surefoot.coordinate.telemetry.collect import Gpus, KernelLog, boot_id, read_disk, read_host, read_ports
from surefoot.coordinate.telemetry.kernel_log import KernelEvent, SXidEvent, XidEvent, xids_of
from surefoot.coordinate.telemetry.rates import AGAIN_S, NodeAlarm, RateState, judge, limits_of
from surefoot.coordinate.telemetry.records import NodeSample
from surefoot.coordinate.telemetry.store import TelemetryLog
from surefoot.coordinate.telemetry.xids import Advice, judge_xid
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import LaunchSection
from surefoot.launch.aide import AideSpec
from surefoot.launch.aide_duty import Duty
from surefoot.launch.process import run_when_idle
from surefoot.observe.live import read_live
from surefoot.observe.run_dir import CONFIG_NAME

logger = logging.getLogger(__name__)

_GPU_LIMIT_S = 30.0  # nvidia-smi takes seconds on a node whose driver is busy, and for ever on one whose driver hangs


class Observer:
    """Looks at this node again and again. `node` names it in folders and alarms."""

    def __init__(self, run_dir: Path, *, node: str, settings: LaunchSection, clock: Clock, gpus: Gpus, kernel_log: KernelLog) -> None:
        self._run_dir, self._node, self._clock = run_dir, node, clock
        self._log = TelemetryLog(run_dir, node=node, max_bytes=settings.telemetry_bytes)
        self._limits = limits_of(settings.telemetry_limits)
        self._gpus, self._kernel_log = gpus, kernel_log
        self._state = RateState()
        self._told_s: dict[str, float] = {}
        self._boot_id = boot_id()

    def look(self) -> tuple[NodeAlarm, ...]:
        """Take one sample, keep it, and return what is alarming about it and new."""
        events = self._kernel_log.read()
        sample = self._sample(events)
        self._log.append(sample)
        self._state, alarms = judge(self._state, sample, limits=self._limits)
        return alarms + self._of_kernel(events, now_s=sample.mono_s)

    def _sample(self, events: Sequence[KernelEvent]) -> NodeSample:
        live = read_live(self._run_dir)
        gpus = self._gpus.read()
        unread = {"gpu": self._gpus.why_not, "kernel_log": self._kernel_log.why_not}
        return NodeSample(
            node=self._node,
            time_utc=self._clock.utc(),
            mono_s=self._clock.monotonic_s(),
            boot_id=self._boot_id,
            generation=live.generation if live else None,
            attempt=live.attempt if live else None,
            step=live.step if live else None,
            host=read_host(),
            disks=(read_disk(self._run_dir),),
            gpus=gpus,
            ports=read_ports(),
            xids=xids_of(events),
            unread={name: why for name, why in unread.items() if why},
        )

    def _of_kernel(self, events: Sequence[KernelEvent], *, now_s: float) -> tuple[NodeAlarm, ...]:
        """Errors of accelerators and switches that ask for more than to be counted, each kind and device once an hour."""
        alarms = []
        for event in events:
            if not isinstance(event, XidEvent | SXidEvent) or now_s - self._told_s.get(event.name, -AGAIN_S) < AGAIN_S:
                continue
            judged = judge_xid(event)
            if judged.advice is not Advice.WATCH or not judged.is_known:
                self._told_s[event.name] = now_s
                alarms.append(
                    NodeAlarm(self._node, "xid", f"gpu {event.device}", judged.reason, float(event.code), 0.0, judged.advice.value)
                )
        return tuple(alarms)


def fields_of(alarm: NodeAlarm) -> Mapping[str, object]:
    """Of the ledger's `node.alarmed`; its reason stands beside."""
    return {name: value for name, value in asdict(alarm).items() if name not in ("reason", "rule")}


def telemetry_aides(launch: LaunchSection, *, run_dir: Path) -> list[AideSpec]:
    """None where it is off. It has nothing to finish when the run is over, and begins with the first step: until then every core is wanted.

    Raises ConfigError for a limit that no rule has.
    """
    limits_of(launch.telemetry_limits)
    if not launch.telemetry_s:
        return []
    argv = (sys.executable, "-m", "surefoot.cli.telemetry", "--run-dir", str(run_dir.absolute()))
    return [AideSpec("telemetry", argv, end_limit_s=0.0, wanted=(run_dir / "metrics").is_dir)]


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.telemetry")
    run_when_idle()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    clock = SystemClock()
    settings = load_config(duty.run_dir / CONFIG_NAME).config.launch
    gpus = Gpus(limit_s=_GPU_LIMIT_S)
    observer = Observer(duty.run_dir, node=socket.gethostname(), settings=settings, clock=clock, gpus=gpus, kernel_log=KernelLog())
    while not duty.is_over:
        due_s = clock.monotonic_s() + settings.telemetry_s
        try:
            for alarm in observer.look():
                logger.warning("%s", alarm.reason)
                tell(duty.run_dir, Event.NODE_ALARMED, by="telemetry", rule=alarm.rule, reason=alarm.reason, fields=fields_of(alarm))
        except (SurefootError, OSError) as error:  # a full disk: it is told of by whoever saves
            logger.warning("no sample: %s", error)
        duty.wait(max(0.0, due_s - clock.monotonic_s()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
