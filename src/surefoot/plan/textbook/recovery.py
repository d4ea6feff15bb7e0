"""Classic rules of failures, checkpoints and what they cost, computed again. H100 at 3 USD an hour and an MFU of 40%."""

from __future__ import annotations

from surefoot.core.canary_cost import canary_share
from surefoot.plan.failures.checkpoint_sizes import checkpoint_bytes, save_times, saved_bytes
from surefoot.plan.failures.interval import SECONDS_PER_DAY, young_s
from surefoot.plan.failures.rates import LLAMA_3
from surefoot.plan.failures.retention import retention_for
from surefoot.plan.hardware import accelerator
from surefoot.plan.records import BF16_MASTERS
from surefoot.plan.sizing.budget import budget
from surefoot.plan.textbook.row import Row, gigabytes, short
from surefoot.plan.tuning.batch import legal_batches

_MFU = 0.4
_USD_PER_HOUR = 3.0
_H100 = accelerator("h100")
_ARITHMETIC = "6 N D at an MFU of 40% of the dense peak of an H100"
_DATA_SHEETS = "NVIDIA H100 and A100 data sheets; PCIe 4 and 5 x16"
_RETENTION = "arXiv 1310.8486; arXiv 2410.18124"


def rows() -> tuple[Row, ...]:
    return (
        *(_failures(), _shard(), _disk(), _generations(), _rollback(), _kept(), _dollars(), _hours(), _hundred_steps(), _canary_cost()),
        *(_fewer_devices(), _interval()),
    )


def device_hours(n: float, *, tokens: float) -> float:
    return budget(_H100, num_devices=1, flops=6.0 * n * tokens, mfu=_MFU).device_hours


def _failures() -> Row:
    mean_h, days = LLAMA_3.mtbf_s(16_384) / 3600.0, 54.0
    return Row(
        "failures-of-llama-3",
        "Llama 3 met over 50 hardware interruptions, one every few days",
        f"419 unexpected ones in 54 days on 16,384 devices, one in {mean_h:.1f} h: {LLAMA_3.device_hours_per_failure:,.0f} device-hours "
        "each",
        "wrong",
        f"eight times too few; at that rate a job on 512 devices is interrupted every {LLAMA_3.mtbf_s(512) / 3600.0:.0f} h",
        LLAMA_3.source,
        {"mtbf_h": mean_h, "device_hours": LLAMA_3.device_hours_per_failure, "factor": 419 / 50, "per_day": 419 / days},
    )


def _shard() -> Row:
    total, rebuilt = saved_bytes(70e9, BF16_MASTERS), saved_bytes(70e9, BF16_MASTERS, keep_weights=False)
    return Row(
        "shard-of-a-70b-checkpoint",
        "A checkpoint of a 70B is about 980 GB, 1.9 GB a rank at 512",
        f"{gigabytes(total)} and {total / 512 / 1e9:.3f} GB; {gigabytes(rebuilt)} and {rebuilt / 512 / 1e9:.2f} GB when bf16 weights are "
        "rounded "
        "again from their masters",
        "right",
        "bf16 weights 2, masters 4, moments 8 bytes a parameter; gradients are not saved",
        "dtypes: surefoot.plan.failures.checkpoint_sizes",
        {"total": total, "per_rank": total / 512, "rebuilt": rebuilt, "rebuilt_per_rank": rebuilt / 512},
    )


