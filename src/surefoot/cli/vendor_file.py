"""Gathers the vendor file of a rank on this host: `incidents/rank-<n>/vendor.json` and `.md`. What a host does not have is said in it."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from surefoot.cli.triage_facts import read_entries
from surefoot.core import strict_json
from surefoot.core.clock import SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.heal.alert_kinds import ranks_of
from surefoot.heal.triage import rule_of, step_of
from surefoot.heal.vendor import Device, Seat, VendorFile, Xid, device_of, devices_in, markdown, of_device, seat_of, xids_in
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME

_LIMIT_S: Final = 20.0  # nvidia-smi hangs on a device that fell off the bus, and the file is wanted then too
_MAX_EVIDENCE: Final = 100
_MAX_DIGESTS: Final = 20


def write_vendor_file(run_dir: Path, rank: int) -> tuple[VendorFile, list[Path]]:
    """The file, and the paths that it was written to."""
    entries, notes = read_entries(run_dir)
    about = [entry for entry in entries if rank in ranks_of(entry)]
    seat = next((found for entry in reversed(entries) if (found := seat_of(entry.fields.get("devices"), rank)) is not None), None)
    missing = [*notes, *_elsewhere(run_dir, rank, seat)]
    driver, device = _device(rank, seat, missing)
    began = next((entry for entry in reversed(entries) if entry.event == Event.ATTEMPT_STARTED), None)
    environment = began.fields.get("environment") if began is not None else None
    file = VendorFile(
        run=str(run_dir),
        rank=rank,
        host=socket.gethostname(),
        written_utc=SystemClock().utc(),
        reason=about[-1].reason if about else "",
        driver=driver,
        device=device,
        xids=of_device(_xids(missing), device),
        evidence=tuple(_told(entry) for entry in about[-_MAX_EVIDENCE:]),
        digests=tuple(_digests(entries)),
        environment=environment if isinstance(environment, dict) else {},
        missing=tuple(missing),
        local_rank=seat.local_rank if seat is not None else None,
        uuid=seat.uuid if seat is not None else "",
    )
    folder = run_dir / "incidents" / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "vendor.json", folder / "vendor.md"]
    for path, text in zip(paths, (strict_json.dumps(file.as_json(), indent=2), markdown(file)), strict=True):
        write_atomic(path, text)
    return file, paths


def _device(rank: int, seat: Seat | None, missing: list[str]) -> tuple[dict[str, str], Device | None]:
    """The GPU that the rank had, where the run said which and this host has it. Serials of another one would accuse that."""
    text = _output(["nvidia-smi", "-q", "-x"], missing, what="serials and counters of GPUs")
    if text is None:
        return {}, None
    try:
        driver, devices = devices_in(text)
    except ValueError as error:
        missing.append(f"serials and counters of GPUs: {error}")
        return {}, None
    device = device_of(seat, devices) if seat is not None else None
    if seat is None or not seat.uuid:
        missing.append(f"which of the {len(devices)} GPUs of this host rank {rank} had is not known: the ledger does not say")
    elif device is None:
        missing.append(f"rank {rank} had {seat.uuid} on {seat.host}, which is none of the {len(devices)} GPUs here")
    return driver, device


def _xids(missing: list[str]) -> list[Xid]:
    text = _output(["dmesg", "--time-format", "iso"], missing, what="Xid lines of the kernel log")
    return xids_in(text.splitlines()) if text is not None else []


def _output(command: Sequence[str], missing: list[str], *, what: str) -> str | None:
    if shutil.which(command[0]) is None:
        missing.append(f"{what}: this host has no {command[0]}")
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        missing.append(f"{what}: {command[0]}: {type(error).__name__}")
        return None
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        missing.append(f"{what}: {words}")
        return None
    return done.stdout


def _elsewhere(run_dir: Path, rank: int, seat: Seat | None) -> list[str]:
    """Whether that rank last ran, or saved, on another host than this one: then serials and counters here are not its."""
    if seat is not None:
        return [f"rank {rank} ran on {seat.host}: run this command there too"] if seat.host != socket.gethostname() else []
    from surefoot.checkpoint.manifest import read_manifest
    from surefoot.core.errors import CheckpointError

    for path in sorted((run_dir / CHECKPOINTS_NAME).glob("s*"), key=lambda folder: folder.stat().st_mtime, reverse=True):
        try:
            hosts = {file.host for file in read_manifest(path).files if file.rank == rank and file.host}
        except CheckpointError:
            continue
        if hosts and socket.gethostname() not in hosts:
            return [f"rank {rank} wrote {path.name} on {', '.join(sorted(hosts))}: run this command there too"]
        if hosts:
            break
    return []


def _told(entry: LedgerEntry) -> dict[str, Any]:
    told = {"seq": entry.seq, "time_utc": entry.time_utc, "step": step_of(entry), "event": entry.event}
    return {**told, "rule": rule_of(entry), "reason": entry.reason, "fields": dict(entry.fields)}


def _digests(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    refs = fold_lineage(entries).refs[-_MAX_DIGESTS:]
    return [{"id": ref.id, "step": ref.step, "state_digest": ref.state_digest, "suspect": ref.suspect} for ref in refs]
