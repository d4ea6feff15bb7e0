"""`surefoot sweep`: what is planned and refused before anything is trained, and what is gathered of runs that were."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.config import load_config
from surefoot.core.config_text import config_text
from surefoot.core.records import StepReport
from surefoot.observe.metrics import MetricsWriter
from tests.texts import prepare_documents

BASE = """
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
[model]
num_layers = 1
d_model = 16
num_heads = 2
[train]
global_batch_size = 8
micro_batch_size = 8
[optimizer]
lr = 0.004
[schedule]
kind = "KIND"
warmup_steps = 5
"""
NUM_STEPS, SEQ_LEN, BATCH, PEAK = 10, 32, 8, 0.004
Answer = dict[str, Any]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    prepare_documents(tmp_path)
    path = tmp_path / "base.toml"
    path.write_text(BASE.replace("KIND", "wsd"))
    return path


def answered(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Answer:
    assert run([*map(str, arguments), "--json"]) == code
    answer: Answer = json.loads(capsys.readouterr().out)
    return answer


def finished_run(folder: Path, *, kind: str = "wsd", loss: float = 3.0, num_steps: int = NUM_STEPS, lr_share: float = 0.0) -> Path:
    """A run folder as training leaves it, as far as `gather` reads it."""
    folder.mkdir(parents=True)
    text = BASE.replace("KIND", kind).replace('"prepared"', '"../prepared"').replace("[train]", f"[train]\nnum_steps = {NUM_STEPS}")
    (folder / "config.toml").write_text(f'[run]\nname = "{folder.name}"\ndir = "."\n{text}')
    write_steps(folder, loss=loss, steps=range(1, num_steps + 1), lr=PEAK, batch=BATCH, lr_share=lr_share)
    return folder


def write_steps(folder: Path, *, loss: float, steps: Sequence[int], lr: float, batch: int, lr_share: float = 0.0) -> None:
    writer = MetricsWriter(folder, generation=1)
    zeros = dict.fromkeys(("data_wait_s", "forward_backward_s", "exchange_s", "update_s", "save_s", "evaluate_s", "cpu_s"), 0.0)
    for step in steps:
        known: dict[str, Any] = {"attempt": 1, "generation": 1, "loss": loss, "num_live_tokens": 1, "tokens": 1, "grad_norm": 1.0}
        known |= {"clip_scale": 1.0, "action": "proceed", "step_s": 0.5, "tokens_per_s": 1.0}
        last = {"lr": lr * lr_share, "val_loss": loss, "bits_per_byte": 1.0} if step == steps[-1] else {"lr": lr}
        writer.write(StepReport(step=step, next_sample=batch * step, **{**zeros, **known, **last}))
    writer.close()


def test_a_plan_is_priced_before_anything_is_trained(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answered(capsys, "sweep", "plan", base, "--budgets", "2e9,4e9", "--law", "ratio:20", "--target", "4e11")
    assert answer["num_runs"] == len(answer["runs"])
    assert any("sizes" in note for note in answer["notes"])  # whole heads and layers of so small a family make fewer than 5
    assert answer["trained_flops"] == pytest.approx(sum(one["trained_flops"] for one in answer["runs"]))
    assert answer["trained_flops"] < answer["flops_alone"]
    assert answer["share_of_target"] == pytest.approx(answer["trained_flops"] / 4e11)
    assert answer["epochs"] == pytest.approx(answer["most_tokens"] / answer["prepared_tokens"])
    assert {one["budget_flops"] for one in answer["runs"]} == {2e9, 4e9}
    page = (run(["sweep", "plan", str(base), "--budgets", "2e9,4e9", "--target", "4e11"]), capsys.readouterr().out)
    assert page[0] == 0
    assert "epochs of what is prepared" in page[1]
    assert "aimed at" in page[1]


def test_what_is_written_down_trains_as_it_was_planned(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    answer = answered(capsys, "sweep", "plan", base, "--budgets", "2e9,4e9", "--sizes", "3", "--out", out)
    first = [one for one in answer["runs"] if not one["parent"]]
    assert {path.stem for path in (out / "configs").iterdir()} == {one["name"] for one in first}
    for one in first:
        config = load_config(out / "configs" / f"{one['name']}.toml").config
        assert config.train.num_steps == one["num_steps"]
        assert Path(config.run.dir) == out / "runs" / one["name"]
        assert Path(config.data.path) == tmp_path / "prepared"
        starts = {other["branch_step"] for other in answer["runs"] if other["parent"] == one["name"]}
        assert starts <= set(config.checkpoint.keep_steps)


def test_a_sweep_that_a_layout_cannot_train_leaves_no_folder(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(tmp_path.iterdir())
    wanted = ("--budgets", "2e9,4e9", "--out", tmp_path / "sweep")
    error = answered(capsys, "sweep", "plan", base, "parallel.tp=2", *wanted, code=2)["error"]
    assert "cannot be trained" in error["what"]
    assert set(tmp_path.iterdir()) == before
    answered(capsys, "sweep", "plan", base, *wanted)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "sweep"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--budgets", "many"], 2, "no list of numbers"),
        (["--budgets", "1e9", "--over", "lr=1,2"], 2, "at least 3"),
        (["--budgets", "1e9", "--over", "width=1,2,3"], 2, "cannot be varied"),
        (["--budgets", "1e9", "--law", "chinchila-20"], 2, "did you mean chinchilla-20"),
        (["--budgets", "1e9", "--max-flops", "1e9"], 3, "the limit is 1e+09"),
        (["--budgets", "1e9", "--max-flops", "nan"], 2, "nan is no amount"),
        (["--budgets", "1e9", "--target", "nan"], 2, "nan is no amount"),
        (["--widths", "nan", "--over", "lr=1,2,3"], 2, "nan is no whole number"),
        (["--widths", "64.7", "--over", "lr=1,2,3"], 2, "64.7 is no whole number"),
    ],
)
def test_a_plan_that_is_none_is_refused(
    base: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = answered(capsys, "sweep", "plan", base, *arguments, code=code)["error"]
    assert words in f"{error['what']} {error['hint']}"


def test_stages_are_not_planned(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    staged = "stage=[{first_sample = 9, lr = 1.0}]"
    error = answered(capsys, "sweep", "plan", base, staged, "--budgets", "2e9,4e9", "--law", "ratio:20", code=2)["error"]
    assert error["what"] == "it has 1 [[stage]], and stages are not planned"
    answered(capsys, "sweep", "plan", base, staged, "stage=[]", "--budgets", "2e9,4e9", "--law", "ratio:20")


def test_nothing_is_trained_that_nobody_agreed_to(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    answered(capsys, "sweep", "plan", base, "--budgets", "2e9", "--out", out)
    for limit in ((), ("--max-flops", "1e9"), ("--max-flops", "nan")):
        assert run(["sweep", "run", str(out), *limit]) == 2
        assert "--max-flops" in capsys.readouterr().err
    assert not (out / "runs").exists()
    assert run(["sweep", "plan", str(base), "--budgets", "2e9", "--out", str(out)]) == 2  # it is taken
    assert run(["sweep", "run", str(tmp_path)]) == 2


def test_finished_runs_become_rows_that_fit_reads(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished_run(tmp_path / name, loss=loss) for name, loss in (("a", 3.0), ("b", 2.5))]
    table = tmp_path / "table.csv"
    answer = answered(capsys, "sweep", "gather", *runs, "--out", table, "--accelerator", "h100")
    assert (answer["left_out"], answer["doubts"]) == ({}, [])
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == [3.0, 2.5]
    row = answer["rows"][0]
    assert row["tokens"] == NUM_STEPS * BATCH * SEQ_LEN
    assert row["flops_6nd"] == 6 * row["n"] * row["tokens"]
    assert row["n"] > row["n_without_embedding"]
    head = row["n"] - row["n_without_embedding"]  # tied
    assert row["n_body_and_head"] - row["n_without_embedding"] == head
    norms = 3 * 16  # which cost no matrix product, but are counted
    whole = 6 * (row["n_flops_6"] - norms) * SEQ_LEN  # the sequence without the head, each query against every key
    assert whole == pytest.approx(6 * SEQ_LEN * (row["n_without_embedding"] - norms) + 12 * 16 * SEQ_LEN**2)
    assert row["batch_tokens"] == BATCH * SEQ_LEN
    assert row["tokens_per_s"] == pytest.approx(BATCH * SEQ_LEN / 0.5)
    assert row["flops_per_s"] == pytest.approx(row["flops"] / (NUM_STEPS * 0.5))
    assert 0 < row["mfu"] < 1e-3
    from surefoot.plan.fits.table import read_runs, read_table

    assert read_runs(read_table(table)).loss.tolist() == [3.0, 2.5]


def test_a_cosine_cut_short_is_named_and_left_out(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = finished_run(tmp_path / "whole", kind="cosine")
    short = finished_run(tmp_path / "short", kind="cosine", num_steps=6, lr_share=0.4)
    answer = answered(capsys, "sweep", "gather", whole, short)
    assert [row["run"] for row in answer["rows"]] == ["whole"]
    assert "a cosine cut short" in answer["left_out"]["short"]
    forced = answered(capsys, "sweep", "gather", whole, short, "--all")
    assert [(row["run"], row["finished"]) for row in forced["rows"]] == [("short", False), ("whole", True)]
    assert any("short" in doubt and "a cosine cut short" in doubt for doubt in forced["doubts"])


def test_a_run_that_never_cooled_down_is_named_beside_one_that_did(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cooled = finished_run(tmp_path / "cooled")
    flat = finished_run(tmp_path / "flat", kind="constant", lr_share=1.0)
    assert any("flat ended at 100%" in doubt for doubt in answered(capsys, "sweep", "gather", cooled, flat)["doubts"])
    assert answered(capsys, "sweep", "gather", cooled, cooled)["doubts"] == []


def test_what_is_no_run_or_diverged_is_left_out_by_name(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = finished_run(tmp_path / "good"), finished_run(tmp_path / "bad", loss=float("nan"))
    answer = answered(capsys, "sweep", "gather", good, bad, tmp_path / "absent")
    assert set(answer["left_out"]) == {"bad", "absent"}
    assert "diverged" in answer["left_out"]["bad"]
    assert answered(capsys, "sweep", "gather", bad, code=4)["error"]["code"] == "data"


def trained(sweep: Path, runs: list[Answer], *, loss_of: Callable[[float, float], float]) -> None:
    """The folders of all runs of a sweep as training would leave them, with the losses of a known surface."""
    for one in runs:
        changed = () if not one["parent"] else (f"train.num_steps={one['num_steps']}", "schedule.decay_steps=-1")
        config = load_config(sweep / "configs" / f"{one['parent'] or one['name']}.toml", changed).config
        folder = sweep / "runs" / one["name"]
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(config_text(config, folder=folder, run_dir="."))
        write_steps(folder, loss=loss_of(one["n"], one["tokens"]), steps=[one["num_steps"]], lr=config.optimizer.lr, batch=BATCH)


def test_a_trained_sweep_is_fitted_and_what_moved_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L = 1.8 + 40 / N^0.3 + 400 / D^0.4, so N* ~ C^(4/7), where C^(1/2) was expected."""

    def loss_of(n: float, tokens: float) -> float:
        return float(1.8 + 40 / n**0.3 + 400 / tokens**0.4)

    sweep = tmp_path / "sweep"
    family = ("model.d_model=64", "model.num_heads=8", "model.num_layers=2")
    budgets = ("--budgets", "1e13,4e13,16e13", "--law", "ratio:20", "--sizes", "7", "--span", "12")
    runs = answered(capsys, "sweep", "plan", base, *family, *budgets, "--out", sweep)["runs"]
    trained(sweep, runs, loss_of=loss_of)
    answer = answered(capsys, "sweep", "fit", sweep)
    assert answer["a"] == pytest.approx(4 / 7, abs=0.05)
    assert (answer["left_out"], answer["left_out_runs"], answer["doubts"]) == ([], {}, [])
    for one in answer["optima"]:
        # The best of the sizes that cost exactly so much, by the surface itself.
        group = [run for run in runs if run["budget_flops"] == pytest.approx(one["flops"], rel=0.05)]
        best = min(group, key=lambda run: loss_of(run["n"], run["tokens"]))
        assert 1 / 1.6 < one["n"] / best["n"] < 1.6
    assert answer["parametric"]["E"] == pytest.approx(1.8, rel=0.03)
    assert answer["sweep"] == {"runs": len(runs), "largest_flops": max(one["flops"] for one in runs)}
    assert json.loads((sweep / "fit.json").read_text())["sweep"] == answer["sweep"]
    assert run(["sweep", "fit", str(sweep)]) == 0
    page = capsys.readouterr().out
    assert "what moved:" in page
    assert "expected C^0.500" in page
    again = answered(capsys, "sweep", "plan", base, *family, "--budgets", "1e13", "--law", sweep / "fit.json")
    assert again["law"] == str(sweep / "fit.json")
    monkeypatch.chdir(sweep)
    told = answered(capsys, "sweep", "plan", base, *family, "--budgets", "1e13", "--law", "fit.json", "--out", tmp_path / "next")
    assert told["law_asked"] == str(sweep / "fit.json")


