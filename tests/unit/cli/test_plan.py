"""`surefoot plan` as a person and a script call it; what it writes is what `train` accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.config import load_config
from surefoot.plan.promise import NOT_VALIDATED, promise
from surefoot.plan.surface_record import Surface

SMALL = ("--gpus", "2", "--accelerator", "cpu", "--flops", "2e13")

Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """What it prints; with `code` what it says on stderr where it must end with that."""

    def called(*words: str, code: int = 0) -> str:
        assert run(["plan", *words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return called


def test_one_object_with_the_keys_that_others_build_on(plan: Plan) -> None:
    answer: dict[str, Any] = json.loads(plan("--gpus", "512", "--flops", "2e23", "--json"))
    assert answer["schema_version"] == 1
    keys = {"budget", "frontier", "choice", "layout", "layouts", "rejected", "checkpoint", "reliability", "validated", "reasons"}
    assert keys <= answer.keys()
    assert answer["budget"]["flops"] == 2e23
    assert answer["choice"]["n"] == pytest.approx(42.5e9, rel=0.02)
    assert answer["validated"] is False
    assert all(reason["why"] and reason["source"] for reason in answer["reasons"].values())


def test_the_file_that_is_written_is_one_that_train_accepts(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "small.toml"
    told = plan(*SMALL, "--out", str(out))
    assert f"surefoot train {out}" in told
    loaded = load_config(out)
    config = loaded.config
    assert config.parallel.num_ranks == 2
    assert config.plan.law == "epoch"
    assert NOT_VALIDATED in promise(config.plan)
    assert config.train.global_batch_size % config.train.micro_batch_size == 0
    assert not loaded.warnings
    assert "replace by your text" in out.read_text()


def test_a_page_can_be_written_too(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "plan.md"
    plan(*SMALL, "--out", str(out))
    assert out.read_text().startswith("# Plan\n")


def test_nothing_is_overwritten_or_left_behind(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "small.toml"
    out.write_text("mine")
    assert "there is a file already" in plan(*SMALL, "--out", str(out), code=2)
    assert out.read_text() == "mine"
    assert "mkdir" in plan(*SMALL, "--out", str(tmp_path / "no" / "small.toml"), code=2)
    assert "plan.md" in plan(*SMALL, "--out", str(tmp_path / "small.txt"), code=2)
    mixture = ("--gpus", "64", "--flops", "1e21", "--experts", "8", "--experts-per-token", "2", "--law", "hunyuan-moe")
    assert "planned only" in plan(*mixture, "--out", str(tmp_path / "moe.toml"), code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--days", "30", "--mfu", "1.2"), 2, "write 40% as 0.4"),
        (("--days", "30", "--law", "chinchila-20"), 2, "did you mean chinchilla-20"),
        (("--days", "30", "--accelerator", "h10"), 2, "did you mean h100"),
        (("--flops", "1e20", "--layout", "tp=3"), 2, "number of devices"),
        (("--flops", "1e20", "--layout", "tq=2"), 2, "is no axis"),
        (("--days", "1", "--flops", "1e25"), 3, "dense peak"),
        (("--flops", "1e23", "--params", "70e9", "--layout", "tp=8"), 3, "smallest change that fits"),
        ((), 2, "--days, or --flops"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(plan: Plan, words: tuple[str, ...], code: int, told: str) -> None:
    assert told in plan("--gpus", "8", *words, code=code)


def test_a_fit_plans_and_that_of_a_sweep_alone_validates(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["n,tokens,loss"]
    rows += [
        f"{n:.6g},{tokens:.6g},{1.8 + 480 / n**0.35 + 2100 / tokens**0.37:.9g}"
        for n in (1e7, 3e7, 1e8, 3e8, 1e9)
        for tokens in (1e9, 3e9, 1e10, 3e10)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(rows) + "\n")
    assert run(["fit", str(tmp_path / "runs.csv"), "--law", "parametric", "--json", "--draws", "20"]) == 0
    (tmp_path / "fit.json").write_text(capsys.readouterr().out)
    asked = ("--gpus", "64", "--flops", "1e21", "--law", str(tmp_path / "fit.json"), "--json")
    anybody = json.loads(plan(*asked))
    assert anybody["validated"] is False
    assert anybody["choice"]["n"] == pytest.approx(Surface(1.8, 480, 2100, 0.35, 0.37).best_n(1e21), rel=0.01)
    fit = json.loads((tmp_path / "fit.json").read_text())
    (tmp_path / "fit.json").write_text(json.dumps({**fit, "sweep": {"runs": 20, "largest_flops": 1.8e20}}))
    swept = json.loads(plan(*asked))
    assert swept["validated"] is True
    assert not any("not validated" in warning for warning in swept["warnings"])


def test_the_textbook(plan: Plan) -> None:
    assert "rules:" in plan("--textbook")
    rows = json.loads(plan("--textbook", "--json"))["rows"]
    assert len(rows) > 40
    assert all(row["claim"] and row["right"] and row["why"] for row in rows)


def test_what_goes_with_nothing_is_refused(plan: Plan, tmp_path: Path) -> None:
    assert "beside --from" in plan("--from", str(tmp_path), "--days", "3", code=2)
    assert "--experts-per-token without" in plan("--gpus", "8", "--flops", "1e20", "--experts-per-token", "2", code=2)
    assert "leave one of" in plan("--gpus", "8", "--flops", "1e20", "--days", "3", "--mfu", "0.3", code=2)
    assert "write 15% as 0.15" in plan("--gpus", "8", "--flops", "1e20", "--max-bubble", "15", code=2)
    assert "leave no time to train" in plan("--gpus", "1000", "--days", "30", "--restart-s", "1e6", code=3)
    plan("--textbook", "--out", str(tmp_path / "rules.md"))
    assert "# Rules of thumb" in (tmp_path / "rules.md").read_text()
