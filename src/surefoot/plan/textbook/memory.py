"""Classic rules of memory, pipelines and layouts, computed again. The example is a 7B on 512 H100 as 8 x 8 x 8."""

from __future__ import annotations

from functools import partial

from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.pipeline_schedule import closed_form, fewest_micro_batches
from surefoot.plan.memory.estimate import Memory, estimate
from surefoot.plan.memory.implementations import MEGATRON
from surefoot.plan.records import BF16_MASTERS, Dtypes, Layout, Recompute, Workload
from surefoot.plan.textbook.row import LLAMA_7B, Row, gigabytes

_N = 7e9
_TP = _PP = _DP = 8
_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198"
_MEGATRON = "Narayanan et al., arXiv 2104.04473"
_ZERO = "Rajbhandari et al., arXiv 1910.02054"
_BF16_GRADS = Dtypes(weight=2, grad=2, master=4, moments=8)
_GIB = 1 << 30


def rows() -> tuple[Row, ...]:
    return (
        *(
            _static(),
            _cut_states(),
            _activations(),
            _footprint(),
            _bubble(),
            _interleaved(),
            _four_stages(),
            _two_chunks(),
            _reduce_chunks(),
        ),
        *(_collectives_per_layer(), _zero_gathers(), _sharded_70b(), _million_tokens(), _devices()),
    )


def _example(*, pp: int = _PP, dp: int = _DP, chunks: int = 1, recompute: Recompute = "none") -> Memory:
    """Of the fullest device, at 4,096 tokens and micro-batches of one, as Megatron-LM holds it with its distributed optimizer."""
    layout = Layout(
        tp=_TP,
        pp=pp,
        dp_shard=dp,
        zero_stage=1,
        pp_schedule="interleaved" if chunks > 1 else "1f1b",
        pp_chunks=chunks,
        recompute=recompute,
    )
    return estimate(Workload(LLAMA_7B, 4096, 256, _BF16_GRADS), layout, implementation=MEGATRON)


def korthikanti_bytes(*, seq_len: int, width: int, tp: int, sequence_parallel: bool = True, full_recompute: bool = False) -> float:
    """Activations of one layer and one sequence, attention fused: s h (34 / t), without sequence parallel s h (10 + 24 / t), of full
    recomputation what enters, 2 s h (/ t)."""
    whole, cut = (2.0, 0.0) if full_recompute else (10.0, 24.0)
    return seq_len * width * ((whole + cut) / tp if sequence_parallel else whole + cut / tp)


def _static() -> Row:
    optimizer = BF16_MASTERS.weight + BF16_MASTERS.master + BF16_MASTERS.moments
    told, bf16, fp32 = (_N * size for size in (optimizer, optimizer + 2, optimizer + 4))
    return Row(
        "static-memory-of-7b",
        "A 7B in mixed precision needs 98 GB of static memory",
        f"{gigabytes(bf16)} with gradients in bf16, {gigabytes(fp32)} in float32",
        "wrong",
        f"{gigabytes(told)} are weights, masters and moments; gradients are static too",
        _ZERO,
        {"without_gradients": told, "bf16": bf16, "fp32": fp32},
    )


def _cut_states() -> Row:
    held = _N / (_TP * _PP)
    weights, optimizer = 2 * held, (4 + 8) * held / _DP
    return Row(
        "states-on-8x8x8",
        "TP 8, PP 8 and a distributed optimizer over DP 8: 219 MB of weights and 164 MB of optimizer a device",
        f"{weights / 1e6:.2f} MB and {optimizer / 1e6:.2f} MB; with them {2 * held / 1e6:.0f} MB of gradients in bf16 or "
        f"{4 * held / 1e6:.0f} in "
        "float32",
        "incomplete",
        "stage 1 shares out moments and masters alone: each device keeps whole gradients of its part",
        _ZERO,
        {"weights": weights, "optimizer": optimizer, "gradients_bf16": 2 * held, "gradients_fp32": 4 * held},
    )


