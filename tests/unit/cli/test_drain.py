"""`surefoot drain` at a site without a scheduler: the run's own list of denied nodes, and its ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import surefoot.cli.main as cli
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger, read_ledger


@pytest.fixture
def drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, object]]]:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    Ledger(run / "ledger.jsonl", clock=SystemClock(), by="agent").append(Event.RUN_CREATED, generation=0, attempt=0, step=0)

    def call(node: str, *options: str) -> tuple[int, dict[str, object]]:
        code = cli.run(["drain", node, "--run", str(run), *options, "--json"])
        told: dict[str, object] = json.loads(capsys.readouterr().out)
        return code, told

    return call


def events(folder: Path) -> list[str]:
    return [entry.event for entry in read_ledger(folder / "run" / "ledger.jsonl")]


def test_without_yes_nothing_is_done_and_the_commands_are_told(drain: Callable[..., tuple[int, dict[str, object]]], tmp_path: Path) -> None:
    code, told = drain("n1", "--isolate")
    assert (code, told["decision"], told["done"]) == (0, "say", [])
    assert "drain" in told["commands"]  # type: ignore[operator]
    assert events(tmp_path) == ["run.created"]
    assert not (tmp_path / "run" / "denylist.json").exists()


def test_a_node_is_taken_out_once_and_let_back(drain: Callable[..., tuple[int, dict[str, object]]], tmp_path: Path) -> None:
    assert drain("n1", "--isolate", "--yes", "--cause", "its fan is loud")[1]["decision"] == "isolate"
    assert drain("n1", "--isolate", "--yes")[1]["decision"] == "already"
    assert "surefoot:by-hand: its fan is loud" in (tmp_path / "run" / "denylist.json").read_text()
    code, told = drain("n1", "--readmit")
    assert code == 2
    assert "runs on n1" in told["error"]["what"]  # type: ignore[index]
    assert drain("n1", "--readmit", "--yes")[0] == 0
    assert events(tmp_path) == ["run.created", "node.isolated", "node.readmitted"]
    code, told = drain("n1", "--readmit", "--yes")
    assert code == 2
    assert "not taken out by surefoot" in told["error"]["what"]  # type: ignore[index]


def test_the_cap_of_a_day_holds_for_people_too(drain: Callable[..., tuple[int, dict[str, object]]]) -> None:
    assert drain("n1", "--isolate", "--yes")[0] == drain("n2", "--isolate", "--yes")[0] == 0
    code, told = drain("n3", "--isolate", "--yes")
    assert code == 2
    assert "within a day, the cap is" in told["error"]["what"]  # type: ignore[index]


@pytest.mark.parametrize("call", [("n[1-2]", "--isolate"), ("ALL", "--isolate", "--yes"), ("n1", "--isolate", "--readmit"), ("n1",)])
def test_what_is_refused_is_bad_usage(call: tuple[str, ...], drain: Callable[..., tuple[int, dict[str, object]]]) -> None:
    assert drain(*call)[0] == 2