def test_a_run_of_a_model_of_ones_own_is_named_and_left_out(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = finished_run(tmp_path / "ours"), finished_run(tmp_path / "theirs")
    text = (theirs / "config.toml").read_text()
    (theirs / "config.toml").write_text(text.replace("[model]", '[model]\nfactory = "mine:model"'))
    answer = answered(capsys, "sweep", "gather", ours, theirs)
    assert [row["run"] for row in answer["rows"]] == ["ours"]
    assert "mine:model" in answer["left_out"]["theirs"]


def test_rates_over_widths_say_whether_they_transfer(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    wanted = ("--widths", "16,32", "--over", "lr=1e-3,2e-3,4e-3,8e-3")
    runs = answered(capsys, "sweep", "plan", base, "train.num_steps=60", *wanted, "--out", sweep)["runs"]
    for one in runs:
        best_lr = 2e-3 * (1 if "d16x1" in one["name"] else 2)
        trained(sweep, [one], loss_of=lambda n, tokens, one=one, best_lr=best_lr: 3 + math.log(one["lr"] / best_lr) ** 2)  # type: ignore[misc]
    answer = answered(capsys, "sweep", "fit", sweep)
    assert [width["best_lr"] for width in answer["widths"]] == pytest.approx([2e-3, 4e-3])
    assert answer["exponent"] == pytest.approx(1.0)
    assert answer["price_of_first"]["32"] == pytest.approx(math.log(2) ** 2)
    assert run(["sweep", "fit", str(sweep)]) == 0
    assert "standard parametrization" in capsys.readouterr().out
    assert run(["sweep", "plan", str(base), "--widths", "16,32"]) == 2  # over what?