def _activations() -> Row:
    layers = LLAMA_7B.num_layers  # the first of p stages holds p micro-batches of its L / p layers
    kept = partial(korthikanti_bytes, seq_len=4096, width=LLAMA_7B.d_model, tp=_TP)
    plain = layers * kept()
    without = layers * kept(sequence_parallel=False)
    full = [layers * kept(sequence_parallel=cut, full_recompute=True) for cut in (True, False)]
    interleaved = plain * (1.0 + (_PP - 1) / (_PP * 2))
    ours = _example().activations
    return Row(
        "activations-with-recomputation",
        "Activations take 8 to 12 GB a device with recomputation",
        f"{gigabytes(plain)} without any, sequence parallel and fused attention given ({gigabytes(interleaved)} with two chunks a stage, "
        f"{gigabytes(without)} without sequence parallel); {full[0] / 1e9:.2f} to {gigabytes(full[1])} with full recomputation",
        "wrong",
        f"four times too high at least; counted tensor by tensor for SwiGLU and RMSNorm without dropout it is {gigabytes(ours)}",
        _KORTHIKANTI,
        {
            "plain": plain,
            "interleaved": interleaved,
            "without_sequence_parallel": without,
            "full": full[0],
            "full_whole": full[1],
            "counted": ours,
        },
    )


def _footprint() -> Row:
    split = _example()
    model_states = split.states + split.activations
    flat = _example(pp=1, dp=_PP * _DP)
    card = accelerator("h100").memory_bytes
    return Row(
        "footprint-on-8x8x8",
        "So the footprint is 10 to 15 GB, and 8 x 8 x 8 is the layout to take",
        f"{gigabytes(model_states)} of states and activations, {split.total / _GIB:.1f} GiB with all that is not the model's; without a "
        "pipeline "
        f"{flat.total / _GIB:.1f} GiB of {card / _GIB:.1f}",
        "contradiction",
        "the layout leaves the card empty. By the same book's rule, as little model parallelism as fits, there is no pipeline",
        f"{_KORTHIKANTI}; NVIDIA H100 data sheet",
        {"model": model_states, "total": split.total, "without_pipeline": flat.total, "card": card},
    )


def _bubble() -> Row:
    found = closed_form(8, num_micro_batches=32)
    return Row(
        "bubble",
        "The bubble is (p - 1) / m: 21.9% with 8 stages and 32 micro-batches",
        f"{found.idle_of_ideal:.1%} of the ideal time, {found.idle_of_total:.1%} of the whole step",
        "imprecise",
        "two figures go by one name: idle over ideal, and idle over all, (p - 1) / (m + p - 1)",
        _MEGATRON,
        {"of_ideal": found.idle_of_ideal, "of_total": found.idle_of_total},
    )


def _interleaved() -> Row:
    found = closed_form(8, num_micro_batches=32, chunks=2)
    told = (8 / 2 - 1) / 32
    return Row(
        "bubble-interleaved",
        "With v chunks a stage the bubble is (p / v - 1) / m: 9.4% for p = 8, v = 2, m = 32",
        f"(p - 1) / (v m) = {found.idle_of_ideal:.1%}, {found.idle_of_total:.1%} of the whole step",
        "wrong",
        f"the told form gives {told:.1%} here, 0 at v = p and less than nothing beyond",
        _MEGATRON,
        {"told": told, "of_ideal": found.idle_of_ideal, "of_total": found.idle_of_total},
    )


def _four_stages() -> Row:
    found = closed_form(8, num_micro_batches=32)
    return Row(
        "four-micro-batches-a-stage",
        "m of at least 4 p keeps the bubble below 25%",
        f"{found.idle_of_ideal:.1%} of ideal, {found.idle_of_total:.1%} of all at p = 8",
        "right",
        "(p - 1) / 4 p is below 1 / 4 for every p",
        _MEGATRON,
        {"of_ideal": found.idle_of_ideal, "of_total": found.idle_of_total},
    )


