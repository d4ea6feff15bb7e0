"""The process that copies checkpoints to one object store: an aide of the agent, one per store, so that a slow one holds up no other.

`python -m surefoot.cli.mirror --tier URL --run-dir RUN ...`. It holds no training up: it reads the ledger for what was read back from disk,
copies it, reads the copy back, and ledgers that. When the run is over it copies what is left, as long as the agent lets it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from surefoot.checkpoint.mirror import Known, Mirror
from surefoot.checkpoint.object_store import ObjectStore
from surefoot.cli.ledgering import tell
from surefoot.config import load_config
from surefoot.core.errors import CheckpointError, ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import CheckpointSection
from surefoot.core.tiers import store_urls
from surefoot.launch.aide import AideSpec
from surefoot.launch.aide_duty import Duty
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CONFIG_NAME

_LOOK_INTERVAL_S = 1.0  # how late a copy may begin; a look is one stat of the ledger
_FIRST_WAIT_S, _MAX_WAIT_S = 5.0, 300.0  # after a failure; a store that comes back late costs nothing but the distance of the copy


def mirror_aides(config: CheckpointSection, *, run_dir: Path) -> list[AideSpec]:
    """One for each object store among `checkpoint.tiers`. Raises ConfigError when what they need is not installed."""
    urls = store_urls(config.tiers)
    if urls and find_spec("obstore") is None:
        raise ConfigError(f"checkpoint.tiers names {urls[0]}, and the package obstore is not installed", hint='pip install "surefoot[s3]"')
    program = (sys.executable, "-m", "surefoot.cli.mirror", "--run-dir", str(run_dir))
    return [
        AideSpec(
            name="mirror" if number == 1 else f"mirror-{number}",
            argv=(*program, "--tier", str(url)),
            end_limit_s=config.upload_limit_s,
        )
        for number, url in enumerate(urls, start=1)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="mirror", add_help=False, allow_abbrev=False)
    parser.add_argument("--tier", required=True)
    options, rest = parser.parse_known_args(arguments)
    duty = Duty.begin(rest, prog="mirror")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _serve(duty, tier=options.tier)
    except SurefootError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from error


def _serve(duty: Duty, *, tier: str) -> None:
    """Until the agent hangs up and nothing is left to copy; a store that fails then is not waited for."""
    config = load_config(duty.run_dir / CONFIG_NAME).config.checkpoint
    mirror = Mirror(
        duty.run_dir / "checkpoints",
        ObjectStore.open(tier),
        bytes_per_s=config.tier_bytes_per_s,
        tell=lambda event, reason, fields: tell(duty.run_dir, event, by="mirror", reason=reason, fields=fields),
        on_progress=lambda: None,
    )
    ledger = duty.run_dir / LEDGER_NAME
    seen_bytes, wait_s = -1, _LOOK_INTERVAL_S
    while True:
        num_bytes = ledger.stat().st_size
        failed = False
        if num_bytes != seen_bytes:
            try:
                while mirror.round(_known(ledger, tier=tier)):
                    duty.wait(0.0)
                seen_bytes, wait_s = num_bytes, _LOOK_INTERVAL_S
            except CheckpointError:
                failed, wait_s = True, min(_MAX_WAIT_S, max(_FIRST_WAIT_S, 2 * wait_s))  # told and ledgered by the mirror
        if duty.is_over and (failed or ledger.stat().st_size == num_bytes):
            return
        duty.wait(wait_s)


def _known(ledger: Path, *, tier: str) -> Known:
    entries = read_ledger(ledger)
    lineage = fold_lineage(entries)
    copied = [entry.fields for entry in entries if entry.event == Event.CHECKPOINT_COPIED and entry.fields.get("tier") == tier]
    return Known(
        refs=lineage.refs,
        retired=lineage.retired,
        hashes={str(fields["id"]): str(fields["manifest_hash"]) for fields in copied if "id" in fields and "manifest_hash" in fields},
    )


if __name__ == "__main__":
    main()
