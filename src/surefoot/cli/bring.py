"""Takes a checkpoint of another place into a run, in a process of its own: `python -m surefoot.cli.bring --run-dir RUN -- PATH|URL`.

Answers with one JSON object: {"id": ...} or {"error": ...}. Its caller holds the run's lock.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from surefoot.checkpoint.fetch import fetch_for_resume
from surefoot.cli.checkpoint_find import find
from surefoot.cli.checkpoint_import import take_in
from surefoot.config import load_config
from surefoot.core.errors import SurefootError
from surefoot.core.strict_json import dumps
from surefoot.observe.run_dir import CONFIG_NAME

SCRATCH = ".fetched"


def main(arguments: list[str]) -> int:
    run_dir, wanted = Path(arguments[1]), arguments[3]
    try:
        sys.stdout.write(dumps({"id": bring(wanted, run_dir)}))
    except SurefootError as error:
        sys.stdout.write(dumps(error.as_json()))
        return error.exit_code
    return 0


def bring(wanted: str, run_dir: Path) -> str:
    """Fetched where it is a URL, verified, taken in under an id of its own; that id."""
    run = load_config(run_dir / CONFIG_NAME).config.run.name if (run_dir / CONFIG_NAME).is_file() else run_dir.absolute().name
    if "://" not in wanted:
        return take_in(find(Path(wanted)), run_dir, run=run).id
    scratch = run_dir / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
    try:
        scratch.mkdir(parents=True)
        return take_in(find(fetch_for_resume(wanted, scratch)), run_dir, run=run).id
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