def _disk() -> Row:
    total = saved_bytes(70e9, BF16_MASTERS)
    alone, shared = total / 512 / _H100.disk, save_times(total, num_ranks=512, hardware=_H100)
    slow = save_times(total, num_ranks=512, hardware=_H100, host_link=accelerator("a100").host_link)
    pageable = 8e9  # what a copy through a bounce buffer reaches
    unpinned = save_times(total, num_ranks=512, hardware=_H100, host_link=pageable)
    return Row(
        "flush-to-a-local-disk",
        "With an NVMe disk of 10 GB/s a shard is written in under 200 ms, and copied to the host in under 100",
        f"{alone:.2f} s for one rank, {shared.flush_s:.2f} s for the eight that share the node's disk; {shared.stage_s * 1e3:.0f} ms to "
        "the host by "
        f"PCIe 5, {slow.stage_s * 1e3:.0f} ms by PCIe 4, about {unpinned.stage_s * 1e3:.0f} ms where memory is not pinned",
        "wrong",
        "a node has one disk; what is a rank's own is its link, and only pinned memory reaches its rate (8 GB/s are assumed without)",
        _DATA_SHEETS,
        {"alone_s": alone, "shared_s": shared.flush_s, "pcie5_s": shared.stage_s, "pcie4_s": slow.stage_s, "unpinned_s": unpinned.stage_s},
    )


def _generations() -> Row:
    total = saved_bytes(70e9, BF16_MASTERS)
    stands = checkpoint_bytes(total, num_ranks=512, devices_per_node=8, num_rolling=3, num_milestones=0)
    return Row(
        "three-generations",
        "Keep three checkpoints, delete the oldest once the new one is validated: three times the size",
        f"four stand on disk during each write: {stands.peak / 1e12:.1f} TB for a 70B, not {stands.rolling / 1e12:.1f}",
        "incomplete",
        "the oldest goes after the new one is known to be good, so the new one is beside all three",
        "surefoot.plan.failures.checkpoint_sizes",
        {"peak": stands.peak, "told": stands.rolling},
    )


def _rollback() -> Row:
    steps = 10_300 - 8_000
    hours = device_hours(7e9, tokens=800e3 * steps)
    return Row(
        "rollback-of-300-steps",
        "Going back from step 10,300 to the checkpoint of 8,000 costs 300 steps, 7 GPU-hours",
        f"{steps:,} steps: {hours:.0f} GPU-hours, {hours * _USD_PER_HOUR:.0f} USD (7B, 800k tokens a step)",
        "wrong",
        "the difference of the two steps",
        _ARITHMETIC,
        {"steps": steps, "hours": hours, "usd": hours * _USD_PER_HOUR},
    )


