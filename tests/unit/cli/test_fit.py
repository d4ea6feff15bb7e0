"""`surefoot fit` as a person and a script meet it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli.main import run
from surefoot.plan.surface_record import Surface

SURFACE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four budgets of five sizes."""
    generator = np.random.default_rng(4)
    lines = ["n,n_without_embedding,flops,loss"]
    for flops in (1e18, 1e19, 1e20, 1e21):
        for factor in (0.3, 0.55, 1.0, 1.8, 3.3):
            n = SURFACE.best_n(flops) * factor
            loss = SURFACE.loss(n, flops / (6.0 * n)) * math.exp(generator.normal(0.0, 1e-3))
            lines.append(f"{n},{0.9 * n},{flops},{loss}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    lines = ["n,tokens,lr,batch_tokens,loss"]
    for n in (1e8, 4e8, 1e9):
        for tokens in (2e9, 1e10, 4e10):
            for rate in 2.0 ** np.arange(-13.0, -5.0):
                off = math.log(rate / (1.8 * n**-0.7 * tokens**0.3))
                lines.append(f"{n},{tokens},{rate},{rate * 1e8},{2.5 + 0.02 * off * off}")
    path = tmp_path / "rates.csv"
    path.write_text("\n".join(lines))
    return path


def test_json_has_the_promised_keys(runs: Path, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        "parametric": {"E", "A", "B", "alpha", "beta", "a", "objective", "bands", "condition", "held_out_error"},
        "isoflop": {"a", "coef", "bands", "optima"},
        "lr": {"coef", "exponents", "bands"},
        "batch": {"coef", "exponents", "bands"},
    }
    for law, keys in wanted.items():
        assert run(["fit", str(rates if law in ("lr", "batch") else runs), "--law", law, "--draws", "10", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert set(answer) >= keys | {"schema_version", "law", "table", "count", "at", "warnings"}
        assert answer["schema_version"] == 1
        assert "nonfinite" not in answer


def test_the_page_says_law_bands_count_distance_and_warnings(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", str(runs), "--law", "parametric", "--at", "1e22", "--at", "1e27", "--draws", "20"]) == 0
    page = capsys.readouterr().out
    for words in ("L = 1.8", "N^0.3", "held out: 5 runs of 1e+21", "condition", "residuals: rms", "worst line"):
        assert words in page
    for words in ("N is n:", "tokens from C = 6 N D", "with N = n_without_embedding: a 0.", "half the size loses"):
        assert words in page
    assert "at 1e+22 FLOPs, extrapolated 10 times past the largest budget" in page
    assert "warning: 1e+27 FLOPs is 1e+06 times" in page


def test_the_page_of_an_isoflop_fit(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", str(runs), "--law", "isoflop", "--count", "n_without_embedding"]) == 0
    page = capsys.readouterr().out
    for words in (
        "N*    = ",
        "D*    = ",
        "D*/N* = ",
        "L*    = ",
        "FLOPs, the largest budget\n    N* ",
        "N is n_without_embedding",
        "with N = n: a 0.",
    ):
        assert words in page


def test_the_page_of_a_learning_rate_law(rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", str(rates), "--law", "lr"]) == 0
    page = capsys.readouterr().out
    assert "lr = 1.8 N^-0.7000 D^0.3000   (9 sweeps, with batch_tokens varied beside)" in page
    assert "the largest sweep" in page


def test_the_same_seed_prints_the_same(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for seed in ("1", "1", "2"):
        assert run(["fit", str(runs), "--law", "isoflop", "--seed", seed]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2]


def test_a_plot_that_is_no_page_is_refused_before_anything_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", str(tmp_path / "gone.csv"), "--law", "isoflop", "--plot", str(tmp_path / "fit.png")]) == 2
    assert "fit.html" in capsys.readouterr().err
    assert not (tmp_path / "fit.png").exists()


def test_a_plot_is_written_beside_the_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", str(runs), "--law", "isoflop", "--plot", str(tmp_path / "fit.html")]) == 0
    assert "N*    = " in capsys.readouterr().out
    assert (tmp_path / "fit.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--law", "lr"], 4, "no column 'lr'"),
        (["--law", "parametric", "--count", "width"], 2, "no column 'width'"),
        (["--law", "parametric", "--at", "-1"], 2, "is no budget"),
        (["--law", "parametric", "--at", "much"], 2, "valid number"),
        (["--law", "kaplan"], 2, "kaplan"),
        ([], 2, "--law"),
    ],
)
def test_errors_say_what_and_end_with_their_code(
    arguments: list[str], exit_code: int, words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(runs), *arguments]) == exit_code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_a_bad_cell_is_told_with_its_line_in_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("n,tokens,loss\n1e9,2e10,2.5\n1e9,2e10,diverged\n1e9,2e10,nan\n")
    assert run(["fit", str(path), "--law", "parametric", "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["where"] == f"{path}:3"
    assert "diverged" in error["what"]
    assert f"{path}:4: loss is 'nan'" in error["others"][0]


def test_help_loads_nothing_heavy_and_a_fit_loads_no_torch(runs: Path) -> None:
    script = f"""
import sys
from surefoot.cli.main import run
assert run(["fit", "--help"]) == 0
assert not {{"torch", "numpy", "scipy", "plotly"}} & set(sys.modules)
assert run(["fit", "{runs}", "--law", "isoflop"]) == 0
assert not {{"torch", "scipy", "plotly"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
