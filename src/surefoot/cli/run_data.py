"""The data of a run as its folder tells it: config, prepared data, blocklist, the order they give, and which step takes what.

Only reads, and takes no lock: a live run goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.manifest import read_manifest
from surefoot.cli.run_steps import RunSteps, attempts_of
from surefoot.config import load_config
from surefoot.core.errors import CheckpointError, ConfigError, DataError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.data.manifest import MANIFEST_NAME as DATA_MANIFEST_NAME
from surefoot.data.manifest import Manifest, earlier_name, load_manifest
from surefoot.data.provenance import UNKNOWN_NAME, Provenance, StoredDocument
from surefoot.data.recipe import RunOrder, run_order
from surefoot.data.storage import is_remote
from surefoot.observe.blocks import Blocklist, fold_blocks
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import candidates, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME, is_run, require_run
from surefoot.observe.wishes import open_wish


@dataclass(frozen=True, slots=True)
class RunData:
    """`path` is where the prepared data lies, `finished` whether the run has done all its steps.

    `manifest` is of the data that the run goes on with, `editions` are all that it was trained on and that are still there, by their
    identity: shards that were made anew stand beside those before. `newest` is the identity of what the run goes on with. Where data of
    the past was asked for, that is not among the editions, and `manifest` is of then. `restart_sample` is where the next start goes on.
    """

    run_dir: Path
    path: str
    config: RunConfig
    manifest: Manifest
    editions: Mapping[str, Manifest]
    newest: str
    blocklist: Blocklist
    order: RunOrder
    steps: RunSteps
    finished: bool
    restart_sample: int

    @contextmanager
    def provenance(self, data_hash: str = "") -> Iterator[Provenance]:
        """Of the data of that identity, or of what the run goes on with. Raises DataError when it is not here any more."""
        wanted = data_hash or self.newest
        if wanted not in self.editions:
            what = f"this is of data {wanted[:12]}, which is not here; here is {self.manifest.sha256[:12]}"
            raise DataError(what, where=self.path, hint="--data DIR names the folder that has it", wanted=wanted)
        with Provenance(self.path, manifest=self.editions[wanted]) as opened:
            yield opened


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is prepared data and no run: a store of it, or a folder with its manifest."""
    return is_remote(path) or (Path(path, DATA_MANIFEST_NAME).is_file() and not is_run(Path(path)))


def open_run_data(run_dir: Path, *, data: str | Path | None = None, may_be_past: bool = False) -> RunData:
    """`data` is where the prepared data lies now, when that is not where the config of the run says; with `may_be_past` also data that the
    run was trained on before it was given other data, whose order is the one of then.

    Raises ConfigError for a folder that is no run or has no data of ours, DataError when the data is not the run's.
    """
    require_run(run_dir)
    entries = read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)
    config = load_config(run_dir / CONFIG_NAME).config
    path = str(data) if data else _data_path(config, run_dir)
    editions, newest = _editions_of(path, entries=entries, is_given=bool(data), may_be_past=may_be_past)
    manifest = list(editions.values())[-1]
    cursor = _newest_cursor(run_dir, entries)
    blocklist = fold_blocks(entries)
    order = run_order(manifest, config, cursor=cursor, blocks=blocklist.blocks)
    steps = RunSteps(
        run_dir,
        plan=order.steps,
        entries=entries,
        parallel=config.parallel,
        num_steps=config.train.num_steps,
        start=_start_of(run_dir, entries, order=order),
    )
    finished = fold_lineage(entries).counters.finished
    restart_sample = _restart_of(run_dir, entries, order=order)
    return RunData(run_dir, path, config, manifest, editions, newest, blocklist, order, steps, finished, restart_sample)


def found_in(run: RunData, provenance: Provenance, document: str) -> list[StoredDocument]:
    """Every place of a document that this run trains on. Raises DataError for one that it holds out, saying so."""
    try:
        return provenance.find(document)
    except DataError as error:
        refuse_damage(error)
        with Provenance(run.path, manifest=run.manifest, split="heldout") as heldout:
            try:
                held = heldout.find(document)
            except DataError as other:
                refuse_damage(other)
                raise error from None
        what = f"document {held[0].hash} is held out from training: no step takes it"
        raise DataError(what, where=run.path, hint="the held-out loss is measured on it") from None


def refuse_damage(error: DataError) -> None:
    """Raises `error` unless it says that there is no such document here: then it may be elsewhere."""
    if error.values.get("kind") != UNKNOWN_NAME:
        raise error


