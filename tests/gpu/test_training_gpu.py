"""Training on a GPU: the CPU's loss within rounding, and the same bits after a resume."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot.core.config_text import config_text
from surefoot.core.events import Event
from surefoot.core.records import StepReport
from surefoot.core.sections import ModelSection, NumericsSection, ObserveSection, RunConfig, RunSection
from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import read_live
from surefoot.tensors.digest import tensor_digest
from surefoot.tensors.world import single_world
from surefoot.train.build import build_parts, make_deterministic
from surefoot.train.loop import training_steps
from surefoot.train.step import Parts, forward_backward

pytestmark = pytest.mark.gpu


def parts_on(place: torch.device, config: RunConfig) -> Parts:
    return build_parts(config, single_world(place))


def first_loss(parts: Parts) -> float:
    """In nats per token; the gradients of the first step are in `.grad` afterwards."""
    batch = next(parts.data)
    return forward_backward(parts, batch.micro_batches, step=1).item() / batch.num_live_tokens


def grad_norm(parts: Parts) -> float:
    gradients = [parameter.grad for parameter in parts.parameters if parameter.grad is not None]
    assert len(gradients) == len(parts.parameters)
    return float(torch.stack([gradient.double().norm() for gradient in gradients]).norm())


def test_initial_values_are_the_bits_of_the_cpu(device: torch.device, config: RunConfig) -> None:
    ours, theirs = (parts_on(place, config).cut.module.state_dict() for place in (device, torch.device("cpu")))
    assert {name: tensor_digest(tensor) for name, tensor in ours.items()} == {
        name: tensor_digest(tensor) for name, tensor in theirs.items()
    }


@pytest.mark.parametrize("model", [ModelSection(num_layers=2, d_model=64, num_heads=4), ModelSection(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, qk_norm=True, window=16, attention_soft_cap=30.0, z_loss=1e-4
)], ids=["plain", "everything"])  # fmt: skip
def test_the_first_step_has_the_loss_and_gradient_of_the_cpu(device: torch.device, config: RunConfig, model: ModelSection) -> None:
    found = {}
    for place in (torch.device("cpu"), device):
        parts = parts_on(place, replace(config, model=model))
        found[place.type] = (first_loss(parts), grad_norm(parts))
    # float32 with sums in another order; no TF32 unless somebody turned it on
    assert found[device.type][0] == pytest.approx(found["cpu"][0], rel=1e-5)
    assert found[device.type][1] == pytest.approx(found["cpu"][1], rel=1e-4)


def test_half_precision_stays_close_to_float32(device: torch.device, config: RunConfig) -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        parts = parts_on(device, replace(config, train=replace(config.train, precision=precision)))
        losses[precision] = first_loss(parts)
        assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in parts.parameters)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)  # 8 bits of mantissa, averaged over hundreds of tokens
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.002)  # 11 bits


def test_a_step_twice_gives_the_same_bits(device: torch.device, config: RunConfig) -> None:
    make_deterministic(NumericsSection())
    gradients = []
    for _ in range(2):
        parts = parts_on(device, config)
        first_loss(parts)
        gradients.append([tensor_digest(parameter.grad) for parameter in parts.parameters if parameter.grad is not None])
    assert gradients[0] == gradients[1]


def run_in(folder: Path, config: RunConfig) -> RunConfig:
    return replace(config, run=replace(config.run, dir=str(folder)))


def last_digest(run_dir: Path) -> str:
    last = read_ledger(run_dir / "ledger.jsonl")[-1]
    assert last.event == Event.RUN_FINISHED
    return str(last.fields["state_digest"])


@pytest.mark.usefixtures("device")
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(config: RunConfig, tmp_path: Path) -> None:
    whole: list[StepReport] = list(training_steps(run_in(tmp_path / "whole", config)))
    assert [report.step for report in whole] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(report.loss) for report in whole)
    cut_short = training_steps(run_in(tmp_path / "cut", config))
    assert [next(cut_short).step for _ in range(3)] == [1, 2, 3]
    del cut_short  # closes the generator, which lets the run go without a save
    rest = list(training_steps(run_in(tmp_path / "cut", config)))
    assert [(report.step, report.loss) for report in rest] == [(report.step, report.loss) for report in whole[2:]]
    assert last_digest(tmp_path / "cut") == last_digest(tmp_path / "whole")


def surefoot(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "surefoot.cli.main", *arguments]


def pid_of_rank_0(run_dir: Path) -> int | None:
    live = read_live(run_dir)
    return live.ranks[0].pid if live and live.ranks else None


def commits(run_dir: Path) -> list[str]:
    entries = read_ledger(run_dir / "ledger.jsonl") if (run_dir / "ledger.jsonl").exists() else []
    return [str(entry.fields["id"]) for entry in entries if entry.event == Event.CHECKPOINT_COMMITTED]


@pytest.mark.usefixtures("device")
def test_under_the_agent_a_killed_rank_is_replaced_and_the_bits_are_the_same(config: RunConfig, tmp_path: Path) -> None:
    """The nursery forks ranks that use the device only afterwards: a fork of a process with a CUDA context would fail."""
    longer = replace(
        config,
        run=RunSection(name="gpu", seed=11),
        train=replace(config.train, num_steps=200, eval_interval_steps=0),
        checkpoint=replace(config.checkpoint, interval_steps=20),
        observe=ObserveSection(status_interval_s=0.1),
    )
    path = tmp_path / "run.toml"
    path.write_text(config_text(longer, folder=tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    for name, is_killed in (("whole", False), ("killed", True)):
        run_dir = tmp_path / name
        child = subprocess.Popen(
            surefoot("train", str(path), f"run.dir={run_dir}"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        try:
            while is_killed and child.poll() is None:
                if commits(run_dir) and (pid := pid_of_rank_0(run_dir)):
                    os.kill(pid, signal.SIGKILL)
                    break
                time.sleep(0.05)
            printed, _ = child.communicate(timeout=100)
        finally:
            child.kill()
        assert child.returncode == 0, printed
    assert any(entry.event == Event.RANK_LOST for entry in read_ledger(tmp_path / "killed" / "ledger.jsonl"))
    assert last_digest(tmp_path / "killed") == last_digest(tmp_path / "whole")
