"""Takes a checkpoint of another place into a run, in a process of its own: `python -m surefoot.cli.bring OPTIONS -- PATH|URL`.

Answers with one JSON object: {"id": ...} or {"error": ...}. Its caller holds the run's lock, so it ends with its caller.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.checkpoint.fetch import fetch, split_resume_url
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.object_store import ObjectStore
from surefoot.checkpoint.remote import remote_manifest, remote_newest
from surefoot.cli.checkpoint_find import find
from surefoot.cli.checkpoint_import import take_in, taken_in_before
from surefoot.cli.resume_from import refuse_other_config
from surefoot.config import load_config
from surefoot.core.errors import SurefootError
from surefoot.core.parent import signal_on_parents_end
from surefoot.core.records import Manifest
from surefoot.core.strict_json import dumps
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.run_dir import CONFIG_NAME

SCRATCH = ".fetched"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="surefoot.cli.bring")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--accepted", default="", help="sections that may differ, comma-separated")
    parser.add_argument("wanted")
    options = parser.parse_args(arguments)
    signal_on_parents_end(options.parent_pid, signal.SIGKILL)
    try:
        accepted = tuple(filter(None, options.accepted.split(",")))
        sys.stdout.write(dumps({"id": bring(options.wanted, options.run_dir, accepted=accepted)}))
    except SurefootError as error:
        sys.stdout.write(dumps(error.as_json()))
        return error.exit_code
    return 0


def bring(wanted: str, run_dir: Path, *, accepted: Sequence[str]) -> str:
    """Compared, fetched where it is a URL, verified, taken in under an id of its own; that id, or the one of an earlier time."""
    if "://" not in wanted:
        return _refused_or_there(read_manifest(Path(wanted)), run_dir, accepted) or _take_in(Path(wanted), run_dir)
    store_url, checkpoint = split_resume_url(wanted)
    store = ObjectStore.open(store_url)
    checkpoint = checkpoint or remote_newest(store)
    manifest, _ = remote_manifest(store, checkpoint)
    if there := _refused_or_there(manifest, run_dir, accepted):
        return there
    scratch = run_dir / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
    try:
        scratch.mkdir(parents=True)
        return _take_in(fetch(store, checkpoint, into=scratch), run_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _refused_or_there(manifest: Manifest, run_dir: Path, accepted: Sequence[str]) -> str | None:
    """The id of a copy that is in the run already. Raises ConfigError when the start would not take it: then no byte of it comes in."""
    if (run_dir / CONFIG_NAME).is_file():
        config, entries = load_config(run_dir / CONFIG_NAME).config, read_ledger(run_dir / LEDGER_NAME)
        refuse_other_config(manifest, config=config, run_dir=run_dir, entries=entries, accepted=accepted)
    before = taken_in_before(manifest, run_dir)
    return before.id if before is not None else None


def _take_in(folder: Path, run_dir: Path) -> str:
    has_config = (run_dir / CONFIG_NAME).is_file()
    run = load_config(run_dir / CONFIG_NAME).config.run.name if has_config else run_dir.absolute().name
    return take_in(find(folder), run_dir, run=run).id


if __name__ == "__main__":
    raise SystemExit(main())
