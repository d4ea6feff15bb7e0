"""What `surefoot data block` asks for, resolved: which tokens or samples, how much of the data that is, and when it will hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from surefoot.cli.run_data import RunData, found_in
from surefoot.core.blocking import Block, BlockKind, BlockMode, TokenSpan
from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError
from surefoot.data.provenance import merged
from surefoot.observe.blocks import Blocklist
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import candidates, fold_lineage
from surefoot.observe.live import is_held, read_lock
from surefoot.observe.wishes import why_confirm

_SAMPLES: Final = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """What was named, exactly one of them."""

    document: str = ""
    file: str = ""
    shard: str = ""
    samples: str = ""
    step: int | None = None

    @property
    def is_samples(self) -> bool:
        return bool(self.samples) or self.step is not None


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person says. `mode` is None where it was left out."""

    target: Target
    mode: BlockMode | None = None
    from_sample: int = 0
    reason: str = ""
    by: str = ""
    evidence_step: int | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """How much a block is: `shares` are of the train tokens of each source; `to_come` and `seen` count samples of the run that hold it.

    `unreplaced` is of mode replace: for how many samples of an epoch, at most, the reserve is too small; these are masked.
    """

    documents: int
    tokens: int
    shares: dict[str, float]
    to_come: int
    seen: int
    unreplaced: int


def resolve(run: RunData, wish: Wish) -> Block:
    """The entry to ask for. Raises ConfigError for what cannot be honoured, DataError for what is not in the data or is damaged there."""
    target, mode = wish.target, wish.mode
    _refuse_beyond(run, wish)
    kind, name, spans, samples = _samples_of(run, target) if target.is_samples else _spans_of(run, target)
    if samples is not None and mode not in (None, "skip"):
        raise ConfigError(f"samples are skipped, they cannot be in mode {mode}", where="--mode", hint="leave it out")
    if mode == "replace" and not run.config.data.reserve_fraction:
        raise ConfigError(
            "nothing is kept back to take its place: data.reserve_fraction is 0",
            where="--mode replace",
            hint="the reserve is fixed when a run begins; --mode mask silences the text where it stands",
        )
    return Block(
        kind=kind,
        name=name,
        mode="skip" if samples is not None else mode or "mask",
        spans=tuple(spans),
        samples=samples,
        effective_sample=wish.from_sample,
        manifest_sha256=run.manifest.sha256,
        reason=wish.reason,
        by=wish.by,
        evidence_step=wish.evidence_step,
    )


def _refuse_beyond(run: RunData, wish: Wish) -> None:
    """Raises ConfigError for a sample that the run never comes to, and for a step that it has not made."""
    if wish.from_sample >= run.steps.end_sample:
        raise _never_comes(run, wish.from_sample, where="--from-sample")
    if wish.evidence_step is not None and not run.steps.has_made(wish.evidence_step):
        hint = f"the newest is step {run.steps.newest[0]}; --evidence-step is the one at which it was seen"
        raise ConfigError(f"the run has not made step {wish.evidence_step}", where="--evidence-step", hint=hint)


def is_compared(run: RunData, block: Block) -> bool:
    """Whether the files that `block` was resolved by are what the manifest says, to the last bit. Raises DataError for one that is not.

    False where it has no hashes of them, or they are too many. A shard or samples need no file.
    """
    if block.kind not in ("document", "file"):
        return True
    with run.provenance() as provenance:
        is_indexed = block.kind == "file" or provenance.check_indexes()
        return provenance.check(block.spans) and is_indexed


def scope_of(run: RunData, block: Block) -> Scope:
    """How much of the data and of the run `block` is, as things stand."""
    next_sample, end_sample = run.steps.newest[1], run.steps.end_sample
    if block.samples is not None:
        first, end = block.samples
        held = np.arange(first, min(end, end_sample), dtype=np.int64)
    else:
        found = [run.order.holding(span.source, span.start, span.end, first=0, until=end_sample) for span in block.spans]
        held = np.unique(np.concatenate(found))
    held = run.order.steps.without_skipped(held)
    since = max(next_sample, block.effective_sample)
    tokens = {name: sum(span.end - span.start for span in block.spans if span.source == name) for name in run.manifest.sources}
    with run.provenance() as provenance:
        num_documents = sum(provenance.num_documents(span) for span in block.spans)
    return Scope(
        documents=num_documents,
        tokens=sum(tokens.values()),
        shares={name: count / run.manifest.split(name, "train").tokens for name, count in tokens.items() if count},
        to_come=int((held >= since).sum()),
        seen=int((held < next_sample).sum()),
        unreplaced=_beyond_reserve(run, [*run.blocklist.blocks, block]) if block.mode == "replace" else 0,
    )


