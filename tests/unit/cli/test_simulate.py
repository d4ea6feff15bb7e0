"""`surefoot simulate` for people and programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.cli.simulate_options import parse_restarts, parse_shares, parse_tier
from surefoot.core.errors import ConfigError
from surefoot.plan.failures.reliability import Operation, assess
from surefoot.plan.failures.scenario import Tier
from surefoot.plan.hardware import accelerator


def answer_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["simulate", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_an_answer_adds_up_and_has_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capsys, "--gpus", "1000", "--days", "30")
    assert answer["schema_version"] == 1
    assert sum(answer["classes"].values()) == pytest.approx(1.0)
    assert answer["ettr"] == answer["goodput"]["value"] == answer["classes"]["productive"]
    assert answer["goodput"]["band"][0] <= answer["goodput"]["value"] <= answer["goodput"]["band"][1]
    assert answer["interval_s"] == pytest.approx(604, rel=0.01)
    assert set(answer["reasons"]) >= {"failures", "clock", "interval"}
    assert answer["goodput"]["value"] == pytest.approx(answer["closed_form"], abs=0.002)


def test_every_option_reaches_the_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        *(
            "--gpus",
            "144",
            "--days",
            "2",
            "--accelerator",
            "gb200",
            "--failures-per-node-day",
            "0.5",
            "--stall-s",
            "3",
            "--interval-s",
            "400",
        ),
        *("--tier", "memory", "--tier", "shared:every=4,write_s=20,restore_s=9", "--shares", "process=0.25,node=0.75", "--detect-s", "7"),
        *("--restart-s", "process=1,node=2,large_scale=3", "--spares", "2", "--repair-hours", "12", "--lemon-share", "0.5"),
        *("--lemon-factor", "4", "--evict-after", "3", "--failure-clock", "productive", "--seed", "5"),
    ]
    scenario = answer_of(capsys, *told)["scenario"]
    assert scenario == {
        "num_nodes": 2,
        "total_s": 172_800.0,
        "failures_per_node_day": 0.5,
        "stall_s": 3.0,
        "interval_s": 400.0,
        "tiers": [
            {"kind": "memory", "every": 1, "write_s": 0.0, "restore_s": 0.0},
            {"kind": "shared", "every": 4, "write_s": 20.0, "restore_s": 9.0},
        ],
        "shares": {"process": 0.25, "node": 0.75, "large_scale": 0.0},
        "detect_s": 7.0,
        "restart_s": {"process": 1.0, "node": 2.0, "large_scale": 3.0},
        "num_spares": 2,
        "repair_s": 43_200.0,
        "lemons": {"share": 0.5, "factor": 4.0, "evict_after": 3},
        "clock": "productive",
    }


def test_nodes_instead_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    by_nodes, by_devices = answer_of(capsys, "--nodes", "64"), answer_of(capsys, "--gpus", "512")
    assert by_nodes == by_devices
    assert answer_of(capsys, "--gpus", "513")["scenario"]["num_nodes"] == 64.125


def test_the_page_names_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--gpus", "512", "--days", "10"]) == 0
    page = capsys.readouterr().out
    for words in ("goodput", "closed form", "useful", "restart", "arXiv 2407.21783", "wall time"):
        assert words in page


def test_it_says_what_a_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    for devices, nodes in ((1000, 125), (4, 0.5)):
        simulated = answer_of(capsys, "--gpus", str(devices), "--stall-s", "1")
        planned = assess(Operation(accelerator("h100"), devices, state_bytes=1e9, step_s=1.0, tokens_per_step=1e6, total_s=30 * 86_400.0))
        assert simulated["scenario"]["num_nodes"] == nodes
        assert simulated["mtbf_s"] == pytest.approx(planned.failures.mtbf_s)
        assert simulated["interval_s"] == simulated["formulas"]["young_s"] == planned.interval.young_s
        assert simulated["formulas"]["daly_s"] == planned.interval.daly_s
        assert simulated["spares"] == asdict(planned.spares)
    own = answer_of(capsys, "--gpus", "1000", "--failures-per-node-day", "0.1")
    assert own["spares"]["per_node_day"] == 0.1
    assert own["spares"]["num_nodes"] > 10


def test_the_interval_has_its_own_formula(capsys: pytest.CaptureFixture[str]) -> None:
    def why(*arguments: str) -> str:
        return str(answer_of(capsys, "--gpus", "1000", *arguments)["reasons"]["interval"]["why"])

    assert why() == "sqrt(2 x 1 s x 182437 s)"
    assert "lag" in why("--tier", "shared:every=4")
    assert "before a tier has the last one" in why("--tier", "shared:write_s=2000")
    assert "50 s was asked" in why("--tier", "shared:write_s=2000", "--interval-s", "50")
    assert why("--interval-s", "50") == "as given"
    assert "whole steps" in why("--stall-s", "0")
    assert "whole run" in why("--days", "0.001")


def test_a_mean_outside_its_band_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def page(*arguments: str) -> str:
        assert run(["simulate", *arguments]) == 0
        return capsys.readouterr().out

    assert "the mean is outside" in page("--gpus", "1", "--days", "30", "--restart-s", "1e6")
    assert "the mean is outside" not in page("--gpus", "1000")


def test_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = answer_of(capsys, "--point", "rsc-1024-gpus")["points"]
    assert point["explained"] is False
    assert run(["simulate", "--point", "all"]) == 0
    page = capsys.readouterr().out
    assert "ft-hsdp  explained" in page
    assert "rsc-1024-gpus  NOT explained" in page
    assert "palm  cannot be judged" in page


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--gpus", "0"),
        ("--gpus", "8", "--tier", "tape"),
        ("--gpus", "8", "--point", "x"),
        ("--gpus", "8", "--days", "0"),
        ("--gpus", "8", "--nodes", "1"),
        ("--gpus", "8", "--spares", "1000000000000"),
        ("--gpus", "8", "--evict-after", "3"),
    ],
)
def test_bad_usage_is_exit_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments]) == 2
    assert "surefoot: " in capsys.readouterr().err


def test_options_are_parsed_or_refused_by_name() -> None:
    assert parse_tier("peer:every=2") == Tier("peer", every=2)
    assert parse_shares("node=1") == {"process": 0.0, "node": 1.0, "large_scale": 0.0}
    assert set(parse_restarts("30").values()) == {30.0}
    for text, parse in (
        ("shared:every=1.5", parse_tier),
        ("shared:often", parse_tier),
        ("node=much", parse_shares),
        ("node=-1", parse_shares),
        ("nan", parse_restarts),
        ("node=3", parse_restarts),
    ):
        with pytest.raises(ConfigError):
            parse(text)
