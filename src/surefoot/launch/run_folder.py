"""A run folder and what is asked of it: compared first, recorded when the run is about to start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from surefoot.config import LoadedConfig, load_config, resolved_toml
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.holder import LOCK_NAME
from surefoot.core.identity import FIXED, STAGES, SettingChange, code_hashes, diff_sections, section_hashes, values_of
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import HASHED_SECTIONS, StageSection
from surefoot.core.stages import first_change
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from surefoot.observe.lineage import fold_counters
from surefoot.observe.run_dir import CONFIG_NAME

_OWN_COMMENT = re.compile(r" # (.+)$")


def compare_run_folder(loaded: LoadedConfig, *, entries: Sequence[LedgerEntry], accepted: Sequence[str]) -> list[SettingChange]:
    """What `loaded` changes about the run in its folder, all of it accepted; stages need no acceptance: when they begin is what counts,
    and the caller looks at that. Writes nothing; call with the run's lock held.

    Raises ConfigError when hashed settings differ and their section is not in `accepted`, and when the folder holds something else than a
    run. A run whose training never began, and which took nothing in, has nothing to protect: its config may be corrected freely.
    """
    _refuse_unknown_sections(accepted)
    run_dir = Path(loaded.config.run.dir)
    config_path = run_dir / CONFIG_NAME
    if not config_path.exists():
        _refuse_foreign_folder(run_dir)
        return []
    if not any(entry.event in (Event.ATTEMPT_STARTED, Event.CHECKPOINT_IMPORTED) for entry in entries):
        return []
    changes = diff_sections(load_config(config_path).config, loaded.config)
    fixed = [change for change in changes if change[:2] in FIXED]
    if fixed:
        what = f"the run there was started with another order of samples: {_words(fixed)}"
        raise ConfigError(what, where=str(config_path), hint=f"`surefoot train {run_dir}` goes on as it was; another [run] dir starts anew")
    refused = [change for change in changes if change[0] not in (*accepted, STAGES)]
    if refused:
        flags = " ".join(f"--accept-changes {section}" for section in sorted({section for section, *_ in refused}))
        raise ConfigError(
            f"the run there was started with another config: {_words(refused)}",
            where=str(config_path),
            hint=f"`surefoot train {run_dir}` goes on as it was; another [run] dir starts anew; {flags} goes on with the new values",
            changes=refused,
        )
    return changes


def record_run_folder(
    loaded: LoadedConfig, *, ledger: Ledger, entries: Sequence[LedgerEntry], changes: Sequence[SettingChange], accepted: Sequence[str]
) -> None:
    """Make the folder say what is about to run: accepted changes into the ledger, then `config.toml`.

    In this order a crash in between only has the same changes accepted once more.
    """
    run_dir, counters = Path(loaded.config.run.dir), fold_counters(entries)
    hashes = section_hashes(loaded.config) | code_hashes(loaded.config)

    def append(event: Event, *, rule: str = "", reason: str = "", fields: Mapping[str, object]) -> None:
        ledger.append(
            event,
            generation=counters.generation,
            attempt=counters.attempt,
            step=counters.step,
            rule=rule,
            reason=reason,
            fields=fields,
        )

    for section in sorted(set(accepted) & hashes.keys() - {section for section, *_ in changes}):
        reason = "the source of a factory may differ" if section == "code" else "a checkpoint that was made under other values may be taken"
        append(Event.CONFIG_ACCEPTED, rule="--accept-changes", reason=reason, fields={"section": section, "hash": hashes[section]})
    for section in sorted({section for section, *_ in changes} - {STAGES}):
        words = _words([change for change in changes if change[0] == section])
        fields = {"section": section, "hash": hashes[section]}
        append(Event.CONFIG_ACCEPTED, rule="--accept-changes", reason=words, fields=fields)
    if any(section == STAGES for section, *_ in changes):
        before, after = load_config(run_dir / CONFIG_NAME).config.stage, loaded.config.stage
        told = {"effective_sample": first_change(before, after), "from": _listed(before), "to": _listed(after)}
        append(Event.STAGE_CHANGED, reason=_words([change for change in changes if change[0] == STAGES]), fields=told)
    try:
        _write_config(loaded, run_dir / CONFIG_NAME)
    except OSError as error:
        raise SurefootError(
            f"the config could not be written: {error.strerror}", where=str(run_dir / CONFIG_NAME), hint="is the disk full or read-only?"
        ) from error
    if not any(entry.event == Event.RUN_CREATED for entry in entries):
        append(Event.RUN_CREATED, fields={"config_hashes": hashes})


def _write_config(loaded: LoadedConfig, path: Path) -> None:
    """Only when it changes. Started from the run's own config, values that were not overridden keep the origin that stands there."""
    if path.exists() and path.samefile(loaded.path):
        if "override" not in loaded.origins.values():
            return
        lines = loaded.text.splitlines()
        own = f"{path.name}:"
        kept = {
            setting: _own_origin(lines[int(origin.removeprefix(own)) - 1], default=origin) if origin.startswith(own) else origin
            for setting, origin in loaded.origins.items()
        }
        loaded = replace(loaded, origins=kept)
    write_atomic(path, resolved_toml(loaded, path.parent))


def _own_origin(line: str, *, default: str) -> str:
    found = _OWN_COMMENT.search(line)
    return found[1] if found else default


def _refuse_unknown_sections(accepted: Sequence[str]) -> None:
    known = ("run", "code", STAGES, *HASHED_SECTIONS)
    for section in accepted:
        if section not in known:
            close = get_close_matches(section, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the sections are {', '.join(known)}"
            raise ConfigError(f"there is no section {section!r} whose changes could be accepted", where="--accept-changes", hint=hint)


def _refuse_foreign_folder(run_dir: Path) -> None:
    ours = {LOCK_NAME, LEDGER_NAME, "live.json", "logs", "incidents"}
    strange = sorted(path.name for path in run_dir.iterdir() if path.name not in ours and not path.name.startswith((".", f"{LOCK_NAME}.")))
    if strange:
        raise ConfigError(
            f"the folder holds {', '.join(strange[:3])} but no {CONFIG_NAME}: it is not a run",
            where=str(run_dir),
            hint="choose another [run] dir",
        )


def _listed(stages: Sequence[StageSection]) -> list[dict[str, object]]:
    return [values_of(stage) for stage in stages]


def _words(changes: Sequence[SettingChange]) -> str:
    named = ((key if section == STAGES else f"[{section}] {key}", old, new) for section, key, old, new in changes)
    return ", ".join(f"{name} was {_value(old)}, is {_value(new)}" for name, old, new in named)


def _value(value: object) -> str:
    return "absent" if value is None else repr(value)
