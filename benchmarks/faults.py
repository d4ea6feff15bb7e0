"""Faults into real runs, and the same into a toy job under stock torchrun: how soon, whom they blame, and when training goes on.

    python -m benchmarks.faults [--repeat 10] [--stock-repeat 3] [--ranks 2] [--seed S] [--only kill-a-rank] [--json FILE]

The rank is drawn at random. Detection and the time to training again are medians and worst cases in seconds; for stock torchrun each fault
is bounded at a minute, for it would wait half an hour for a rank that does not move.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.faults_stock import Stock, under_torchrun

from surefoot.drill.campaign import Order, run_orders, scratch_folder
from surefoot.drill.catalogue import find_drill
from surefoot.drill.rehearse import draw
from surefoot.drill.verdict import Result

FAULTS: Final = ("kill-a-rank", "stop-a-rank", "hung-rank", "mismatched-collective")
BOUND_S: Final = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.faults")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--stock-repeat", type=int, default=3, help="0 leaves torchrun out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    faults = wanted.only or FAULTS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended on the way out
    print(f"seed {wanted.seed}, {wanted.ranks} ranks, {wanted.repeat} repetitions, stock {wanted.stock_repeat}", flush=True)
    rows = []
    with scratch_folder(keep=False) as folder:
        orders = [Order(find_drill(name), wanted.repeat, wanted.ranks, wanted.seed) for name in faults]
        results = run_orders(orders, folder=folder, config=None, on_result=_say)
        for name in faults:
            stock = _stock(folder / "stock" / name, name, num_ranks=wanted.ranks, repeat=wanted.stock_repeat, seed=wanted.seed)
            rows += [_ours(name, [result for result in results if result.id == name]), *([_theirs(name, stock)] if stock else [])]
    print("\n".join(_table(rows)))
    if wanted.json is not None:
        wanted.json.write_text(json.dumps({"schema_version": 1, "seed": wanted.seed, "num_ranks": wanted.ranks, "rows": rows}, indent=1))
    return 0 if all(result.ok for result in results) else 1


def _stock(folder: Path, fault: str, *, num_ranks: int, repeat: int, seed: int) -> list[tuple[int, Stock]]:
    seen = []
    for number in range(repeat):
        rank, step = draw(seed + number, num_ranks=num_ranks, num_steps=50)
        stock = under_torchrun(folder / str(number), fault, rank=rank, step=step, num_ranks=num_ranks, bound_s=BOUND_S)
        print(f"  stock {fault}, rank {rank}: {asdict(stock)}", file=sys.stderr, flush=True)
        seen.append((rank, stock))
    return seen


def _ours(fault: str, results: Sequence[Result]) -> dict[str, Any]:
    again = [result.recovery["training_again_s"] for result in results if "training_again_s" in result.recovery]
    detected = [result.detected_s for result in results if result.detected_s is not None]
    more = {"bound_s": results[0].bound_s, "ok": sum(result.ok for result in results)}
    return {**_row("surefoot", fault, len(results), detected, sum(result.culprit_right for result in results), again), **more}


def _theirs(fault: str, seen: Sequence[tuple[int, Stock]]) -> dict[str, Any]:
    detected = [stock.detected_s for _, stock in seen if stock.detected_s is not None]
    again = [stock.again_s - (stock.detected_s or 0.0) for _, stock in seen if stock.again_s is not None]
    return _row("torchrun", fault, len(seen), detected, sum(stock.culprit == rank for rank, stock in seen), again)


def _row(who: str, fault: str, num: int, detected: Sequence[float], num_right: int, again: Sequence[float]) -> dict[str, Any]:
    return {
        "who": who,
        "fault": fault,
        "num": num,
        "num_detected": len(detected),
        "detected_median_s": statistics.median(detected) if detected else None,
        "detected_worst_s": max(detected) if detected else None,
        "num_right": num_right,
        "num_again": len(again),
        "again_median_s": statistics.median(again) if again else None,
        "again_worst_s": max(again) if again else None,
    }


def _say(result: Result) -> None:
    words = "; ".join(result.problems) or "ok"
    print(f"  {result.id}, rank {result.struck_rank}: {result.detected_s} s, {dict(result.recovery)}, {words}", file=sys.stderr, flush=True)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| fault | who | seen | detection, median / worst | right culprit | training again, median / worst |", "| --- " * 6 + "|"]
    for row in rows:
        detection = _pair(row["detected_median_s"], row["detected_worst_s"])
        again = _pair(row["again_median_s"], row["again_worst_s"])
        seen, right = f"{row['num_detected']}/{row['num']}", f"{row['num_right']}/{row['num']}"
        lines.append(f"| {row['fault']} | {row['who']} | {seen} | {detection} | {right} | {again} |")
    return lines


def _pair(median_s: float | None, worst_s: float | None) -> str:
    return f"{median_s:.2f} s / {worst_s:.2f} s" if median_s is not None and worst_s is not None else "never"


if __name__ == "__main__":
    sys.exit(main())