def _data_path(config: RunConfig, run_dir: Path) -> str:
    if not config.data.path:
        raise ConfigError(
            "this run has no prepared data", where=str(run_dir), hint="a loop of your own knows best where its batches come from"
        )
    return config.data.path


def _editions_of(path: str, *, entries: Sequence[LedgerEntry], is_given: bool, may_be_past: bool) -> tuple[dict[str, Manifest], str]:
    """(what the attempts trained on and is still at `path`, the newest last; the identity of what the run goes on with). What has other
    streams has another order too, and is left out.

    Raises DataError when what the run goes on with is not there, nor, with `may_be_past`, what an earlier attempt trained on.
    """
    if not is_given and not is_remote(path) and not Path(path, DATA_MANIFEST_NAME).exists():
        raise DataError("the data of the run is not here", where=path, hint="--data DIR says where it lies now")
    here = load_manifest(path)
    hashes = [attempt.data_hash for attempt in attempts_of(entries) if attempt.data_hash] or [here.sha256]
    newest = here if hashes[-1] == here.sha256 else _earlier(path, hashes[-1])
    if newest is None and may_be_past and here.sha256 in hashes:
        newest = here
    if newest is None:
        raise DataError(
            f"this is other data: {here.sha256[:12]}, the run trains on {hashes[-1][:12]}",
            where=path,
            hint="--data DIR names the folder of the run's data",
            got=here.sha256,
            wanted=hashes[-1],
        )
    before = {data_hash: _earlier(path, data_hash) for data_hash in dict.fromkeys(hashes) if data_hash != newest.sha256}
    known = {data_hash: one for data_hash, one in before.items() if one is not None and _streams_of(one) == _streams_of(newest)}
    return {**known, newest.sha256: newest}, hashes[-1]


def _earlier(path: str, data_hash: str) -> Manifest | None:
    """The manifest of data that was in this folder before a shard was made anew, or that is there now."""
    for name in (earlier_name(data_hash), DATA_MANIFEST_NAME):
        try:
            manifest = load_manifest(path, name=name)
        except DataError:
            continue
        if manifest.sha256 == data_hash:
            return manifest
    return None


def _streams_of(manifest: Manifest) -> dict[str, int]:
    return {name: source.splits["train"].tokens for name, source in manifest.sources.items()}


def _newest_cursor(run_dir: Path, entries: Sequence[LedgerEntry]) -> Mapping[str, Any] | None:
    """The cursor of the newest checkpoint that can be read: it says from which sample on a source follows which order."""
    for ref in candidates(fold_lineage(entries)):
        if cursor := _cursor_of(run_dir, ref.id):
            return cursor
    return None


def _start_of(run_dir: Path, entries: Sequence[LedgerEntry], *, order: RunOrder) -> tuple[int, int]:
    """(finished steps, next sample) at which the newest attempt began."""
    begun = next((entry for entry in reversed(entries) if entry.event in (Event.ATTEMPT_STARTED, Event.RUN_ROLLED_BACK)), None)
    if begun is None:
        return 0, 0
    return begun.step, _sample_of(run_dir, str(begun.fields.get("checkpoint") or ""), step=begun.step, order=order)


def _restart_of(run_dir: Path, entries: Sequence[LedgerEntry], *, order: RunOrder) -> int:
    """The sample of the checkpoint that somebody asked for, or else of the newest; without one a start begins at 0."""
    lineage, wish = fold_lineage(entries), open_wish(entries)
    asked = lineage.ref(wish.checkpoint) if wish is not None else None
    ref = asked or next(iter(candidates(lineage)), None)
    return _sample_of(run_dir, ref.id, step=ref.step, order=order) if ref is not None else 0


def _sample_of(run_dir: Path, checkpoint: str, *, step: int, order: RunOrder) -> int:
    """The next sample after `step`, as the cursor of its checkpoint says, or by arithmetic when there is none."""
    cursor = _cursor_of(run_dir, checkpoint)
    return int(cursor["next_sample"]) if cursor else order.steps.span(step)[0]


def _cursor_of(run_dir: Path, checkpoint: str) -> Mapping[str, Any] | None:
    """None when there is no such checkpoint any more, or its loop had no cursor of ours."""
    try:
        cursor = read_manifest(run_dir / CHECKPOINTS_NAME / checkpoint).cursor if checkpoint else {}
    except CheckpointError:
        return None
    return cursor if "next_sample" in cursor else None