def _kept() -> Row:
    newest, fault, every = 10_000, 8_200, 500
    kept = [newest - index * every for index in range(3)]
    needed = (newest - fault // every * every) // every + 1
    plan = retention_for(10_300 - fault, step_s=1.0, interval_steps=every, total_steps=100_000)
    return Row(
        "the-checkpoint-of-step-8000",
        "With the last three kept and a save each 500 steps, the checkpoint of step 8,000 is there when a fault at 8,200 is found at "
        "10,300",
        f"kept are {', '.join(f'{step:,}' for step in kept)}, all from after the fault; it takes the last {needed}, or keep_last "
        f"{plan.keep_last} with cover_steps {plan.cover_steps:,}",
        "contradiction",
        "what is kept must reach behind the slowest detector; milestones each 10,000 steps leave only step 0",
        _RETENTION,
        {"oldest_kept": min(kept), "needed": needed, "cover_steps": plan.cover_steps},
    )


def _dollars() -> Row:
    hours = {n: device_hours(n, tokens=500e6) for n in (7e9, 70e9, 405e9)}
    cost = {n: value * _USD_PER_HOUR for n, value in hours.items()}
    size = 3000.0 / _USD_PER_HOUR / device_hours(1.0, tokens=500e6)
    return Row(
        "five-hundred-steps-in-dollars",
        "Losing 500 steps of 1M tokens on 512 H100 costs 3,000 USD",
        f"{cost[7e9]:.0f} USD for a 7B, {cost[70e9]:.0f} for a 70B ({cost[70e9] / 2:.0f} on average), {cost[405e9]:,.0f} for a 405B",
        "wrong",
        f"the size is not told, and 3,000 USD need {short(size)}. A restart of 15 min costs {512 * _USD_PER_HOUR / 4:.0f} USD whatever the "
        "size: up to a 70B more than the steps do",
        _ARITHMETIC,
        {"usd_7b": cost[7e9], "usd_70b": cost[70e9], "usd_405b": cost[405e9], "size": size, "restart_usd": 512 * _USD_PER_HOUR / 4},
    )


def _hours() -> Row:
    small, large = device_hours(13e9, tokens=1e10), device_hours(13e9, tokens=4e10)
    tokens = 80.0 / device_hours(13e9, tokens=1e4)
    return Row(
        "ten-thousand-steps-of-13b",
        "10,000 steps of a 13B are 80 GPU-hours",
        f"{small:,.0f} with 1M tokens a step, {large:,.0f} with 4M; 80 would be {short(tokens)} tokens a step",
        "wrong",
        "steps have no price before their tokens are told",
        _ARITHMETIC,
        {"hours_1m": small, "hours_4m": large, "tokens": tokens},
    )


def _hundred_steps() -> Row:
    return Row(
        "recompute-of-100-steps",
        "From the checkpoint of 14,900 to the spike at 14,967 about 100 steps are computed again",
        f"{14_967 - 14_900}; and saves each 200 or 500 steps leave none at 14,900, but at {14_967 // 200 * 200:,} or "
        f"{14_967 // 500 * 500:,}",
        "wrong",
        "the example's own settings",
        "arithmetic",
        {"steps": 14_967 - 14_900, "at_200": 14_967 // 200 * 200, "at_500": 14_967 // 500 * 500},
    )


def _canary_cost() -> Row:
    small = [canary_share(128 * 1024, interval_steps=100, tokens_per_step=step) for step in (1e6, 800e3)]
    many = [canary_share(num * 4096, interval_steps=100, tokens_per_step=step) for num, step in ((512, 1e6), (2048, 800e3))]
    return Row(
        "cost-of-a-canary",
        "A canary of 512 to 2,048 examples each 100 steps costs 0.1%, at 128K tokens",
        f"128K tokens cost {small[0]:.3%} to {small[1]:.3%}; 512 to 2,048 examples of 4,096 are 2.1 to 8.4M tokens and cost {many[0]:.1%} "
        "to "
        f"{many[1]:.1%}",
        "contradiction",
        "the two sizes differ by 16 to 64 times",
        "arithmetic: a forward is a third of a training step",
        {"small_low": small[0], "small_high": small[1], "many_low": many[0], "many_high": many[1]},
    )


def _fewer_devices() -> Row:
    legal = legal_batches(256, data_ranks=(6, 8))
    return Row(
        "resume-on-fewer-devices",
        "A run on 512 devices goes on with 384 from the same checkpoint",
        f"at TP 8 and PP 8 that is DP 8 to 6, and 256 sequences over 6 are {256 / 6:.2f}; even on both: "
        f"{' or '.join(str(batch) for batch in legal.even)}",
        "incomplete",
        "the batch must be planned for every number of ranks that the run may shrink to, or slots stay empty",
        "surefoot.plan.tuning.batch",
        {"each": 256 / 6, "below": min(legal.even), "above": max(legal.even)},
    )


def _interval() -> Row:
    mean_s, step_s = LLAMA_3.mtbf_s(1000), 4.0
    steps = {stall: young_s(stall, mean_s) / step_s for stall in (1.0, 10.0)}
    return Row(
        "interval-in-steps",
        "Save every 200 to 500 steps, or every 500 to 2,000",
        f"for 1,000 devices and steps of 4 s: {steps[1.0]:.0f} where a save blocks 1 s, {steps[10.0]:.0f} where it blocks 10 s",
        "imprecise",
        f"it follows from the stall and from {mean_s / SECONDS_PER_DAY:.1f} days between failures: sqrt(2 w M)",
        "Young, CACM 17(9), 1974",
        {"stall_1s": steps[1.0], "stall_10s": steps[10.0]},
    )