def _beyond_reserve(run: RunData, blocks: Sequence[Block]) -> int:
    """Units with a blocked token beyond those that the reserves hold, over all sources."""
    missing = 0
    for source in run.order.sources:
        spans = [span for block in blocks if block.mode == "replace" for span in block.spans if span.source == source.name]
        units = merged(TokenSpan(span.source, span.start // source.unit_tokens, -(-span.end // source.unit_tokens)) for span in spans)
        missing += max(0, sum(unit.end - unit.start for unit in units) - source.num_reserve)
    return missing


def when_it_holds(run: RunData, block: Block) -> str:
    """In words. Raises ConfigError when a run that trains now would have to refuse it.

    A start takes it where its checkpoint stands, which may be before what was trained last.
    """
    live = is_live(run)
    next_sample = run.steps.newest[1] if live else run.restart_sample
    if block.samples is not None and block.samples[1] <= next_sample:
        back = _way_back(run, block.samples[0])
        if live:
            what = f"the run has gone past them: it is at sample {next_sample}"
            raise ConfigError(what, where=f"samples {block.name}", hint=f"stop the run and ask again; {back}")
        return f"it holds when the run goes back before them, and is refused else; {back}"
    first = max(next_sample, block.effective_sample, block.samples[0] if block.samples else 0)
    since = f"skipping samples {first} to {block.samples[1] - 1}" if block.samples else f"from sample {first} on"
    if live:
        late = f", unless it has gone past sample {block.samples[1] - 1} by then and refuses it" if block.samples else ""
        answer = f"`surefoot data block {run.run_dir} --list` tells its answer"
        return f"the running job takes it within some steps: {since}, or as soon after as it comes to it{late}; {answer}"
    when = "the run is finished: it holds when the run goes on" if run.finished else "the next start takes it"
    newest = run.steps.newest[1]
    stands = f" (a start goes on at sample {next_sample}, the newest step ended at {newest})" if next_sample != newest else ""
    return f"{when}: {since}{stands}; one that goes back (`--resume-from`) has it hold from there"


def already_there(run: RunData, block: Block, log: Blocklist) -> int | None:
    """The ledger entry of `log` that asked for the same and waits for its answer, or by which a live run leaves it out; None without one.

    A run that stands still may be about to go back, to before what it has taken: there the same entry has a use.
    """
    if is_live(run):
        for taken in log.taken:
            if _is_same(taken.block, block) and taken.block.effective_sample <= max(block.effective_sample, run.steps.newest[1]):
                return taken.seq
    for asked in log.open:
        same = (asked.block.get("kind"), asked.block.get("name"), asked.block.get("mode")) == (block.kind, block.name, block.mode)
        if same and asked.block.get("effective_sample") == block.effective_sample:
            return asked.seq
    return None


def is_live(run: RunData) -> bool:
    """Whether a job trains it now."""
    return is_held(read_lock(run.run_dir), clock=SystemClock())


def _is_same(taken: Block, block: Block) -> bool:
    return (taken.kind, taken.name, taken.mode, taken.spans) == (block.kind, block.name, block.mode, block.spans)


def _spans_of(run: RunData, target: Target) -> tuple[BlockKind, str, Sequence[TokenSpan], None]:
    """A document is its text: every copy of it, in whatever source."""
    with run.provenance() as provenance:
        if target.document:
            found = found_in(run, provenance, target.document)
            copies = provenance.find(found[0].hash) if "/" in target.document else found
            return "document", copies[0].hash, merged(stored.span for stored in copies), None
        if target.file:
            return "file", target.file, provenance.spans_of_file(target.file), None
        return "shard", target.shard, [provenance.span_of_shard(target.shard)], None


def _samples_of(run: RunData, target: Target) -> tuple[BlockKind, str, Sequence[TokenSpan], tuple[int, int]]:
    if target.step is not None:
        taken = run.steps.of_step(target.step).samples
        first, end = int(taken[0]), int(taken[-1]) + 1
    else:
        first, end = sample_range(target.samples)
    if first >= run.steps.end_sample:
        raise _never_comes(run, first, where="--samples")
    return "samples", f"{first}:{end}", (), (first, end)


def sample_range(text: str) -> tuple[int, int]:
    """Of FIRST:END. Raises ConfigError for another text, and for a range without a sample."""
    match = _SAMPLES.fullmatch(text)
    first, end = (int(match[1]), int(match[2])) if match else (0, 0)
    if first >= end:
        raise ConfigError(f"{text!r} is no range of samples", where="--samples", hint="write FIRST:END, the end left out")
    return first, end


def _never_comes(run: RunData, sample: int, *, where: str) -> ConfigError:
    hint = f"its {run.steps.num_steps} steps take samples 0 to {run.steps.end_sample - 1}"
    return ConfigError(f"the run never comes to sample {sample}", where=where, hint=hint)


def _way_back(run: RunData, first_sample: int) -> str:
    """The command that goes on from the newest checkpoint before a sample."""
    (step,) = run.steps.taking(np.array([first_sample], dtype=np.int64))
    lineage = fold_lineage(read_ledger(run.run_dir / LEDGER_NAME, up_to_damage=True))
    before = next((ref for ref in candidates(lineage) if ref.step < step), None)
    if before is None:
        return f"but no checkpoint from before step {step} is left"
    confirmed = " --yes" if why_confirm(before, lineage) else ""
    return f"`surefoot train {run.run_dir} --resume-from {before.step}{confirmed}` goes back"
