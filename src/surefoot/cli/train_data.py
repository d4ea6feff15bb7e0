"""The data of a start: made where it is missing, refused where it is not what the config asks for or what the run goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import DataSection, RunConfig
from surefoot.core.stages import stages_of
from surefoot.observe.blocks import fold_blocks

if TYPE_CHECKING:
    from surefoot.data.manifest import Manifest

OnDataChange = Literal["refuse", "map", "restart-source"]


def prepare_missing_data(config: RunConfig, *, has_begun: bool) -> int:
    """The vocabulary size of the prepared data, which is made first when the config says from what and it is not there.

    A person's own folder is never overwritten; data that was made in another way than [data] says, or from other files, is refused. A run
    that has begun on it is only told of other files: they may have changed since, and the run's identity is what was prepared.
    """
    path, sources = Path(config.data.path), config.data.sources
    if not config.data.path:
        raise ConfigError("no data", where="[data] path", hint="name a prepared folder, or one to make from [[data.sources]]")
    from surefoot.data.manifest import MANIFEST_NAME, load_manifest

    if (path / MANIFEST_NAME).exists():
        if sources:
            _refuse_otherwise_prepared(config.data, has_begun=has_begun)
        return load_manifest(path).tokenizer.vocab_size
    if not sources:
        raise DataError(
            "no prepared data here, and no [[data.sources]] to make it from",
            where=str(path),
            hint="`surefoot data prepare INPUT --out DIR` makes it",
        )
    return _prepared(config.data).tokenizer.vocab_size


def _prepared(data: DataSection) -> Manifest:
    """Make the data that [data] describes: what `surefoot data prepare` makes of the same settings."""
    from surefoot.data.prepare import prepare
    from surefoot.data.quality.rules_file import rule_set

    rules = rule_set(data.rules) if data.rules else None
    if rules is not None:
        for index, source in enumerate(data.sources):
            rules.refuse_unknown(source.rules_off, where=f"data.sources[{index}].rules_off")
    return prepare(
        data.sources,
        out=data.path,
        tokenizer=data.tokenizer,
        heldout_fraction=data.heldout_fraction,
        text_field=data.text_field,
        on_bad_record=data.on_bad_record,
        rules=rules,
        progress=lambda progress: say(str(progress)),
    )


def _refuse_otherwise_prepared(data: DataSection, *, has_begun: bool) -> None:
    from surefoot.data.inputs import changed_inputs
    from surefoot.data.prepared import check_prepared, prepare_command

    command = prepare_command(
        data.sources,
        out=data.path,
        tokenizer=data.tokenizer,
        heldout_fraction=data.heldout_fraction,
        text_field=data.text_field,
        on_bad_record=data.on_bad_record,
        rules=data.rules,
    )
    check_prepared(data.path, tokenizer=data.tokenizer, heldout_fraction=data.heldout_fraction, sources=data.sources, command=command)
    changed = changed_inputs(Path(data.path), data.sources)
    if changed is None:
        return
    if not has_begun:
        raise DataError(changed, where="[[data.sources]] files", hint=f"name another [data] path, or prepare anew: `{command} --force`")
    say(f"note: {changed}; the run goes on with what was prepared")


def is_other_data(config: RunConfig, *, cursor: Mapping[str, object]) -> bool:
    """Whether the prepared data is not the one that `cursor` names."""
    from surefoot.data.manifest import load_manifest

    return "manifest_sha256" in cursor and cursor["manifest_sha256"] != load_manifest(config.data.path).sha256


def refuse_other_data(
    config: RunConfig, *, cursor: Mapping[str, object], entries: Sequence[LedgerEntry], on_data_change: OnDataChange
) -> None:
    """Raises, before anything is written, what every rank would raise when it went on at `cursor` with the data and the config of now.

    DataError when the data is not the one of the cursor, with the three choices, or lacks what the run needs to go on.
    """
    blocks = fold_blocks(entries).blocks
    if "manifest_sha256" not in cursor or _num_blocks(cursor) > len(blocks):
        return  # no checkpoint to go on from; or it comes from elsewhere and brings its blocklist along
    from surefoot.data.course import Course

    course = Course(
        config.data.path,
        data=config.data,
        train=config.train,
        stages=stages_of(config),
        seed=config.run.seed,
        on_data_change=on_data_change,
    )
    try:
        for block in blocks:
            course.take(block)
        course.seek(cursor)
    finally:
        course.close()


def _num_blocks(cursor: Mapping[str, object]) -> int:
    blocklist = cursor.get("blocklist")
    count = blocklist.get("count") if isinstance(blocklist, Mapping) else None
    return count if isinstance(count, int) else 0
