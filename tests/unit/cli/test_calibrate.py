"""`surefoot calibrate` as a person and a script meet it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.cli.main import run
from surefoot.core.sections import MonitorSection

NUM = 1200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run, with one loss and one norm at step 900 that stand out."""
    generator = np.random.default_rng(2)
    losses = 2.5 + 0.03 * generator.standard_t(6.0, NUM)
    norms = 0.3 * np.exp(0.08 * generator.standard_t(6.0, NUM))
    losses[899] += 1.0
    norms[899] *= 9.0
    lines = [
        "step,loss,grad_norm",
        *(f"{step},{loss:.5f},{norm:.4f}" for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)),
    ]
    path = tmp_path_factory.mktemp("calibrate") / "run.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    places = () if "--places" in arguments else ("--places", "0")
    assert run(["calibrate", *arguments, *places, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def by_name(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in told["detectors"]}


def test_alarms_delays_and_thresholds(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, str(table), "--places", "3")
    assert (told["schema_version"], told["num_steps"], told["from_step"], told["num_healthy"]) == (1, NUM, 401, 800)
    found = by_name(told)
    assert found["outlier_loss"]["alarms"] == found["grad_outlier"]["alarms"] == [900]
    assert found["outlier_loss"]["false_alarms_per_10k"] == 1e4 / 800
    assert told["all_per_10k"] == 1e4 / 800
    assert found["sustained_loss"]["alarms"] == []
    assert found["sustained_loss"]["delays"]["loss +0.1"]["found"] >= 2
    assert 1 <= found["sustained_loss"]["delay"] <= 20
    assert found["grad_level"]["delay"] <= 15
    assert found["nonfinite"]["delay"] == 0
    assert found["outlier_loss"]["suggested"] > found["outlier_loss"]["threshold"] == 10.0
    assert found["sustained_loss"]["suggested"] <= 12.0


def test_a_suggestion_keeps_what_it_promises(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With so large a budget that each of seven rules is allowed one alarm, the outlier is that one."""
    found = by_name(answer(capsys, str(table), "--budget", "90"))
    assert found["outlier_loss"]["suggested"] < 10.0
    assert found["grad_outlier"]["suggested"] < 5.0
    assert by_name(answer(capsys, str(table), "--budget", "80"))["outlier_loss"]["suggested"] > 10.0


def test_a_quiet_table_suggests_nothing_that_would_ruin_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quiet.csv"
    noise = np.random.default_rng(5).uniform(-1.0, 1.0, (NUM, 2))
    rows = (f"{step},{2.5 + 0.03 * loss:.5f},{0.3 + 0.01 * norm:.5f}" for step, (loss, norm) in enumerate(noise.tolist(), 1))
    path.write_text("\n".join(["step,loss,grad_norm", *rows]) + "\n")
    suggested = {one["setting"]: one["suggested"] for one in answer(capsys, str(path))["detectors"] if one["suggested"] is not None}
    assert "grad_burst_factor" not in suggested
    assert suggested["sustained_height"] == 6.0
    config = MonitorSection(**suggested)
    assert all(value >= getattr(MonitorSection(), name) / 2.0 for name, value in suggested.items())
    assert all(getattr(config, field.name) >= (field.metadata["low"] or 0.0) for field in fields(config) if field.name in suggested)


def test_alarms_before_the_healthy_start_are_no_false_ones(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, str(table), "--from-step", "950")
    assert told["all_per_10k"] == 0.0
    assert by_name(told)["outlier_loss"]["alarms"] == [900]


def test_parquet_says_the_same_as_csv(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split(",") for line in table.read_text().splitlines()[1:500]]
    short = tmp_path / "short.csv"
    short.write_text("iteration,LM Loss,grad_norm\n" + "\n".join(",".join(row) for row in rows))
    columns = {"step": [int(row[0]) for row in rows], "loss": [float(row[1]) for row in rows], "grad_norm": [float(row[2]) for row in rows]}
    pq.write_table(pa.table(columns), tmp_path / "short.parquet")
    assert answer(capsys, str(short)) == answer(capsys, str(tmp_path / "short.parquet"))


def test_the_page_says_where_the_healthy_part_begins(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", str(table), "--places", "0"]) == 0
    page = capsys.readouterr().out
    assert "1200 rows, taken to be healthy from step 401 on (by default): 800 rows" in page
    assert "outlier_loss spoke first at 900" in page


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        ([], "", "is empty"),
        (["step,loss"], "", "a header and no steps"),
        (["step,val", "1,2.0"], ":1", "no column 'loss'"),
        (["loss", "2.0"], ":1", "no column 'step'"),
        (["step,loss,train_loss", "1,2,2"], ":1", "two columns for 'loss'"),
        (["step,loss", "1,2.0", "2,high"], ":3", "loss is 'high'"),
        (["step,loss", "1,2.0", "", "2,"], ":4", "loss is empty"),
        (["step,loss", "1,2.0", "nan,2.0"], ":3", "step is 'nan'"),
        (["step,loss", "1.5,2.0"], ":2", "step is '1.5'"),
        (["step,loss", "2,2.0", "1,2.0"], ":3", "step 1 after step 2"),
        (["step,loss", "2,2.0", "2,2.0"], ":3", "step 2 twice"),
        (["step,loss", "1,2.0,3"], ":2", "3 cells under 2 columns"),
        (["step,loss,grad_norm", "1,2.0,-1"], ":2", "grad_norm is '-1'"),
        (["step,loss,grad_norm", "1,2.0,x"], ":2", "grad_norm is 'x'"),
    ],
)
def test_what_is_no_series_is_told_by_its_line(
    lines: Sequence[str], where: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(lines))
    assert run(["calibrate", str(path), "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["where"] == f"{path}{where}"
    assert error["what"] == what if "has" not in what else what in error["what"]


def test_nan_is_a_figure_and_an_empty_norm_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ill.csv"
    path.write_text("step,loss,grad_norm\n" + "\n".join(f"{step},{'nan,nan' if step > 20 else '2.0,'}" for step in range(1, 41)))
    assert by_name(answer(capsys, str(path)))["nonfinite"]["alarms"] == [21]


def test_what_is_not_there_or_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", str(tmp_path / "none.csv")]) == 4
    assert "there is no such file or run" in capsys.readouterr().err
    assert run(["calibrate", str(tmp_path)]) == 4
    assert "holds no metrics" in capsys.readouterr().err
    path = tmp_path / "one.csv"
    path.write_text("step,loss\n7,2.0\n")
    assert by_name(answer(capsys, str(path)))["sustained_loss"]["delay"] is None
    assert run(["calibrate", str(path), "--from-step", "8"]) == 2
