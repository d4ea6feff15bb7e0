"""A fit as a page for a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.plan.fits.answer import Question, answer_of
from surefoot.plan.fits.plot import write_plot
from surefoot.plan.fits.table import Table, read_table
from surefoot.plan.surface_record import Surface

SURFACE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Three budgets of five sizes, each with a sweep of learning rates about 0.001 at the best size."""
    lines = ["n,flops,lr,loss"]
    for flops in (1e18, 1e19, 1e20):
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            n = SURFACE.best_n(flops) * factor
            for rate, more in ((0.0005, 0.02), (0.001, 0.0), (0.002, 0.02)):
                lines.append(f"{n},{flops},{rate},{SURFACE.loss(n, flops / (6.0 * n)) + more}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    return read_table(path)


@pytest.mark.parametrize(
    ("law", "words"),
    [("parametric", ("at N*", "residuals")), ("isoflop", ("1e+19 FLOPs", "minima", "C^0.5")), ("lr", ("best of a sweep", "equal"))],
)
def test_runs_and_law_are_drawn_for_a_browser_without_a_network(law: str, words: tuple[str, ...], table: Table, tmp_path: Path) -> None:
    path = tmp_path / "fit.html"
    write_plot(path, table=table, answer=answer_of(table, law=law, question=Question(num_draws=10)))
    page = path.read_text()
    assert "<html>" in page
    assert 'src="http' not in page
    for word in words:
        assert word in page


def test_without_plotly_the_extra_is_named(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=r"pip install surefoot\[plots\]"):
        write_plot(tmp_path / "fit.html", table=table, answer={"law": "isoflop"})


def test_a_folder_that_is_not_there_is_bad_usage(table: Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plot(tmp_path / "gone" / "fit.html", table=table, answer=answer_of(table, law="isoflop"))
