"""`surefoot doctor`: what this machine has and lacks. torch is looked at in a child, so a broken one cannot take the answer down."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer

from surefoot.cli.console import say
from surefoot.core.errors import EXIT_FAILED
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_bytes

TORCH_LIMIT_S = 120.0
"""A cold import from a slow disk takes tens of seconds; a hang must still end."""
MIN_SHM_BYTES = 64 << 20
"""What containers get unless told otherwise; torch's loaders and shared tensors want more."""
MIN_DISK_BYTES = 2 << 30
"""The quick start's data, checkpoints and logs with room to spare."""
MIN_OPEN_FILES = 1024
"""Sockets between ranks, shards and logs of one node."""

_TORCH_PROBE = """
import json, time
begin = time.monotonic()
import torch
import torch.distributed as dist
print(json.dumps({
    "version": torch.__version__, "import_s": time.monotonic() - begin, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "gloo": dist.is_available() and dist.is_gloo_available(), "devices": torch.cuda.device_count(),
}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """`fail`: training cannot work. `warn`: it works, but worse than it could."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    hint: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all checks.")] = False,
    alerts: Annotated[Path | None, typer.Option("--alerts", metavar="FILE|RUN", help="Only send a test alert to all it names.")] = None,
    node: Annotated[bool, typer.Option("--node", help="Only probe this node: accelerators, fabric, memory, disk, computing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --node: only the probes that disturb nobody who trains here.")] = False,
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="With --node: where saves go to.")] = Path(),
) -> None:
    """Check that this machine can train, and say what to mend. Ends with 1 when it cannot.

    --alerts sends one test alert to each place that [alerts] of a config or run names, and says which of them took it.

    --node runs the probes, each in a process of its own: one that does not answer is killed, and said to hang. Nothing should train
    there meanwhile, unless it is --quick.

    \b
    Examples:
      surefoot doctor
      surefoot doctor --json
      surefoot doctor --alerts run.toml
      surefoot doctor --node
      surefoot doctor --node --quick --json
    """
    if node:
        from surefoot.cli.doctor_node import probe_node

        probe_node(folder, quick=quick, as_json=as_json)
        return
    checks = [*_alerts(alerts)] if alerts else [*_interpreter(os.environ), *_torch(), *_machine(Path.cwd()), *_extras()]
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        say(dumps({"schema_version": 1, "ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            say(f"{check.status:<5} {check.name:<14} {check.found}")
            if check.hint:
                say(f"{'':<21}{check.hint}")
        say(f"\n{len(failed)} of {len(checks)} checks failed" if failed else f"\n{'alerts arrive' if alerts else 'this machine can train'}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _alerts(target: Path) -> Iterator[Check]:
    """Raises ConfigError when it names no place, or one that cannot be used."""
    from surefoot.cli.alerter import trial_deliveries

    for name, words in trial_deliveries(target):
        hint = "mend the address, or what stands behind it, and try again" if words else ""
        yield Check(name, "fail" if words else "ok", words or "took a test alert", hint)


def _interpreter(environment: Mapping[str, str]) -> Iterator[Check]:
    version = platform.python_version()
    too_old = sys.version_info < (3, 11)
    yield Check("python", "fail" if too_old else "ok", version, "use Python 3.11 or newer" if too_old else "")
    is_linux = sys.platform == "linux"
    yield Check("system", "ok" if is_linux else "fail", platform.platform(), "" if is_linux else "surefoot runs on Linux")
    if environment.get("PYTHONDONTWRITEBYTECODE"):
        yield Check("bytecode", "warn", "PYTHONDONTWRITEBYTECODE is set", "every start compiles torch anew, seconds each: unset it")


def _torch() -> Iterator[Check]:
    try:
        child = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Check("torch", "fail", f"import took longer than {TORCH_LIMIT_S:.0f} s", "look for a slow or broken file system")
        return
    if child.returncode != 0:
        last_line = (child.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("torch", "fail", f"import failed with {child.returncode}: {last_line}", "run `make install` again")
        return
    found = json.loads(child.stdout)
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    yield Check("torch", "ok", f"{found['version']} ({build}), imported in {found['import_s']:.1f} s")
    hint = "" if found["gloo"] else "install a torch build with distributed support"
    yield Check("gloo", "ok" if found["gloo"] else "fail", "available" if found["gloo"] else "missing", hint)
    yield Check("accelerators", "ok", f"{found['devices']} CUDA devices" if found["devices"] else "none: ranks run on the CPU")


def _machine(folder: Path) -> Iterator[Check]:
    num_cores = len(os.sched_getaffinity(0))
    yield Check("cores", "ok", f"{num_cores} usable, load {os.getloadavg()[0]:.1f}")
    yield _bf16(Path("/proc/cpuinfo"))
    memory = psutil.virtual_memory()
    yield Check("memory", "ok", f"{show_bytes(memory.available)} free of {show_bytes(memory.total)}")
    yield _space("shared memory", Path("/dev/shm"), wanted_bytes=MIN_SHM_BYTES, hint="in a container: --shm-size or --ipc=host")
    yield _space("disk", folder, wanted_bytes=MIN_DISK_BYTES, hint="free some, or point [run] dir and [data] path elsewhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
    yield Check("open files", "warn" if few else "ok", f"limit {soft}", f"raise it: ulimit -n {min(hard, 65536)}" if few else "")
    yield _host_name()


def _bf16(cpuinfo: Path) -> Check:
    """Whether bf16 has units of its own here; without them bf16 autocast is slower than fp32."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.partition(":")[2].split()}
    units = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    if units:
        return Check("bf16", "ok", f"on the CPU by {', '.join(units)}")
    return Check("bf16", "warn", "this CPU has no bf16 units", 'train.precision = "bf16" works on it, but slower than "fp32"')


def _space(name: str, folder: Path, *, wanted_bytes: int, hint: str) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror}", hint)
    short = free < wanted_bytes
    return Check(name, "warn" if short else "ok", f"{show_bytes(free)} free in {folder}", hint if short else "")


def _host_name() -> Check:
    """gloo looks its own host name up; where that fails, ranks never meet."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check("host name", "warn", f"{name} does not resolve: {error}", "add it to /etc/hosts")
    return Check("host name", "ok", f"{name} is {address}")


def _extras() -> Iterator[Check]:
    """Optional dependencies by extra, as the installed package declares them."""
    missing: dict[str, list[str]] = {}
    for requirement in metadata.requires("surefoot") or []:
        name, _, condition = requirement.partition(";")
        extra = condition.partition("extra ==")[2].strip(" \"'")
        if extra:
            distribution = name.strip().split("[")[0].rstrip("0123456789.<>=!~ ,")
            missing.setdefault(extra, []).extend([] if _is_installed(distribution) else [distribution])
    for extra, names in missing.items():
        yield Check(f"extra {extra}", "ok", f"not installed: {', '.join(names)}" if names else "installed")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
