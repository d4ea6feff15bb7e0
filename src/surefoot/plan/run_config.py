"""The config that `surefoot train` runs, from what a plan chose: only what it decided, each setting with its reason in a comment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.model_sizes import ModelSizes
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PlanSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    SourceSection,
    TrainSection,
)
from surefoot.plan.failures.retention import Retention
from surefoot.plan.records import Layout
from surefoot.plan.tuning.training_choice import TrainingChoice

BYTES_VOCABULARY = 320
"""Up to this vocabulary the tokenizer is `bytes`."""


@dataclass(frozen=True, slots=True)
class Data:
    """`path` of the prepared data, or where it will be; `tokenizer` empty where it is prepared already."""

    path: str
    tokenizer: str = ""
    sources: tuple[SourceSection, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """What goes into the file."""

    name: str
    data: Data
    seq_len: int
    sizes: ModelSizes
    training: TrainingChoice
    layout: Layout
    precision: str
    interval_steps: int
    retention: Retention
    promise: PlanSection


def starter_data(name: str, vocab_size: int) -> Data:
    """Python's own library, until there is something better."""
    tokenizer = "bytes" if vocab_size <= BYTES_VOCABULARY else f"bpe:{vocab_size}"
    return Data(f"data/{name}", tokenizer, (SourceSection(name="stdlib", files=("builtin:python-stdlib",)),))


def run_config(decided: Decided) -> tuple[RunConfig, dict[str, str]]:
    """The config, and for each setting that the plan decided, why: only those need to be written."""
    training, sizes = decided.training, decided.sizes
    config = RunConfig(
        run=RunSection(name=decided.name),
        data=_data(decided),
        model=_model(sizes),
        train=TrainSection(
            num_steps=training.num_steps,
            global_batch_size=training.batch.batch,
            micro_batch_size=decided.layout.micro_batch_size,
            batch_ramp=training.ramp,
            precision="bf16" if decided.precision == "bf16" else "fp32",
        ),
        optimizer=OptimizerSection(lr=training.lr),
        schedule=_schedule(training),
        parallel=parallel_section(decided.layout),
        checkpoint=CheckpointSection(
            interval_steps=decided.interval_steps,
            keep_last=decided.retention.keep_last,
            cover_steps=decided.retention.cover_steps,
            milestone_steps=decided.retention.milestone_steps,
        ),
        plan=decided.promise,
    )
    return config, _origins(decided)


def parallel_section(layout: Layout) -> ParallelSection:
    """Expert parallelism is planned and not trained yet: `ep` is left at 1, and the plan says that the layout is not trainable."""
    pieces = layout.pp_chunks if layout.pp > 1 and layout.pp_schedule != "1f1b" else 0
    return ParallelSection(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        pp_schedule=layout.pp_schedule if layout.pp > 1 else "1f1b",
        pp_chunks=pieces,
        recompute=layout.recompute,
    )


def _data(decided: Decided) -> DataSection:
    data = decided.data
    section = DataSection(path=data.path, sources=data.sources, seq_len=decided.seq_len)
    return replace(section, tokenizer=data.tokenizer) if data.tokenizer else section


def _model(sizes: ModelSizes) -> ModelSection:
    return ModelSection(
        vocab_size=sizes.vocab_size,
        num_layers=sizes.num_layers,
        d_model=sizes.d_model,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        d_ff=sizes.d_ff,
        window=sizes.window,
        tie_embeddings=sizes.tie_embeddings,
        qk_norm=sizes.qk_norm,
    )


def _schedule(training: TrainingChoice) -> ScheduleSection:
    chosen = training.schedule
    return ScheduleSection(
        kind=chosen.kind,
        warmup_steps=chosen.warmup_steps,
        decay_steps=_decay(training),
        decay_shape=chosen.decay_shape,
        final_ratio=chosen.final_ratio,
    )


def _decay(training: TrainingChoice) -> int:
    """-1 where it is the fifth that training takes by itself, whatever becomes of the number of steps."""
    return -1 if training.schedule.decay_steps == round(0.2 * training.num_steps) else training.schedule.decay_steps


def _origins(decided: Decided) -> dict[str, str]:
    training = decided.training
    reasons = {name: reason.why for name, reason in training.reasons.items()}
    data: Mapping[str, str] = {"data.path": "", "data.seq_len": "tokens per sample"}
    if decided.data.sources:
        data = {**data, "data.path": "prepared from the sources when it does not exist"}
    if decided.data.tokenizer:
        data = {**data, "data.tokenizer": ""}
    sizes = ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "tie_embeddings")
    told = {
        "run.name": "",
        **data,
        **{f"model.{name}": "" for name in sizes},
        "train.num_steps": f"{training.num_steps} steps of {training.batch.batch} sequences",
        "train.global_batch_size": reasons["training.global_batch_size"],
        "train.micro_batch_size": "samples that one rank computes at once",
        "train.precision": "",
        "optimizer.lr": reasons["training.lr"],
        "schedule.kind": reasons["training.kind"],
        "schedule.warmup_steps": reasons["training.warmup_steps"],
        **({"schedule.decay_steps": reasons.get("training.decay_steps", "")} if _decay(training) >= 0 else {}),
        **{f"parallel.{name}": "" for name in ("dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "pp", "recompute")},
        "checkpoint.interval_steps": "how long a save blocks against how rarely a failure comes",
        "checkpoint.keep_last": "",
        "checkpoint.cover_steps": "what the slowest detector may still convict",
        "checkpoint.milestone_steps": "kept for good",
    }
    if training.ramp:
        told["train.batch_ramp"] = reasons["training.batch_ramp"]
    if decided.layout.pp > 1:
        told |= {"parallel.pp_schedule": "", "parallel.pp_chunks": ""}
    if decided.data.sources:
        told |= {"data.sources[0].name": "", "data.sources[0].files": 'replace by your text: ["corpus/*.jsonl", "notes"]'}
    return told | {f"plan.{name}": "" for name in PlanSection.__dataclass_fields__}
