"""A real Slurm on this host: munged, slurmctld and a slurmd per node, on free ports of the loopback, ended by their ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_LIMIT_S = 60.0

CONF = """\
ClusterName=drill{pid}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket{cred}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
JobRequeue=1
KillWait=5
SlurmdTimeout=30
MessageTimeout=5
UnkillableStepTimeout=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
JobCompType=jobcomp/filetxt
JobCompLoc={home}/jobs.txt
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Site:
    """`env` is what every client of Slurm needs; `nodes` are the names that it knows."""

    home: Path
    nodes: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}

    def call(self, *argv: str, is_checked: bool = True) -> str:
        result = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=30, check=False)
        assert not is_checked or result.returncode == 0, f"{argv}: {result.stdout}{result.stderr}\n{self.told()}"
        return result.stdout

    def until(self, look: Callable[[], object], *, what: str, limit_s: float = _LIMIT_S) -> None:
        give_up_s = time.monotonic() + limit_s
        while not look():
            assert time.monotonic() < give_up_s, f"{what}: not within {limit_s:g} s\n{self.told()}"
            time.sleep(0.1)

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; empty when it knows it no more."""
        text = self.call("scontrol", "show", "job", job, "--oneliner", is_checked=False)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def node(self, node: str) -> str:
        return self.call("scontrol", "show", "node", node, "--oneliner")

    def told(self) -> str:
        files = [*self.home.glob("*.log"), *self.home.glob("*.out")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in sorted(files))


def why_not() -> str:
    """Why no Slurm can be started here; empty when it can."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no real Slurm here: {', '.join(absent)} absent (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "no real Slurm here: its daemons need root"


@pytest.fixture(scope="session")
def slurm_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes of one core each; skipped aloud where Slurm is not installed."""
    if why := why_not():
        pytest.skip(why)
    home = Path("/tmp") / f"surefoot-slurm-{os.getpid()}"  # a socket's path is short, and munged wants a safe folder above it
    home.mkdir(mode=0o755)
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield _open_site(home, started)
    finally:
        _close_site(home, started)
        shutil.rmtree(home, ignore_errors=True)


def _open_site(home: Path, started: list[subprocess.Popen[bytes]]) -> Site:
    (home / "state").mkdir()
    port, *node_ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=500 State=UNKNOWN"
        for node, port in zip(NODES, node_ports, strict=True)
    ]
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o400)
    conf = home / "slurm.conf"
    conf.write_text(CONF.format(pid=os.getpid(), host=host, port=port, home=home, cred="", nodes="\n".join(lines)))
    site = Site(home, NODES)

    def start(*argv: str) -> None:
        log = (home / f"{argv[0]}.{len(started)}.start.log").open("wb")
        started.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=site.env, process_group=0))
        log.close()

    start("munged", "--foreground", "--force", f"--socket={home}/munge.socket", f"--key-file={home}/munge.key",
          f"--pid-file={home}/munge.pid", f"--log-file={home}/munged.log", f"--seed-file={home}/munge.seed")  # fmt: skip
    site.until((home / "munge.socket").exists, what="munged")
    start("slurmctld", "-D", "-c", "-f", str(conf))
    for node in NODES:
        start("slurmd", "-D", "-N", node, "-f", str(conf))
    site.until(lambda: all("State=IDLE " in site.call("scontrol", "show", "node", node, "--oneliner", is_checked=False) for node in NODES),
               what="idle nodes")  # fmt: skip
    return site


def _close_site(home: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """Jobs first, while their daemons can still end them; then the daemons, the newest first."""
    environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=environment, timeout=10, check=False, capture_output=True)
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
    for process in reversed(started):
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
