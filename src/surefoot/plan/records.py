"""The records that the parts of a plan hand to each other. Frozen, torch-free; bytes and FLOPs as plain numbers.

`Layout` is one way to share a model out over devices, `Workload` is what is trained on it, `Dtypes` what each kind of state is stored in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.core.model_sizes import ModelSizes

PipelineSchedule = Literal["1f1b", "interleaved", "zero_bubble"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices = tp x pp x cp x dp_shard x dp_replicate. `ep` divides the data ranks and adds no devices.

    `zero_stage` is what `dp_shard` frees between uses: 1 the moments alone, 2 gradients too, 3 parameters too. With dp_shard 1 it says
    nothing: every data rank then holds a whole replica.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero_stage: Literal[1, 2, 3] = 3
    pp_schedule: PipelineSchedule = "1f1b"
    pp_chunks: int = 1
    recompute: Recompute = "none"
    micro_batch_size: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_shard * self.dp_replicate

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.cp * self.data_ranks


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Bytes of one element of each kind of state. The default is bf16 compute with fp32 masters, gradients and moments: 18 bytes with a
    separate bf16 weight, as Megatron counts. `master` is 0 where the weights themselves are fp32."""

    weight: int = 2
    grad: int = 4
    master: int = 4
    moments: int = 8
    activation: int = 2
    reduce: int = 4


FP32 = Dtypes(weight=4, grad=4, master=0, moments=8, activation=4, reduce=4)
BF16_MASTERS = Dtypes()


@dataclass(frozen=True, slots=True)
class Workload:
    """What one step trains. `global_batch_size` in sequences; `fused_attention` keeps no scores (SDPA, FlashAttention)."""

    sizes: ModelSizes
    seq_len: int
    global_batch_size: int
    dtypes: Dtypes = BF16_MASTERS
    fused_attention: bool = True

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def flops_per_step(self) -> int:
        """Exact, forward and backward, without recomputation."""
        return self.global_batch_size * self.sizes.flops_per_sequence(self.seq_len)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a number is what it is, and who says so. `source` is a paper, a data sheet, a file, or "arithmetic"."""

    why: str
    source: str