def _two_chunks() -> Row:
    told = {v: closed_form(8, num_micro_batches=2 * v * 7, chunks=v).idle_of_total for v in (1, 4)}
    needed = {v: fewest_micro_batches(8, max_bubble=0.15, chunks=v) for v in (1, 2, 4)}
    legal = {v: fewest_micro_batches(8, max_bubble=0.15, chunks=v, of_stages=True) for v in (2, 4)}
    return Row(
        "two-v-times-p-minus-one",
        "m of at least 2 v (p - 1) keeps the bubble below 15%",
        f"{told[1]:.0%} of the step at v = 1 and {told[4]:.0%} at v = 4. For p = 8 and 15% it takes m = {needed[1]} at v = 1, {needed[2]} "
        "at v = 2 "
        f"({legal[2]} in whole rounds), {needed[4]} at v = 4 ({legal[4]})",
        "wrong",
        "the rule runs the wrong way: more chunks need fewer micro-batches, m >= (p - 1)(1 - f) / (f v)",
        f"{_MEGATRON}; Megatron-LM asks for multiples of p",
        {
            "told_v1": told[1],
            "told_v4": told[4],
            "needed_v1": needed[1],
            "needed_v2": needed[2],
            "needed_v4": needed[4],
            "legal_v2": legal[2],
            "legal_v4": legal[4],
        },
    )


def _reduce_chunks() -> Row:
    needed = {v: fewest_micro_batches(8, max_bubble=0.15, chunks=v) for v in (1, 4)}
    return Row(
        "reduce-chunks",
        "Where that takes too many micro-batches, reduce v",
        f"{needed[4]} micro-batches at v = 4 become {needed[1]} at v = 1",
        "wrong",
        "fewer chunks need more micro-batches",
        _MEGATRON,
        {"v4": needed[4], "v1": needed[1]},
    )


def _collectives_per_layer() -> Row:
    products = 7  # query, key, value, output; gate, up, down
    return Row(
        "collective-after-each-product",
        "Tensor parallelism reduces after every matrix product",
        f"2 all-reduces a layer forward and 2 backward, where a layer has {products} products",
        "wrong",
        "a column cut and the row cut behind it need one sum between them; with sequence parallel each is a gather and a reduce-scatter",
        f"Shoeybi et al., arXiv 1909.08053; {_KORTHIKANTI}",
        {"forward": 2, "backward": 2, "products": products},
    )


def _zero_gathers() -> Row:
    return Row(
        "each-zero-stage-gathers-more",
        "Each stage of ZeRO adds an all-gather",
        "stages 1 and 2 move what plain data parallelism moves, 2 N elements a step; stage 3 moves 3 N",
        "wrong",
        "an all-reduce is a reduce-scatter and a gather; only stage 3 gathers weights a second time, for the backward",
        _ZERO,
        {"stage_1": 2, "stage_2": 2, "stage_3": 3},
    )


def _sharded_70b() -> Row:
    n, ranks = 70e9, 64
    weights, low, high = 2 * n / ranks, 16 * n / ranks, 18 * n / ranks
    layer = 2 * n / 80
    return Row(
        "sharded-70b",
        "A 70B under ZeRO-3 over 64 devices takes about 2 GB each",
        f"{weights / 1e9:.2f} GB are the bf16 weights alone; all states {low / 1e9:.1f} to {gigabytes(high)}, and {layer / 1e9:.2f} GB "
        "for one layer "
        "that is gathered",
        "wrong",
        "weights, gradients, masters and moments together are eight to nine times the bf16 weights",
        _ZERO,
        {"weights": weights, "states_low": low, "states_high": high, "layer": layer},
    )


def _million_tokens() -> Row:
    kept = partial(korthikanti_bytes, seq_len=1_000_000, width=8192, tp=8)
    without = kept(sequence_parallel=False)
    cut = kept()
    full = 80 * kept(full_recompute=True)
    return Row(
        "million-tokens",
        "Sequence parallelism makes a context of a million tokens feasible with TP 8",
        f"a layer of a 70B keeps {without / 1e9:.0f} GB without it and {cut / 1e9:.1f} with it; even full recomputation keeps "
        f"{full / 1e9:.0f} GB "
        "over its 80 layers",
        "incomplete",
        "the positions themselves must be shared out: context parallel",
        _KORTHIKANTI,
        {"without": without, "with": cut, "full": full},
    )


def _devices() -> Row:
    layout = Layout(tp=8, pp=8, dp_shard=8, ep=4)
    return Row(
        "expert-ranks-multiply",
        "Devices = TP x PP x DP x EP",
        f"TP x PP x CP x DP: {layout.num_devices} with TP 8, PP 8, DP 8, whatever EP",
        "wrong",
        "expert parallelism deals experts to data ranks that are there already: EP divides DP",
        "Megatron-LM, arXiv 2104.04473; GShard, arXiv 2006.16668",
        {"devices": layout.num_devices},
    )
