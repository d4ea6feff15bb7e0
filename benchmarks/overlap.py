"""How much of the reductions of gradients is hidden behind the backward? Read off torch's profiler, on two ranks over gloo.

    python benchmarks/overlap.py [--steps 5] [--d-model 384] [--layout fsdp] [--layout ddp] [--layout fsdp-waiting]

Prints a line a layout and rank: the time of all reductions, and the share of it during which this rank computed its backward. With
`fsdp-waiting` each reduction is waited for where it is begun, as fully_shard does on a CPU by itself: the control.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from surefoot.core.sections import LaunchSection, ModelSection, ParallelSection
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.model.loss import loss_of
from surefoot.parallel.cut import cut
from surefoot.parallel.mesh import place_of
from surefoot.parallel.running import Sequential
from surefoot.tensors.batch import Batch
from surefoot.tensors.process_group import connected

LAYOUTS = {
    "fsdp": ParallelSection(dp_shard=2),
    "fsdp-once": ParallelSection(dp_shard=2, zero_stage=1),
    "fsdp-waiting": ParallelSection(dp_shard=2),
    "ddp": ParallelSection(dp_replicate=2),
}
MICRO_STEPS = 2

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Microseconds of one rank. `hidden` is how long reductions ran while its backward computed."""

    num_reductions: int
    reductions: float
    hidden: float

    @property
    def share(self) -> float:
        return self.hidden / self.reductions if self.reductions else 0.0


def overlap_of(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """From the events of a Chrome trace of a CPU run over gloo.

    gloo's work runs in threads of its own and is named gloo:<operator> there; it makes a reduce-scatter out of an all-reduce. What computes
    are operators inside the backward, in the thread that began it, outside of what the layout adds: sending, copying, waiting.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    backward = "autograd::engine::evaluate_function"
    main = next(event["tid"] for event in spans if event["name"].startswith(backward))
    here = [event for event in spans if event["tid"] == main]
    in_backward = _merged(_span(event) for event in here if event["name"].startswith(backward))
    operators = _merged(_span(event) for event in here if event["name"].startswith("aten::"))
    of_layout = _merged(_span(event) for event in here if event["name"].startswith(("FSDP::", "c10d::")))
    computing = _without(_common(operators, in_backward), of_layout)
    reductions = [_span(event) for event in spans if event["name"] in ("gloo:all_reduce", "gloo:reduce_scatter") and event["tid"] != main]
    hidden = sum(_length(_common([reduction], computing)) for reduction in reductions)
    return Overlap(len(reductions), _length(reductions), hidden)


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _common(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """Both are sorted and without overlaps in themselves."""
    both = []
    index = 0
    for begin, end in ours:
        while index < len(theirs) and theirs[index][1] <= begin:
            index += 1
        for other_begin, other_end in theirs[index:]:
            if other_begin >= end:
                break
            both.append((max(begin, other_begin), min(end, other_end)))
    return both


def _without(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    edges = [float("-inf"), *(edge for span in theirs for edge in span), float("inf")]
    return _common(ours, list(zip(edges[::2], edges[1::2], strict=True)))


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def trace_steps(layout: str, *, section: ModelSection, seq_len: int, num_steps: int, path: Path) -> None:
    """Collective over the two ranks. Writes the trace of `num_steps` forwards and backwards of two micro-steps each."""
    with connected(LaunchSection()) as world:
        model = build_model(section, 1024, seed=1)
        model_cut = cut(
            model,
            place_of(LAYOUTS[layout], rank=world.rank, world_size=world.size),
            parallel=LAYOUTS[layout],
            plan=cut_plan(model),
            materialise=partial(materialise, seed=1, device=world.device),
            world=world,
            autocast=nullcontext(),
            collective_limit_s=60.0,
        )
        runner = model_cut.runner
        if layout == "fsdp-waiting":
            assert isinstance(runner, Sequential)
            assert runner.reductions is not None
            runner = replace(runner, reductions=None)  # nobody lets a reduction go on, so each is waited for
        tokens_BS = torch.randint(0, 1024, (2, seq_len), generator=torch.Generator().manual_seed(world.rank))
        zeros_BS = torch.zeros_like(tokens_BS)
        positions_BS = torch.arange(seq_len).expand_as(tokens_BS)
        atom = Batch(tokens_BS, tokens_BS, positions_BS, zeros_BS, zeros_BS[:, 0], num_live_tokens=tokens_BS.numel(), atom=0)
        step = partial(runner.run, [atom] * MICRO_STEPS, start=lambda _: None, loss=loss_of)
        step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(num_steps):
                step()
        profiled.export_chrome_trace(str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description="hidden share of the reductions of gradients")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--d-model", type=int, default=384)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)  # this process is a rank
    given = parser.parse_args()
    if given.trace is not None:
        torch.set_num_threads(1)
        section = ModelSection(num_layers=given.num_layers, d_model=given.d_model, num_heads=given.d_model // 64)
        trace_steps(given.layout[0], section=section, seq_len=given.seq_len, num_steps=given.steps, path=given.trace)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for layout in given.layout or LAYOUTS:
            for rank, path in enumerate(_run_ranks(layout, given, Path(folder))):
                found = overlap_of(json.loads(path.read_text())["traceEvents"])
                line = {
                    "layout": layout,
                    "rank": rank,
                    "num_reductions": found.num_reductions,
                    "reductions_ms_per_step": round(found.reductions / 1e3 / given.steps, 2),
                    "hidden_share": round(found.share, 3),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    return 0


def _run_ranks(layout: str, given: argparse.Namespace, folder: Path) -> list[Path]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = [folder / f"{layout}-{rank}.json" for rank in range(2)]
    sizes = [f"--steps={given.steps}", f"--d-model={given.d_model}", f"--num-layers={given.num_layers}", f"--seq-len={given.seq_len}"]
    command = [sys.executable, __file__, *sizes, f"--layout={layout}"]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, "--trace", str(path)], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, path in enumerate(paths)
    ]
    if any([rank.wait(timeout=600) for rank in ranks]):
        raise SystemExit(f"a rank of {layout} failed")
    return paths


if __name__ == "__main__":
    raise SystemExit(main())
