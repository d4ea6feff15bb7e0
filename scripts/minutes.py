"""Print the minutes that each area of `.ci/run` used beside its budget in `.ci/minutes.toml`."""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from pathlib import Path


def table(spent_tsv: str, *, budget: dict[str, float]) -> str:
    """One line per area, in the order of the budget; an area over its budget is marked."""
    spent: dict[str, float] = defaultdict(float)
    for line in spent_tsv.splitlines():
        area, seconds = line.split("\t")
        spent[area] += float(seconds) / 60
    rows = [f"{'area':<12} {'minutes':>8} {'budget':>8}"]
    for area in dict.fromkeys([*budget, *spent]):
        if area == "total":
            continue
        mark = "  over budget" if area in budget and spent[area] > budget[area] else ""
        rows.append(f"{area:<12} {spent[area]:>8.1f} {budget.get(area, 0):>8.1f}{mark}")
    total = sum(spent.values())
    rows.append(f"{'total':<12} {total:>8.1f} {budget['total']:>8.1f}{'  over budget' if total > budget['total'] else ''}")
    return "\n".join(rows)


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    minutes = tomllib.loads((root / ".ci" / "minutes.toml").read_text())["minutes"]
    sys.stdout.write(table((root / "build" / "minutes.tsv").read_text(), budget=minutes) + "\n")
