"""Prepared data of three sources in small shards, and a run over it: real files, no training."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from surefoot.config import load_config, resolved_toml
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.layouts import topology
from surefoot.core.records import StepReport
from surefoot.core.sections import ParallelSection, RunConfig, SourceSection
from surefoot.data.manifest import load_manifest
from surefoot.data.prepare import prepare
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from surefoot.observe.metrics import MetricsWriter

SOURCES: Final = ("code", "prose", "web")
NUM_DOCUMENTS: Final = 40
ALIKE: Final = ("document 23561", "document 163899")
"""Two texts whose sha256 begin with the same 8 digits, 25e59f52."""
_SHARD_BYTES: Final = 1500


def texts_of(source: str) -> list[str]:
    """The documents of a source: some of one word, some longer than a sample, some that code and web share."""
    words = ("step", "rank", "shard", "größe", "naïve")
    made = [
        " ".join([source, str(number), *random.Random(f"{source} {number}").choices(words, k=9 * number % 31)])
        for number in range(NUM_DOCUMENTS)
    ]
    made += ["the same text in two sources"] if source != "prose" else []
    return [*made, *ALIKE] if source == "web" else made


def prepare_three(out: Path) -> Path:
    """Three sources as bytes, of two files and several shards each, a tenth of the documents held out."""
    for source in SOURCES:
        texts = texts_of(source)
        for part, some in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
            file = corpus_file(out, f"{source}/part-{part}.jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    sources = [SourceSection(name=source, files=(str(corpus_file(out, source)),)) for source in SOURCES]
    prepare(sources, out=out, tokenizer="bytes", heldout_fraction=0.1, workers=1, shard_bytes=_SHARD_BYTES)
    return out


def corpus_file(out: Path, name: str) -> Path:
    """Where the text of a document came from, by the name that provenance keeps."""
    return out.parent / f"{out.name}-corpus" / name


CONFIG: Final = """
[run]
dir = "run"
seed = 7

[data]
path = "{data}"
seq_len = 32
reserve_fraction = {reserve}
sources = [{sources}]

[[stage]]
first_sample = 137
weights = {{ code = 3, web = 1 }}
seq_len = 16

[train]
num_steps = {num_steps}
global_batch_size = 10
micro_batch_size = 3
batch_ramp = [[0, 5], [20, 10]]

[parallel]
dp_shard = 2
"""


def make_run(folder: Path, data: Path, *, num_steps: int = 60, reserve: float = 0.0) -> Path:
    """A run folder that has a config and a ledger in which nothing has begun."""
    sources = ", ".join(
        f'{{ name = "{name}", weight = {weight}, files = ["{corpus_file(data, name)}"] }}' for weight, name in enumerate(SOURCES, start=1)
    )
    (folder / "run.toml").write_text(CONFIG.format(data=data, num_steps=num_steps, reserve=reserve, sources=sources))
    loaded = load_config(folder / "run.toml")
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(resolved_toml(loaded, run))
    Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.RUN_CREATED, generation=0, attempt=0, step=0)
    return run


@lru_cache(maxsize=64)  # parsed with its layout of lines, which takes 30 ms
def config_of(run: Path) -> RunConfig:
    return load_config(run / "config.toml").config


def record_attempt(
    run: Path, *, attempt: int, base_step: int, next_samples: Sequence[int], parallel: ParallelSection | None = None
) -> None:
    """An attempt that began after `base_step` steps and finished one more for each of `next_samples`, under this layout or the config's."""
    config = config_of(run)
    ledger = Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test")
    fields = {
        "checkpoint": None,
        "topology": topology(parallel or config.parallel),
        "data_hash": load_manifest(config.data.path).sha256,
    }
    ledger.append(Event.ATTEMPT_STARTED, generation=attempt, attempt=attempt, step=base_step, fields=fields)
    writer = MetricsWriter(run, generation=attempt)
    for step, next_sample in enumerate(next_samples, start=base_step + 1):
        writer.write(_report(step, attempt=attempt, next_sample=next_sample))
    writer.close()


def _report(step: int, *, attempt: int, next_sample: int) -> StepReport:
    return StepReport(
        step=step,
        attempt=attempt,
        generation=attempt,
        loss=1.0,
        num_live_tokens=1,
        tokens=1,
        grad_norm=1.0,
        clip_scale=1.0,
        lr=0.1,
        action="proceed",
        next_sample=next_sample,
        step_s=0.1,
        data_wait_s=0.0,
        forward_backward_s=0.1,
        exchange_s=0.0,
        update_s=0.0,
        save_s=0.0,
        evaluate_s=0.0,
        tokens_per_s=1.0,
        cpu_s=0.0,
    )
