"""A fit as a page that a browser opens without the network: the runs, the law through them, and what it misses. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.core.errors import ConfigError
from surefoot.plan.fits.isoflop import budgets_of
from surefoot.plan.fits.table import Table, numbers, read_runs
from surefoot.plan.surface_record import Points, Surface

Answer = Mapping[str, Any]

NUM_STEPS = 60
"""Of a drawn curve."""


def write_plot(path: Path, *, table: Table, answer: Answer) -> None:
    """Raises ConfigError where plotly is missing or `path` cannot be written."""
    try:
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ConfigError("a plot needs plotly", where="--plot", hint="pip install surefoot[plots]") from error
    panels = {"parametric": _parametric, "isoflop": _isoflop}.get(answer["law"], _tuning)(table, answer)
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=[panel["title"] for panel in panels])
    for column, panel in enumerate(panels, start=1):
        for trace in panel["traces"]:
            figure.add_trace(Scatter(**trace), row=1, col=column)
        figure.update_xaxes(title_text=panel["x"], type="log", row=1, col=column)
        figure.update_yaxes(title_text=panel["y"], type=panel.get("scale", "linear"), row=1, col=column)
    figure.update_layout(title=f"{table.path.name}: {answer['law']}", template="plotly_white")
    try:
        figure.write_html(str(path), include_plotlyjs=True)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path), hint="name a file in a folder that is there") from error


def _parametric(table: Table, answer: Answer) -> list[dict[str, Any]]:
    runs = read_runs(table, count=answer["count"])
    surface = Surface(*(answer[name] for name in ("E", "A", "B", "alpha", "beta")))
    points = Points(runs.n, runs.tokens, runs.loss)
    labels = [f"line {line}, N {n:.3g}" for line, n in zip(runs.lines, runs.n, strict=True)]
    flops = np.geomspace(runs.flops.min(), max(runs.flops.max(), *(one["flops"] for one in answer["at"])), NUM_STEPS)
    best = [surface.best_n(budget) for budget in flops]
    frontier = [surface.loss(n, budget / (6.0 * n)) for n, budget in zip(best, flops, strict=True)]
    missed = 100.0 * (surface.losses(points) / runs.loss - 1.0)
    shade = {"color": np.log10(runs.n).tolist(), "colorscale": "Viridis"}
    seen = {"mode": "markers", "text": labels, "marker": shade}
    return [
        {
            "title": "losses, and the least that compute buys",
            "x": "FLOPs",
            "y": "loss",
            "traces": [
                {**seen, "x": runs.flops.tolist(), "y": runs.loss.tolist(), "name": "runs"},
                {"x": flops.tolist(), "y": frontier, "mode": "lines", "name": "at N*"},
            ],
        },
        {
            "title": "the law less the run, %",
            "x": "FLOPs",
            "y": "% of the loss",
            "traces": [{**seen, "x": runs.flops.tolist(), "y": missed.tolist(), "name": "residuals"}],
        },
    ]


def _isoflop(table: Table, answer: Answer) -> list[dict[str, Any]]:
    runs = read_runs(table, count=answer["count"])
    traces: list[dict[str, Any]] = []
    for rows in budgets_of(runs.flops):
        order = rows[np.argsort(runs.n[rows], kind="stable")]
        name = f"{np.median(runs.flops[rows]):.3g} FLOPs"
        traces.append({"x": runs.n[order].tolist(), "y": runs.loss[order].tolist(), "mode": "lines+markers", "name": name})
    optima = answer["optima"]
    best = [one["n"] for one in optima]
    flops = [one["flops"] for one in optima]
    spread = {"array": [n * one["log_n_std"] for n, one in zip(best, optima, strict=True)]}
    traces.append({"x": best, "y": [one["loss"] for one in optima], "mode": "markers", "marker": {"symbol": "x"}, "name": "minima"})
    law = [answer["coef"] * budget ** answer["a"] for budget in flops]
    through = [
        {"x": flops, "y": best, "error_y": spread, "mode": "markers", "name": "N*"},
        {"x": flops, "y": law, "mode": "lines", "name": f"C^{answer['a']:.3f}"},
    ]
    return [
        {"title": "budgets and their minima", "x": "N", "y": "loss", "traces": traces},
        {"title": "best sizes", "x": "FLOPs", "y": "N*", "scale": "log", "traces": through},
    ]


def _tuning(table: Table, answer: Answer) -> list[dict[str, Any]]:
    runs, value = read_runs(table, count=answer["count"]), numbers(table, answer["law"])
    best = [one["value"] for one in answer["sweeps"]]
    by_law = [
        answer["coef"] * float(np.prod([one[name] ** power for name, power in answer["exponents"].items()])) for one in answer["sweeps"]
    ]
    losses = [one["loss"] for one in answer["sweeps"]]
    seen = {"x": value.tolist(), "y": runs.loss.tolist(), "mode": "markers", "name": "runs"}
    minima = {"x": best, "y": losses, "mode": "markers", "marker": {"symbol": "x"}, "name": "best of a sweep"}
    ends = [min(best), max(best)]
    return [
        {"title": "runs and the best of each sweep", "x": answer["column"], "y": "loss", "traces": [seen, minima]},
        {
            "title": "the law against the sweeps",
            "x": "best of the sweep",
            "y": "law",
            "scale": "log",
            "traces": [
                {"x": best, "y": by_law, "mode": "markers", "name": "sweeps"},
                {"x": ends, "y": ends, "mode": "lines", "name": "equal"},
            ],
        },
    ]
