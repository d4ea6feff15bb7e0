"""Opening a run folder: a new one is made, an old one is compared with what is asked of it now."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from surefoot.config import LoadedConfig, load_config, resolved_toml
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError, TrainingHalted
from surefoot.core.events import Event
from surefoot.core.identity import SettingChange, diff_sections, section_hashes
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import HASHED_SECTIONS
from surefoot.observe.ledger import Ledger
from surefoot.observe.lineage import fold_counters

CONFIG_NAME = "config.toml"
LEDGER_NAME = "ledger.jsonl"


def open_run_folder(loaded: LoadedConfig, *, ledger: Ledger, entries: Sequence[LedgerEntry], accepted: Sequence[str]) -> None:
    """Write `config.toml` of a new run, or check that the run there is this one. Call with the run's lock held.

    Raises ConfigError when hashed settings differ and their section is not in `accepted` (an accepted difference is ledgered), and when
    the folder holds something else than a run.
    """
    unknown = [section for section in accepted if section not in ("run", *HASHED_SECTIONS)]
    if unknown:
        close = get_close_matches(unknown[0], HASHED_SECTIONS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the sections are {', '.join(('run', *HASHED_SECTIONS))}"
        raise ConfigError(f"there is no section {unknown[0]!r} whose changes could be accepted", where="--accept-changes", hint=hint)
    run_dir = Path(loaded.config.run.dir)
    config_path = run_dir / CONFIG_NAME
    counters = fold_counters(entries)
    if not config_path.exists():
        _refuse_foreign_folder(run_dir)
        write_atomic(config_path, resolved_toml(loaded, run_dir))
        ledger.append(
            Event.RUN_CREATED,
            generation=counters.generation,
            attempt=counters.attempt,
            step=0,
            fields={"config_hashes": section_hashes(loaded.config)},
        )
        return
    changes = diff_sections(load_config(config_path).config, loaded.config)
    refused = [change for change in changes if change[0] not in accepted]
    if refused:
        sections = sorted({section for section, *_ in refused})
        raise ConfigError(
            f"the run there was started with another config: {_words(refused)}",
            where=str(config_path),
            hint=f"`surefoot train {run_dir}` goes on as it was; another [run] dir starts anew; "
            + " ".join(f"--accept-changes {section}" for section in sections)
            + " goes on with the new values",
            changes=refused,
        )
    for section in sorted({section for section, *_ in changes}):
        ledger.append(
            Event.CONFIG_ACCEPTED,
            generation=counters.generation,
            attempt=counters.attempt,
            step=counters.step,
            rule="--accept-changes",
            reason=_words([change for change in changes if change[0] == section]),
            fields={"section": section, "hash": section_hashes(loaded.config)[section]},
        )
    if loaded.path != config_path:
        write_atomic(config_path, resolved_toml(loaded, run_dir))


def refuse_halted(entries: Sequence[LedgerEntry]) -> None:
    """Raises TrainingHalted while the run's last halt has not been released by a person."""
    halted: LedgerEntry | None = None
    for entry in entries:
        if entry.event == Event.RUN_HALTED:
            halted = entry
        elif entry.event == Event.RUN_RELEASED:
            halted = None
    if halted is not None:
        raise TrainingHalted(
            f"the run was halted at step {halted.step} by {halted.rule}: {halted.reason}",
            where=f"ledger entry {halted.seq}",
            hint="find the cause, then `surefoot resume RUN --cause TEXT` lets it go on from its newest checkpoint",
        )


def _refuse_foreign_folder(run_dir: Path) -> None:
    ours = {"lock", LEDGER_NAME, "live.json"}
    strange = sorted(path.name for path in run_dir.iterdir() if path.name not in ours and not path.name.startswith("."))
    if strange:
        raise ConfigError(
            f"the folder holds {', '.join(strange[:3])} but no {CONFIG_NAME}: it is not a run",
            where=str(run_dir),
            hint="choose another [run] dir",
        )


def _words(changes: Sequence[SettingChange]) -> str:
    return ", ".join(f"[{section}] {key} was {_value(old)}, is {_value(new)}" for section, key, old, new in changes)


def _value(value: object) -> str:
    return "absent" if value is None else repr(value)
