"""`surefoot train --resume-from STEP|ID|PATH|URL|newest`: which checkpoint is meant, whether it may be, and the wish in the ledger.

A checkpoint from elsewhere is compared and taken in first, by a process of its own: the agent loads neither torch nor a client of an
object store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id, read_manifest
from surefoot.cli.console import say
from surefoot.cli.ledgering import tell
from surefoot.core.errors import CheckpointError, ConfigError, SurefootError, error_from_json
from surefoot.core.events import Event
from surefoot.core.identity import code_hashes, other_sections, section_hashes
from surefoot.core.records import CheckpointRef, LedgerEntry, Manifest
from surefoot.core.sections import RunConfig
from surefoot.core.tiers import BadTier, parse_store_url, without_credentials
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import Lineage, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME, is_run
from surefoot.observe.wishes import named_by_step, why_confirm

NEWEST = "newest"
_FLAG = "--resume-from"
_MAX_NAMED = 8


def wish_for(
    wanted: str, *, config: RunConfig, run_dir: Path, entries: Sequence[LedgerEntry], accepted: Sequence[str], confirmed: bool, reason: str
) -> str:
    """Ledger the wish that the next start meets; the id it names. Call with the run's lock held; what refuses comes before any line of it.

    Raises ConfigError when nothing fits, when a second word (`--yes`) is missing, or when it was made under settings nobody accepted.
    """
    lineage = fold_lineage(entries)
    ref = refuse_wish(wanted, config=config, run_dir=run_dir, entries=entries, accepted=accepted, confirmed=confirmed)
    if ref is None:
        brought = bring_in(wanted, run_dir, accepted=accepted)
        lineage = fold_lineage(read_ledger(run_dir / LEDGER_NAME))
        ref = lineage.ref(brought)
        if ref is None:
            raise CheckpointError(f"{brought} was taken in, and the ledger does not know it", where=str(run_dir))
        _refuse_unconfirmed(ref, lineage, confirmed=confirmed, wanted=wanted)
        _refuse_other_config(ref.id, config=config, run_dir=run_dir, entries=entries, accepted=accepted)
    why = why_confirm(ref, lineage)
    tell(run_dir, Event.RESUME_ASKED, rule=_FLAG, reason=reason or why or "", fields={"id": ref.id, "confirmed": confirmed})
    say(f"going on from {ref.id}, step {ref.step}" + (f": {why}" if why else ""))
    return ref.id


def refuse_wish(
    wanted: str, *, config: RunConfig, run_dir: Path, entries: Sequence[LedgerEntry], accepted: Sequence[str], confirmed: bool
) -> CheckpointRef | None:
    """The checkpoint of this run that `wanted` names, None for one of another place. Raises what `wish_for` would, as far as nothing has to
    be fetched to know it, and writes nothing.
    """
    lineage = fold_lineage(entries)
    ref = named_here(wanted, lineage, run_dir)
    if ref is not None:
        _refuse_unconfirmed(ref, lineage, confirmed=confirmed, wanted=wanted)
        _refuse_other_config(ref.id, config=config, run_dir=run_dir, entries=entries, accepted=accepted)
    elif Path(wanted).is_dir():
        refuse_other_config(read_manifest(Path(wanted)), config=config, run_dir=run_dir, entries=entries, accepted=accepted)
    return ref


def _refuse_unconfirmed(ref: CheckpointRef, lineage: Lineage, *, confirmed: bool, wanted: str) -> None:
    why = why_confirm(ref, lineage)
    if why is not None and not confirmed:
        raise ConfigError(why, where=_where(wanted), hint="--yes goes on from it all the same; the ledger says who asked")


def bring_in(wanted: str, run_dir: Path, *, accepted: Sequence[str] = ()) -> str:
    """The id under which a checkpoint of another place stands in this run now, verified on the way and ledgered as an import.

    Nothing is taken in that was made under settings nobody accepted.
    """
    ours = ["--run-dir", str(run_dir), "--accepted", ",".join(accepted), "--parent-pid", str(os.getpid())]
    command = [sys.executable, "-m", "surefoot.cli.bring", *ours, "--", wanted]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SurefootError(f"the process that was to take it in ended with {done.returncode}", where=_where(wanted)) from None
    if "error" in answer:
        raise error_from_json(answer)
    return str(answer["id"])


def named_here(wanted: str, lineage: Lineage, run_dir: Path) -> CheckpointRef | None:
    """A checkpoint of this run; None when `wanted` names another place. Raises ConfigError when it names nothing."""
    if not wanted.strip():
        raise _names_none("it is empty", wanted, lineage, run_dir)
    if "://" in wanted:
        try:
            parse_store_url(wanted)  # before any process is started with it: a list of processes hides no credentials
        except BadTier as error:
            raise ConfigError(error.what, where=_where(wanted), hint=error.hint) from None
        return _of_store(wanted, lineage)
    if wanted == NEWEST:
        if (newest := lineage.newest()) is None:
            raise ConfigError("this run has no checkpoint yet", where=_where(wanted), hint="leave it out")
        return newest
    if wanted.isdecimal():
        if (ref := named_by_step(int(wanted), lineage)) is None:
            raise ConfigError(f"no checkpoint of step {wanted}", where=_where(wanted), hint=_those_there(lineage, run_dir))
        return ref
    path = Path(wanted)
    is_ours = path.is_dir() and path.absolute().parent == (run_dir / CHECKPOINTS_NAME).absolute()
    name = path.name if is_ours else wanted
    if parse_id(name) is not None and (is_ours or not path.is_dir()):
        ref = lineage.ref(name)
        if ref is None or ref.id in lineage.retired:
            what = "was retired" if ref else "is none of this run"
            raise ConfigError(f"{name} {what}", where=_where(wanted), hint=_those_there(lineage, run_dir))
        return ref
    if not path.is_dir() or is_run(path):
        raise _names_none("neither a step, an id, a checkpoint folder nor a URL", wanted, lineage, run_dir)
    return None


def _names_none(what: str, wanted: str, lineage: Lineage, run_dir: Path) -> ConfigError:
    forms = "as in 500, s500-a1, ../backup/s500-a1, s3://bucket/prefix/s500-a1 or newest; "
    return ConfigError(what, where=_where(wanted), hint=forms + _those_there(lineage, run_dir))


def _where(wanted: str) -> str:
    return f"{_FLAG} {without_credentials(wanted) or repr(wanted)}"


def _of_store(url: str, lineage: Lineage) -> CheckpointRef | None:
    """A copy of a checkpoint that this run still has."""
    store, _, name = url.rstrip("/").rpartition("/")
    ref = lineage.ref(name)
    return ref if ref is not None and ref.id not in lineage.retired and store in lineage.tiers.get(name, ()) else None


def _refuse_other_config(
    checkpoint: str, *, config: RunConfig, run_dir: Path, entries: Sequence[LedgerEntry], accepted: Sequence[str]
) -> None:
    """The start would refuse it too, and then the wish would stand in the ledger unmet."""
    try:
        manifest = read_manifest(run_dir / CHECKPOINTS_NAME / checkpoint)
    except CheckpointError:
        return  # another tier may have it; else the start says what is wrong
    refuse_other_config(manifest, config=config, run_dir=run_dir, entries=entries, accepted=accepted)


def refuse_other_config(
    manifest: Manifest, *, config: RunConfig, run_dir: Path, entries: Sequence[LedgerEntry], accepted: Sequence[str]
) -> None:
    """Raises ConfigError when the checkpoint was made under settings that nobody accepted for this run."""
    known = {(entry.fields.get("section"), entry.fields.get("hash")) for entry in entries if entry.event == Event.CONFIG_ACCEPTED}
    now = section_hashes(config) | code_hashes(config)
    refused = [name for name in other_sections(manifest.config_hashes, now=now) if (name, now[name]) not in known and name not in accepted]
    if refused:
        raise ConfigError(
            f"checkpoint {manifest.id} was made with another {', '.join(f'[{name}]' for name in refused)}",
            where=str(run_dir),
            hint=f"go on with {' '.join(f'--accept-changes {name}' for name in refused)}",
            sections=tuple(refused),
        )


def _those_there(lineage: Lineage, run_dir: Path) -> str:
    on_disk = set(published(run_dir / CHECKPOINTS_NAME))
    there = [ref.id for ref in lineage.refs if ref.id in on_disk and ref.id not in lineage.retired]
    if not there:
        return "there are none"
    newest, num_older = ", ".join(there[-_MAX_NAMED:]), len(there) - _MAX_NAMED
    return f"there are {newest}" + (f" and {num_older} before them: `surefoot checkpoint list {run_dir}`" if num_older > 0 else "")
