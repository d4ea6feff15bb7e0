"""RunConfig: what a person asked. One frozen section per concern; a room sees only its own.

Every field is a `setting`: its default, why that default, its bounds, and since which config version it exists. `config` builds these
from TOML; nothing else does. A field with `since` > 1 that stands at its default is left out of the section hash, so that a new version
of surefoot never refuses a resume because it knows a new field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def setting(
    default: Any,
    why: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    since: int = 1,
    is_path: bool = False,
    is_table: bool = False,
    counts: bool = True,
) -> Any:
    """A config field. `low` and `high` are inclusive bounds; `is_path` fields are relative to the TOML; `is_table` fields hold pairs
    (name, value), an inline table there.

    Neither paths nor what does not count (it changes no weight, as a prefetch depth) are hashed.
    """
    metadata = {
        "why": why,
        "unit": unit,
        "low": low,
        "high": high,
        "since": since,
        "is_path": is_path,
        "is_table": is_table,
        "counts": counts,
    }
    if isinstance(default, list | dict):
        raise TypeError("defaults are immutable: use a tuple")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class RunSection:
    name: str = setting("run", "names the run in logs, reports and the default folder")
    dir: str = setting("", "the run folder; empty means runs/<name> beside the TOML", is_path=True)
    seed: int = setting(0, "keys every random stream and the sample order", low=0)


@dataclass(frozen=True, slots=True)
class ModelSection:
    preset: str = setting("", "a named set of sizes; single fields given beside it win")
    factory: str = setting("", "pkg:function(config, vocab_size) returning your own nn.Module instead of ours")
    vocab_size: int = setting(0, "0 takes the tokenizer's, rounded up to a multiple of 64 for the matrix units", low=0)
    num_layers: int = setting(4, "small enough for a laptop", low=1)
    d_model: int = setting(192, "small enough for a laptop", low=8)
    num_heads: int = setting(6, "32 wide each at the default d_model", low=1)
    num_kv_heads: int = setting(0, "0 means as many as query heads; fewer is grouped-query attention", low=0)
    d_ff: int = setting(0, "0 means 8/3 of d_model rounded up to 64: SwiGLU at the parameter count of a 4x MLP", low=0)
    rope_base: float = setting(10_000.0, "RoFormer, arXiv 2104.09864", low=1.0)
    norm_eps: float = setting(1e-5, "RMSNorm epsilon as in Llama", low=0.0)
    tie_embeddings: bool = setting(True, "one matrix for input and output pays below about 1B parameters")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys, arXiv 2302.05442; steadier at large learning rates")
    window: int = setting(0, "attend to this many tokens back, itself included; 0 is no limit", unit="tokens", low=0)
    attention_soft_cap: float = setting(0.0, "cap * tanh(x / cap) on attention logits, Gemma 2; 0 is off; leaves the fused kernel", low=0.0)
    logit_soft_cap: float = setting(0.0, "the same on output logits; 0 is off", low=0.0)
    z_loss: float = setting(0.0, "weight of mean log(Z)^2, PaLM used 1e-4; 0 is off", low=0.0)
    init_std: float = setting(0.02, "GPT-2; output projections are divided by sqrt(2 layers) more", low=0.0)
    parametrization: Literal["standard", "mup"] = setting(
        "standard", "mup: the best learning rate stays where it is when the width changes, arXiv 2203.03466", since=3
    )
    mup_base_width: int = setting(0, "the d_model at which mup equals standard: where the learning rate was tuned", low=0, since=3)
    mup_base_head_dim: int = setting(
        0, "the head width there; 0 is that of this model: wider models have more heads, not wider ones", low=0, since=3
    )


@dataclass(frozen=True, slots=True)
class SourceSection:
    """One source of documents under `[[data.sources]]`."""

    name: str = setting("text", "names the source in provenance and per-source losses")
    files: tuple[str, ...] = setting(
        (), "files, folders, patterns such as corpus/*.jsonl, or builtin:python-stdlib; needed only to prepare", is_path=True
    )
    weight: float = setting(1.0, "share of the mixture", low=0.0)
    exhaustion: Literal["repeat", "stop", "redistribute"] = setting(
        "repeat",
        "when it has been read max_epochs times: repeat goes on under a new key, stop lets no run begin that needs more, redistribute "
        "gives its share to the others",
        since=4,
    )
    max_epochs: int = setting(0, "passes over it; 0 is no limit for repeat, else 1; above 4 repeated text teaches less", low=0, since=4)
    rules_off: tuple[str, ...] = setting((), "quality rules that do not suit it: word rules fail code and tables", since=4, counts=False)


@dataclass(frozen=True, slots=True)
class DataSection:
    path: str = setting("", "folder of the prepared data; made from `sources` when it does not exist", is_path=True)
    sources: tuple[SourceSection, ...] = setting((), "what `path` is prepared from")
    tokenizer: str = setting("bpe:8192", "bpe:<size> trains a byte-level BPE; bytes needs none; else a tokenizer.json", is_path=True)
    heldout_fraction: float = setting(0.01, "documents kept out of training for the held-out loss, chosen by their hash", low=0.0, high=0.5)
    text_field: str = setting(
        "text", "the field of JSONL, or the column of Parquet, that `sources` have their text in", since=4, counts=False
    )
    on_bad_record: Literal["fail", "skip"] = setting(
        "fail", "what preparing does at a record that is no document: stop, or leave it out and list it", since=4, counts=False
    )
    seq_len: int = setting(256, "tokens per sample", unit="tokens", low=2)
    max_seq_len: int = setting(
        0,
        "the longest sequence that any stage may ever ask for: samples are drawn in units of it, which a run keeps as it began; 0 is the "
        "longest of the declared ones",
        unit="tokens",
        low=0,
        since=4,
        counts=False,  # the data cursor holds the unit, and refuses a longer one
    )
    reserve_fraction: float = setting(
        0.0, "share of each source that is kept back to take the place of blocked samples (mode replace)", low=0.0, high=0.1, since=4
    )
    prefetch_steps: int = setting(
        2, "steps whose rows are read ahead of time; 0 reads when asked", unit="steps", low=0, since=4, counts=False
    )
    rules: str = setting(
        "",
        "a rules file for the look-ahead and the report, beside the catalogue; only what is accepted in it counts. Where `sources` are yet "
        "to be prepared, what breaks a rule that drops is left out",
        is_path=True,
        since=4,
    )
    look_ahead_samples: int = setting(
        0,
        "samples to come that a process of low priority puts to the quality rules; 0 is off",
        unit="samples",
        low=0,
        since=4,
        counts=False,
    )


@dataclass(frozen=True, slots=True)
class StageSection:
    """What changes from a sample on, under `[[stage]]`. What is left out stays as it was in the stage before."""

    first_sample: int = setting(0, "the global sample from which it holds, aligned to nothing", unit="samples", low=0, since=4)
    weights: tuple[tuple[str, float], ...] = setting(
        (), "shares by source; a source left out gets none; an empty table leaves them", since=4, is_table=True
    )
    seq_len: int = setting(0, "tokens per sample; 0 leaves it", unit="tokens", low=0, since=4)
    rope_base: float = setting(0.0, "base of the rotary embeddings; 0 leaves it", low=0.0, since=4)
    global_batch_size: int = setting(
        0, "samples per step from the first step that begins in it; 0 leaves it", unit="samples", low=0, since=4
    )
    lr: float = setting(0.0, "peak learning rate, which the schedule goes on to shape; 0 leaves it", low=0.0, since=4)


@dataclass(frozen=True, slots=True)
class TrainSection:
    num_steps: int = setting(1000, "training steps, skipped updates included", unit="steps", low=1)
    global_batch_size: int = setting(16, "samples per step over all ranks", unit="samples", low=1)
    micro_batch_size: int = setting(4, "samples of one atom: what one rank computes at once, always in this shape", unit="samples", low=1)
    batch_ramp: tuple[tuple[int, int], ...] = setting(
        (), "[[first_sample, batch], ...] ending with global_batch_size; each from the first step at or after it"
    )
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32", "of products of matrices: weights, reductions and moments are fp32 in each; fp16 scales its loss, see docs/precision.md"
    )
    fp16_initial_scale: float = setting(
        65_536.0, "a power of two, for the mean loss of an atom; torch's own. One too large costs a skipped step for each halving",
        low=2.0**-24, high=2.0**60, since=5,
    )  # fmt: skip
    fp16_min_scale: float = setting(
        1.0, "a power of two; a gradient that overflows here too is not the scale's fault, and counts towards the breaker",
        low=2.0**-24, high=2.0**60, since=5,
    )  # fmt: skip
    fp16_growth_interval_steps: int = setting(
        2000, "so many updates without an overflow double the scale; torch's own", unit="steps", low=1, since=5
    )
    fp16_hysteresis: int = setting(
        1, "overflows since the scale last grew before one halves it: 1 is torch's way, 2 is Megatron-LM's, which forgives the first",
        low=1, since=5,
    )  # fmt: skip
    eval_interval_steps: int = setting(100, "held-out loss every so many steps and at the end; 0 only at the end", unit="steps", low=0)
    eval_num_samples: int = setting(32, "held-out samples per evaluation, the same ones every time", unit="samples", low=1)


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    name: Literal["adamw"] = setting("adamw", "arXiv 1711.05101")
    factory: str = setting("", "pkg:function(named_parameters, config) returning your own torch Optimizer instead")
    lr: float = setting(3e-4, "peak learning rate", low=0.0)
    beta1: float = setting(0.9, "common in pre-training", low=0.0, high=1.0)
    beta2: float = setting(0.95, "common in pre-training; 0.999 forgets too slowly", low=0.0, high=1.0)
    eps: float = setting(1e-8, "torch default", low=0.0)
    weight_decay: float = setting(0.1, "on matrices only; norms, biases and embeddings have none", low=0.0)
    max_grad_norm: float = setting(1.0, "global norm of the mean gradient is clipped to this; 0 is off", low=0.0)
    kernel: Literal["fused", "foreach"] = setting("fused", "they differ in bits, so it is pinned in the run record")


@dataclass(frozen=True, slots=True)
class ScheduleSection:
    kind: Literal["wsd", "cosine", "constant"] = setting("wsd", "its stable phase can be branched; a cosine cut short cannot")
    warmup_steps: int = setting(100, "linear from 0 to the peak", unit="steps", low=0)
    decay_steps: int = setting(
        -1,
        "length of the WSD decay; -1 means a fifth of num_steps (arXiv 2405.18392: a tenth is enough for long runs)",
        unit="steps",
        low=-1,
    )
    decay_shape: Literal["linear", "1-sqrt"] = setting("1-sqrt", "arXiv 2405.18392")
    final_ratio: float = setting(0.0, "last learning rate as a share of the peak", low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class ParallelSection:
    dp_replicate: int = setting(1, "whole copies of the model", low=1)
    dp_shard: int = setting(1, "ranks that share one copy (fully_shard)", low=1)
    zero_stage: Literal[1, 2, 3] = setting(
        3, "what dp_shard frees between uses: 1 the moments alone, 2 gradients too, 3 parameters too", since=2
    )
    tp: int = setting(1, "ranks that share each matrix and each sequence inside a layer (tensor and sequence parallel)", low=1)
    cp: int = setting(1, "ranks that share the positions of a sequence (context parallel)", low=1)
    ep: int = setting(1, "expert parallel: not in this release", low=1, high=1)
    pp: int = setting(1, "stages that the layers are dealt to (pipeline parallel)", low=1)
    pp_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = setting(
        "1f1b", "the order of a pipeline's forwards and backwards", since=2
    )
    pp_chunks: int = setting(0, "pieces of the model per rank; 0 is 1 for 1f1b, else 2", low=0, since=2)
    recompute: Literal["none", "selective", "full"] = setting(
        "none",
        "activations computed again in the backward: selective keeps products and attention, full keeps what enters a block",
        since=2,
    )

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp


@dataclass(frozen=True, slots=True)
class NumericsSection:
    deterministic: bool = setting(True, "deterministic kernels: a replay gives the same bits")
    sums: Literal["float", "exact"] = setting(
        "float", "exact: gradient, norm and loss sums do not depend on their order, so no layout changes a bit"
    )


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    interval_steps: int | Literal["auto"] = setting(
        500, 'save every so many steps; 0 leaves it to interval_s; "auto" is 500 until it has measured', unit="steps", low=0
    )
    interval_s: float = setting(0.0, "save when the last one began this long ago; 0 is off", unit="s", low=0.0)
    auto_max_s: float = setting(3600.0, "auto: at most this much work is ever at stake, however rare failures are", unit="s", low=1.0)
    auto_prior_per_day: float = setting(
        6.5e-3,
        "auto: failures per node and day before any was seen here: Meta's research clusters (arXiv 2410.21680); weighs as one failure",
        low=1e-6,
    )
    keep_last: int = setting(3, "the newest ones on the lineage that are never retired", low=1)
    milestone_steps: int = setting(10_000, "multiples of this are kept for good; 0 is off", unit="steps", low=0)
    keep_steps: tuple[int, ...] = setting((), "saved at these steps too and kept for good: where branches will begin", since=3)
    cover_steps: int = setting(
        0,
        "older ones are kept this far back, at distances that double; never less far than this run's slowest detector may convict",
        unit="steps",
        low=0,
    )
    max_failed_saves: int = setting(2, "save points that may fail in a row before the run stops: a second one is no accident", low=1)
    save_grace_s: float = setting(
        600.0, "failed saves stop the run only when none has succeeded for this long: a full disk is often freed", unit="s", low=0.0
    )
    max_save_tries: int = setting(3, "a failed save is tried again at once in a fresh folder, this often in all", low=1)
    overlap: bool = setting(True, "parameters and moments are copied during the next forward and backward; off copies before going on")
    num_slots: int = setting(2, "host copies per rank: one is being written while the next is filled", low=1)
    host_fraction: float = setting(0.5, "share of this machine's memory limit that all slots together may take", low=0.01, high=0.9)
    upload_limit_s: float = setting(600.0, "a copy that is not committed this long after it was taken is a failed save", unit="s", low=1.0)
    tiers: tuple[str, ...] = setting(
        ("memory", "disk"), "where copies are kept: memory, disk (always), and an object store as s3://bucket/prefix or file:///folder"
    )
    tier_bytes_per_s: int = setting(0, "cap of what one process sends to an object store; 0 is none", unit="bytes/s", low=0)
    prove: bool = setting(True, "each save is loaded by a process that did not write it, in time that nobody else wants")
    prove_end_s: float = setting(20.0, "how long the end of a run waits for its newest save to be loaded so", unit="s", low=0.0)
    replay_steps: int = setting(8, "steps after a resume whose losses are compared with the recorded ones; 0 is off", unit="steps", low=0)
    replay_tolerance: float = setting(
        1e-3,
        "relative difference that a replayed loss may have where bits cannot be asked: another number of ranks, device, torch",
        low=0.0,
    )


@dataclass(frozen=True, slots=True)
class MonitorSection:
    log_interval_steps: int = setting(10, "a line on the console every so many steps", unit="steps", low=1)
    probe_interval_steps: int = setting(
        50, "activations, small and large values, attention logits and moments are looked at this often; 0 is off", unit="steps", low=0
    )
    rank_interval_steps: int = setting(
        0,
        "a row of the metrics has columns by rank and by group of parameters this often, and always where something was found or a step is "
        "no plain update; detectors see each step. 0 is every step up to 64 ranks, else every 10th: a row of 1,024 has 31 kB",
        unit="steps",
        low=0,
    )
    peak_flops: float = setting(
        0.0, "of one device, dense: what MFU is a share of; 0 takes the data sheet's of a known GPU, a CPU has none", unit="FLOP/s", low=0.0
    )
    flops_per_token: float = setting(
        0.0, "forward and backward, for MFU; 0 counts those of our decoder, a model of another kind has none", unit="FLOPs", low=0.0
    )
    audit_interval_steps: int = setting(
        100, "replicas are compared, and all ranks compute one atom of the step again, this often; 0 is off", unit="steps", low=0
    )
    outlier_sigmas: float = setting(
        10.0,
        "outlier_loss: a single step this far above what its last 128 foretell, up to twice as far where their noise has heavy tails",
        low=3.0,
    )
    mild_sigmas: float = setting(
        7.5, "outlier_loss_mild, which only records: 1.3 in 10,000, and the lone outliers of public runs stand at 7.6 and more", low=3.0
    )
    joint_sigmas: float = setting(6.0, "outlier_loss_and_norm: loss and log gradient norm both this far up", low=3.0)
    sustained_height: float = setting(
        12.0, "sustained_loss: height of its cumulative sum; 0.2 in 10,000, a rise of 0.1 nats is found in 8 steps", low=4.0
    )
    sustained_slow_height: float = setting(20.0, "sustained_loss_slow: the same for smaller rises; 1.2 in 10,000", low=4.0)
    grad_level_height: float = setting(
        18.0, "grad_level: the same of the log gradient norm; 0.2 in 10,000 (15: 1.1), half as much again is found in 7 steps", low=4.0
    )
    grad_outlier_factor: float = setting(5.0, "grad_outlier, which only records: times the trailing median of 256 norms", low=1.0)
    grad_burst_factor: float = setting(
        100.0, "grad_burst: single healthy steps reach 15 and come to no harm, BLOOM's spike reached 4,000", low=1.0
    )
    classic_max_norm: float = setting(1.0, "norm_over_clip, a classic rule: what the gradient norm may not exceed", low=0.0)
    classic_sigmas: float = setting(
        6.0,
        "loss_n_sigma, a classic rule: its N; 6 is wrong 2.5 times in 10,000 healthy steps, 3 is 42 times",
        low=1.0,
    )
    data_wait_share: float = setting(
        0.1,
        "steps that wait for their data for more than this share of their time are told: rows that are read ahead cost next to nothing, so "
        "a tenth lost to them is a tenth of the run's money",
        low=0.0,
        high=1.0,
        since=4,
        counts=False,
    )
    data_wait_min_s: float = setting(
        0.005, "less per step is the bookkeeping of steps so short that it proves nothing", unit="s", low=0.0, since=4, counts=False
    )
    data_wait_steps: int = setting(
        50,
        "the newest steps that are looked at, and as many before them must have waited too: fewer would tell of single steps, and the "
        "first one after a start reads everything anew",
        unit="steps",
        low=1,
        since=4,
        counts=False,
    )
    data_wait_repeat_s: float = setting(
        300.0, "how often it is told: often enough for whoever looks in, and not a line per step", unit="s", low=0.0, since=4, counts=False
    )
    straggler_steps: int = setting(
        20,
        "the newest steps in which a rank must be slower, in both halves, before it is named; 0 is off",
        unit="steps",
        low=0,
        counts=False,
    )
    straggler_factor: float = setting(
        1.15,
        "times the median of its peers: a rank that computes this much longer by itself, outside collectives, is named. Others take 1.1 "
        "for two rounds (late on a busy host), 1.33 (a score of 0.75) or 2, which miss a loss of a quarter",
        low=1.01,
        counts=False,
    )
    straggler_min_s: float = setting(
        0.01, "a rank that costs less per step is not named: that is the noise of a host", unit="s", low=0.0, counts=False
    )


@dataclass(frozen=True, slots=True)
class LaunchSection:
    max_restarts: int = setting(
        20, "restarts of this run's workers in all before it gives up, over all its jobs, until a person starts or releases it", low=0
    )
    window_restarts: int = setting(
        12, "restarts within launch.window_s before it gives up: a job that fails every five minutes trains nothing worth its price; the "
        "largest published one of 12,500 nodes failed every eighteen", low=1,
    )  # fmt: skip
    window_s: float = setting(3600.0, "the sliding window of launch.window_restarts", unit="s", low=1.0)
    large_scale_share: float = setting(
        0.1, "of the nodes, and two at least, that are lost within launch.large_scale_window_s: a switch or a power feed; the run is held",
        low=0.0, high=1.0,
    )  # fmt: skip
    large_scale_window_s: float = setting(
        10.0, "losses closer together than this are one event; a lease lapses in half of it", unit="s", low=0.1
    )
    no_progress_limit: int = setting(3, "restarts in a row without a new finished step before it gives up (exit 93)", low=1)
    restart_wait_s: float = setting(1.0, "before a second restart without progress; doubles each time", unit="s", low=0.0, high=300.0)
    init_limit_s: float = setting(120.0, "from fork to the first beat of the loop, restore included", unit="s", low=1.0)
    collective_limit_s: float = setting(300.0, "timeout of every process group; torch would wait 1800 s", unit="s", low=1.0)
    grace_s: float = setting(60.0, "from a request to leave until the workers are killed", unit="s", low=1.0)
    end_limit_s: float = setting(
        300.0,
        "from the first rank that is done until the others must be: rank 0 may still work on metrics and a sample; one that hangs is lost",
        unit="s",
        low=1.0,
    )
    settle_s: float = setting(0.5, "after a rank failed, how long the others may still say why before they are killed", unit="s", low=0.0)
    limits: Literal["auto", "fixed"] = setting(
        "auto", "auto: once enough is seen, a step and a wait for data may take eight times what they nearly always take; fixed: as set"
    )
    step_limit_s: float = setting(
        60.0, "without a beat within a step, before anything is learned; the loop beats at every micro-step and exchange", unit="s", low=1.0
    )
    first_step_limit_s: float = setting(
        600.0, "the same until a rank has finished a step, which compiles and connects: minutes for large models", unit="s", low=1.0
    )
    data_limit_s: float = setting(120.0, "without a beat while it waits for data: a store that is throttled comes back", unit="s", low=1.0)
    evaluate_limit_s: float = setting(
        600.0, "without a beat in an evaluation, a canary or an audit, which beat at their exchanges only", unit="s", low=1.0
    )
    save_limit_s: float = setting(
        600.0, "without a beat in a save: object stores take minutes, and rank 0 commits while the others wait", unit="s", low=1.0
    )
    floor_limit_s: float = setting(
        15.0, "no learned limit is below it: a pause of the collector or of a busy machine is no hang", unit="s", low=0.5
    )
    testimony_limit_s: float = setting(
        2.0, "how long ranks may take to say what they know before they are killed; who answers takes a quarter second", unit="s", low=0.0,
        high=60.0,
    )  # fmt: skip
    kill_limit_s: float = setting(
        60.0, "a killed worker must be gone by then; accelerator drivers can hold it for most of this", unit="s", low=1.0
    )
    lease_s: float = setting(
        30.0,
        "a lock whose owner cannot be seen (another host, boot or container) is taken over when not renewed for twice this",
        unit="s",
        low=5.0,
    )
    isolation: Literal["dry_run", "ask"] = setting(
        "dry_run", "what is done about a node with a certain fault: the commands of its site are said; or a person confirms with `drain`"
    )
    isolation_max_nodes: int = setting(2, "nodes taken out of service within a day: more than two are no single bad nodes", low=0)
    isolation_max_share: float = setting(0.05, "the same, of all nodes of the run; one may always go", low=0.0, high=1.0)
    isolation_ttl_s: float = setting(
        259200.0,
        "how long a node stays on a denylist: three days, over a weekend; a drain of Slurm stays until it is undone",
        unit="s",
        low=60.0,
    )
    isolation_limit_s: float = setting(
        10.0, "a command to the scheduler must have answered by then; a controller under load takes seconds", unit="s", low=0.1
    )
    site_denylist: str = setting("", "a denylist that several runs share, beside the run's own", is_path=True)
    burn_in_s: float = setting(
        600.0,
        "a node that was taken out serves again when its probes have passed for so long: heat and links show within minutes",
        unit="s",
        low=0.0,
    )
    telemetry_s: float = setting(
        10.0,
        "how often each node writes down what its accelerators, ports, memory and disks show; 0 is off",
        unit="s",
        low=0.0,
        high=3600.0,
    )
    telemetry_bytes: int = setting(
        1 << 30, "what a node keeps of it, the oldest goes first: 6 days of one with 8 accelerators and 9 ports", unit="bytes", low=65536
    )
    telemetry_limits: tuple[tuple[str, float], ...] = setting(
        (), "limits of alarms by name, over those of docs/telemetry.md; 1e99 silences one", is_table=True
    )
    port_gbps: float = setting(
        0.0, "what a fabric port must run at; 0 compares the ports of a node with each other", unit="Gbit/s", low=0.0
    )
    probe_after_fault: Literal["off", "quick"] = setting(
        "off", "quick: what a lost rank's node shows of itself is looked at before the next start, and written beside the evidence"
    )
    probe_limit_s: float = setting(
        5.0, "all probes between two starts together; one that has not answered by then hangs, which is an answer too", unit="s", low=0.5
    )
    threads_per_rank: int = setting(0, "intra-op threads; 0 shares the cores out; pinned in the run record because it changes bits", low=0)
    nodes: str = setting(
        "1", 'machines: "2", or "2:4" for as many as there are; [parallel] is the layout of the most, fewer change dp_replicate or dp_shard'
    )
    ranks_per_node: int = setting(0, "ranks of each machine; 0 deals those of [parallel] out evenly", low=0)
    beat_s: float = setting(1.0, "how often a node tells the coordinator that it lives", unit="s", low=0.05)
    suspect_s: float = setting(3.0, "a node that was not heard for so long is suspect: two beats may be lost", unit="s", low=0.1)
    dead_s: float = setting(
        5.0, "a node that was not heard for so long is dead, and one that hears nothing for so long kills its own ranks", unit="s", low=0.2
    )


@dataclass(frozen=True, slots=True)
class ObserveSection:
    status_interval_s: float = setting(1.0, "how often live.json is renewed", unit="s", low=0.1)
    ledger_look_s: float = setting(
        1.0,
        "how often rank 0 looks for what `surefoot data block` asked: nobody notices a sooner answer, no step the look at a file's size",
        unit="s",
        low=0.0,
        since=4,
        counts=False,
    )
    keep_generations: int = setting(20, "log folders of the newest ones; as many as launch.max_restarts allows one agent", low=1)
    max_log_bytes: int = setting(
        64 << 20,
        "a log file of a rank that is larger is moved to a .1 beside it: a rank that warns at every step must not fill the disk",
        unit="bytes",
        low=4096,
    )


@dataclass(frozen=True, slots=True)
class PlanSection:
    """What `surefoot plan` expected of this run when it wrote the TOML. Nothing depends on it; `train` repeats it."""

    law: str = setting("", "the scaling law that sized this run; empty: no plan was made")
    validated: bool = setting(False, "true: the law was fitted to finished runs of your own, as `surefoot sweep` makes them")
    loss: float = setting(0.0, "expected at the end; 0 is not known", unit="nats per token", low=0.0)
    loss_low: float = setting(0.0, "2.5% of what the law's fits say", unit="nats per token", low=0.0)
    loss_high: float = setting(0.0, "97.5% of it", unit="nats per token", low=0.0)
    step_s: float = setting(0.0, "expected time of a step; 0 is not known", unit="s", low=0.0)
    memory_bytes: int = setting(0, "expected peak of the fullest device; 0 is not known", unit="bytes", low=0)


@dataclass(frozen=True, slots=True)
class CanarySection:
    """A frozen held-out set whose loss is far quieter than that of training: it sees slow harm, and tells data from model."""

    interval_steps: int = setting(100, "how often it is evaluated; 0 is off", unit="steps", low=0)
    num_tokens: int = setting(
        131_072, "size of the frozen set: its noise is 0.0005 to 0.003 nats on public runs of this size", unit="tokens", low=0
    )
    max_share: float = setting(
        0.0075, "the set is made smaller where it would cost more than this share of the computing between two evaluations, at a third of "
        "a step for a forward; 0.37 was measured with a large vocabulary, so that 1% is kept there too",
        low=0.0001, high=1.0,
    )  # fmt: skip
    margin_nats: float = setting(
        0.003,
        "a rise above its best: 0 of 1,126 evaluations of healthy public runs",
        unit="nats per token",
        low=0.0,
    )
    num_in_a_row: int = setting(2, "evaluations in a row that must be above", low=1)


@dataclass(frozen=True, slots=True)
class HealSection:
    """What is done about what the detectors find. Budgets are folded from the ledger, so no roll-back gives them back."""

    preset: Literal["tiers", "classic"] = setting(
        "tiers",
        "classic: norm over threshold skips, loss over N sigma rolls back and skips: far more false alarms, see docs/detectors.md",
    )
    rules: tuple[tuple[str, str], ...] = setting(
        (), "binds rules by name to record, alert, skip, rollback, pause or off, over what the preset says", is_table=True
    )
    rollback: Literal["diagnose", "skip_at_once", "off"] = setting(
        "diagnose", "diagnose replays with the same batches first, which tells data from state from hardware; skip_at_once leaves them out"
    )
    recheck: bool = setting(
        True, "a step that looks ill is computed again before its update: a transient fault vanishes, and the step is then taken"
    )
    num_agreeing: int = setting(2, "independent tiers that must agree before a roll-back", low=1)
    agree_steps: int = setting(200, "how far apart their findings may lie", unit="steps", low=1)
    decide_steps: int = setting(200, "after a spike: recovered by then, or a divergence", unit="steps", low=1)
    back_steps: int = setting(100, "skip_at_once: how far before the onset (PaLM, arXiv 2204.02311)", unit="steps", low=0)
    skip_steps: int = setting(200, "skip_at_once: batches that are left out (PaLM: 200 to 500)", unit="steps", low=1)
    max_rollbacks: int = setting(3, "automatic roll-backs within budget_steps; one more pauses instead", low=0)
    budget_steps: int = setting(5000, "over how many steps roll-backs are counted", unit="steps", low=1)
    breaker_in_a_row: int = setting(3, "steps in a row that were skipped or ill: the breaker pauses the run", low=1)
    breaker_num: int = setting(5, "the same within breaker_steps", low=1)
    breaker_steps: int = setting(100, "the window of breaker_num", unit="steps", low=1)
    pause_limit_s: float = setting(
        0.0, "a paused run keeps its processes this long, then saves and ends with exit code 6; 0 ends at once", unit="s", low=0.0
    )
    dry_run: bool = setting(False, "say what would be done, and do nothing but skip what is not finite")
    lr_factor: float = setting(
        0.0, "second line: after a second roll-back for the same cause the learning rate is multiplied by this, ledgered; 0 is off",
        low=0.0, high=1.0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AlertsSection:
    """Where alerts go. Secrets are named, not written: `env:NAME` is read from the environment by the process that sends."""

    webhook: str = setting("", "http(s) address, or env:NAME, that gets JSON")
    slack: str = setting("", "address, or env:NAME, of a Slack incoming webhook")
    email: tuple[str, ...] = setting((), "addresses that get mail through `smtp`")
    smtp: str = setting("", "host:port of the mail server, or env:NAME with smtp://user:password@host:port (smtps:// for TLS throughout)")
    email_from: str = setting("", "what mail comes from; empty is surefoot at the name of the host")
    command: str = setting("", "a shell command that gets the alert as JSON on its standard input")
    group_s: float = setting(10.0, "alerts of one kind within this are one", unit="s", low=0.0)
    repeat_s: float = setting(900.0, "an alert of the same kind is not sent again sooner", unit="s", low=0.0)
    max_per_hour: int = setting(30, "more are counted and told together", low=1)
    timeout_s: float = setting(5.0, "one delivery may take so long; receivers answer in a fraction of it", unit="s", low=0.1)
    runbook: str = setting("", "base address of your runbook; empty names the entry alone")


@dataclass(frozen=True, slots=True)
class ObjectivesSection:
    """No settings in this release."""


@dataclass(frozen=True, slots=True)
class DrillSection:
    """A fault that ranks commit themselves, for rehearsals. What is done to them from outside needs no setting."""

    fault: Literal["none", "busy-loop", "mismatched-collective", "exception"] = setting(
        "none", "what `rank` does before its step `step`: loop in Python, call a collective that no other rank calls, raise"
    )
    rank: int = setting(0, "who does it", low=0)
    step: int = setting(0, "when: as many steps are finished then", unit="steps", low=0)
    generations: int = setting(1, "in the first so many starts of the ranks; 0 is every one, a fault that no restart mends", low=0)


@dataclass(frozen=True, slots=True)
class RunConfig:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    stage: tuple[StageSection, ...] = ()
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    numerics: NumericsSection = field(default_factory=NumericsSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    canary: CanarySection = field(default_factory=CanarySection)
    heal: HealSection = field(default_factory=HealSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    observe: ObserveSection = field(default_factory=ObserveSection)
    alerts: AlertsSection = field(default_factory=AlertsSection)
    objectives: ObjectivesSection = field(default_factory=ObjectivesSection)
    drill: DrillSection = field(default_factory=DrillSection)
    plan: PlanSection = field(default_factory=PlanSection)


HASHED_SECTIONS = ("model", "data", "train", "optimizer", "schedule", "numerics")
