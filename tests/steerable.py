"""A data port of somebody else's loop that can leave samples out, and the short way to ask for it in a run's ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.core.blocking import Block, TokenSpan, head_of
from surefoot.core.clock import SystemClock
from surefoot.core.errors import DataError
from surefoot.core.events import Event
from surefoot.observe.blocks import asked_fields, fold_blocks
from surefoot.observe.ledger import Ledger, read_ledger

BATCH = 4


class Points:
    """Sample g is the token g of the one source: masked samples stand still, skipped ones do not come at all."""

    def __init__(self) -> None:
        self.next_sample = 0
        self.blocks: list[Block] = []
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, int]:
        samples: list[int] = []
        while len(samples) < BATCH:
            if not self._is_left_out(self.next_sample, "skip"):
                samples.append(self.next_sample)
            self.next_sample += 1
        live = [sample for sample in samples if not self._is_left_out(sample, "mask")]
        self.seen += live
        rows = [torch.randn(8, generator=torch.Generator().manual_seed(sample)) for sample in live]
        return torch.stack(rows) if rows else torch.zeros(0, 8), len(live)

    def _is_left_out(self, sample: int, mode: str) -> bool:
        return any(
            block.mode == mode and block.effective_sample <= sample and any(first <= sample < end for first, end in spans_of(block))
            for block in self.blocks
        )

    def cursor(self) -> Mapping[str, Any]:
        count, head = self.blocklist
        return {"next_sample": self.next_sample, "blocklist": {"count": count, "head": head}}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]

    def block(self, block: Block) -> None:
        if block.name == "unknown":
            raise DataError("no such document", where="block")
        if block.name == "careless":
            raise ValueError("a bug of the port")
        self.blocks.append(block)

    def skip(self, block: Block) -> None:
        self.blocks.append(block)

    @property
    def blocklist(self) -> tuple[int, str]:
        return len(self.blocks), head_of(self.blocks)

    def locate(self, *, sample: int) -> Sequence[Mapping[str, Any]]:
        return [{"document": sample}]


class KnowingPoints(Points):
    def first_touched(self, block: Block, *, first: int, until: int) -> int | None:
        return next((sample for start, end in spans_of(block) for sample in range(max(first, start), min(until, end))), None)


def spans_of(block: Block) -> list[tuple[int, int]]:
    return [block.samples] if block.samples else [(span.start, span.end) for span in block.spans]


class Ahead(SystemClock):
    """Time of which a test can let some pass."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


def mask(first: int, end: int, *, name: str = "document", effective_sample: int = 0) -> Block:
    return Block("document", name, "mask", spans=(TokenSpan("points", first, end),), effective_sample=effective_sample)


def skip(first: int, end: int) -> Block:
    return Block("samples", f"{first}:{end}", "skip", samples=(first, end))


def ask(run_dir: Path, *blocks: Block) -> None:
    path = run_dir / "ledger.jsonl"
    last = read_ledger(path)[-1]
    ledger = Ledger(path, clock=SystemClock(), by="eve")
    for block in blocks:
        fields = asked_fields(block)
        ledger.append(Event.BLOCK_ASKED, generation=last.generation, attempt=last.attempt, step=last.step, fields=fields)


def taken(run_dir: Path) -> list[tuple[str, int, str]]:
    return [
        (found.block.name, found.block.effective_sample, found.block.by)
        for found in fold_blocks(read_ledger(run_dir / "ledger.jsonl")).taken
    ]


def until_committed(run_dir: Path) -> None:
    deadline_s = time.monotonic() + 50.0
    while not any(entry.event == "checkpoint.committed" for entry in read_ledger(run_dir / "ledger.jsonl")):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def began_with(run_dir: Path, blocks: tuple[Block, ...]) -> None:
    """A run that is asked before its first step, for what another one took later."""
    run_dir.mkdir()
    ledger = Ledger(run_dir / "ledger.jsonl", clock=SystemClock(), by="eve")
    ledger.append(Event.RUN_CREATED, generation=0, attempt=0, step=0)
    ask(run_dir, *blocks)


def final_digest(run_dir: Path) -> str:
    last = read_ledger(run_dir / "ledger.jsonl")[-1]
    assert last.event == "run.finished"
    return str(last.fields["state_digest"])
