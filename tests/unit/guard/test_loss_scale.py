"""A foreign loop that scales its loss by torch's GradScaler: it multiplies, the guard undoes, moves and saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from surefoot.core.errors import ConfigError
from surefoot.core.sections import CheckpointSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.guard.loss_scale import TorchScaler
from surefoot.observe.ledger import read_ledger


class Points:
    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 4
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.next_sample))

    def cursor(self) -> Mapping[str, Any]:
        return {"next_sample": self.next_sample}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        self.next_sample = cursor["next_sample"]


def config_of(run_dir: Path, *, precision: Literal["fp32", "bf16", "fp16"] = "fp16") -> RunConfig:
    return RunConfig(
        run=RunSection(name="scaled", dir=str(run_dir)),
        train=TrainSection(num_steps=12, precision=precision),
        checkpoint=CheckpointSection(interval_steps=2),
    )


def scaler_of(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)


def train(
    config: RunConfig, scaler: torch.amp.GradScaler | None, *, sick: tuple[int, ...] = (), stop_at: int = 0
) -> tuple[list[tuple[str, float]], torch.Tensor]:
    """(action, scale of the next step) by step, and the weights. `sick` steps overflow; a skipped one must leave the weights alone."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    points, seen = Points(), []
    with Guard(config, model=model, optimizer=optimizer, data=points, scaler=scaler) as guard:
        guard.restore()
        while guard.begin():
            before = model.weight.detach().clone()
            loss = model(next(points)).square().sum()
            (scaler.scale(loss) if scaler is not None else loss).backward()
            if guard.step + 1 in sick and model.weight.grad is not None:
                model.weight.grad[0, 3] = torch.inf
            if guard.judge(loss, 4).proceeds:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(guard.clip_scale)
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            action = guard.finish().action
            assert torch.equal(before, model.weight) is (action != "proceed")
            seen.append((action, scaler.get_scale() if scaler is not None else 1.0))
            if guard.step == stop_at:
                raise KeyboardInterrupt
    return seen, model.weight.detach().clone()


def test_a_power_of_two_changes_no_bit_of_weights_clipping_and_norms(tmp_path: Path) -> None:
    _, plain = train(config_of(tmp_path / "plain", precision="fp32"), None)
    seen, scaled = train(config_of(tmp_path / "scaled"), scaler_of())
    assert torch.equal(plain, scaled)
    assert [scale for _, scale in seen] == [1024.0] * 3 + [2048.0] * 4 + [4096.0] * 4 + [8192.0]
    _, rounded = train(config_of(tmp_path / "rounded"), scaler_of(1000.3))
    assert not torch.equal(plain, rounded)  # the control: what is no power of two rounds


def test_an_overflow_is_a_skip_that_only_moves_the_scale_and_a_resume_goes_on_from_there(tmp_path: Path) -> None:
    sick = (3, 4, 9)
    seen, weights = train(config_of(tmp_path / "undisturbed"), scaler_of(), sick=sick)
    assert [action for action, _ in seen] == ["skip" if step in sick else "proceed" for step in range(1, 13)]
    assert [scale for _, scale in seen] == [1024.0] * 2 + [512.0] + [256.0] * 4 + [512.0] + [256.0] * 4
    skips = [entry.rule for entry in read_ledger(tmp_path / "undisturbed" / "ledger.jsonl") if entry.event == "update.skipped"]
    assert skips == ["loss_scale_backoff"] * 3
    with pytest.raises(KeyboardInterrupt):
        train(config_of(tmp_path / "run"), scaler_of(), sick=sick, stop_at=7)
    resumed, again = train(config_of(tmp_path / "run"), scaler_of(), sick=sick)
    assert resumed == seen[-len(resumed) :]
    assert len(resumed) < 12
    assert torch.equal(weights, again)


def test_overflows_while_the_scale_still_falls_are_no_illness(tmp_path: Path) -> None:
    seen, _ = train(config_of(tmp_path), scaler_of(), sick=tuple(range(1, 11)))
    assert [action for action, _ in seen] == ["skip"] * 10 + ["proceed"] * 2
    assert seen[9] == ("skip", 1.0)


def test_at_the_smallest_scale_an_overflow_is_like_any_other_illness(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="6"):
        train(config_of(tmp_path), scaler_of(2.0**-13), sick=tuple(range(1, 13)))
    entries = read_ledger(tmp_path / "ledger.jsonl")
    skipped = [(entry.step, entry.rule) for entry in entries if entry.event == "update.skipped"]
    # The first one still lowers the scale; the breaker counts three more.
    assert skipped == [(1, "loss_scale_backoff"), (2, "loss_scale_backoff"), (3, "loss_scale_backoff"), (4, "breaker")]


def test_torch_has_no_smallest_scale_so_the_guard_has_one() -> None:
    scaler = TorchScaler(scaler_of(2.0**-13))
    assert not scaler.at_minimum
    for _ in range(3):
        scaler.update(overflowed=True)
        assert scaler.scale == 2.0**-14
        assert scaler.at_minimum
    below = TorchScaler(scaler_of(2.0**-20))
    below.update(overflowed=True)
    assert below.scale == 2.0**-20


def test_a_scaler_is_refused_where_there_is_nothing_to_scale(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exponents of float32"):
        train(config_of(tmp_path, precision="bf16"), scaler_of())
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    config = replace(config_of(tmp_path, precision="bf16"), train=TrainSection(num_steps=2, precision="bf16"))
    assert [action for action, _ in train(config, disabled)[0]] == ["proceed"] * 2


def test_the_scale_is_read_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scaler_of()
    given.scale(torch.ones(1))  # now it is a tensor
    scaler = TorchScaler(given)
    assert (scaler.scale, scaler.at_minimum) == (1024.0, False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "get_scale", lambda _: pytest.fail("it was read again"))
        for overflowed in (False, True, False, False, False, False):
            scaler.update(overflowed=overflowed)
        assert scaler.scale == 1024.0  # halved, and grown after four
        assert scaler.state_dict()["_growth_tracker"] == 0
    assert given.state_dict() == scaler.state_dict()
