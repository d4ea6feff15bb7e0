"""The data of a start: made where it is missing, refused where it is not what the config asks for."""

from __future__ import annotations

from pathlib import Path

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.sections import RunConfig


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
            from surefoot.data.prepared import check_prepared

            check_prepared(path, tokenizer=config.data.tokenizer, heldout_fraction=config.data.heldout_fraction, sources=sources)
            _refuse_other_files(config, path, has_begun=has_begun)
        return load_manifest(path).tokenizer.vocab_size
    if not sources:
        raise DataError(
            "no prepared data here, and no [[data.sources]] to make it from",
            where=str(path),
            hint="`surefoot data prepare INPUT --out DIR` makes it",
        )
    from surefoot.data.prepare import prepare

    manifest = prepare(
        sources,
        out=path,
        tokenizer=config.data.tokenizer,
        heldout_fraction=config.data.heldout_fraction,
        progress=lambda progress: say(str(progress)),
    )
    return manifest.tokenizer.vocab_size


def _refuse_other_files(config: RunConfig, path: Path, *, has_begun: bool) -> None:
    from surefoot.data.inputs import changed_inputs
    from surefoot.data.prepared import prepare_command

    changed = changed_inputs(path, config.data.sources)
    if changed is None:
        return
    command = prepare_command(config.data.sources, out=path, tokenizer=config.data.tokenizer, heldout_fraction=config.data.heldout_fraction)
    if not has_begun:
        raise DataError(changed, where="[[data.sources]] files", hint=f"name another [data] path, or prepare anew: `{command} --force`")
    say(f"note: {changed}; the run goes on with what was prepared")
