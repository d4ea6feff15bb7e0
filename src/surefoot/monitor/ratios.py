"""What the last update did: its size beside that of the weights, and the rate it was made with beside the one that was told.

Both are read around `optimizer.step()`, whatever the optimizer, and travel in the vector of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.monitor.gradients import group_sums, local_part, norms_of

MAX_SAMPLE = 2048
"""Elements of each tensor that are looked at. With n of them a root mean square is known to sqrt((kurtosis - 1) / 4n): 1.6% for a normal
distribution, less for Adam's updates, which are nearly of one size; groups of several tensors are known better."""


class UpdateSizes:
    """Squares of updates and of weights per group, scaled up from a sample of the local tensors. Reads only: copies may be under way."""

    def __init__(self, *, num_groups: int) -> None:
        self._num_groups = num_groups
        self._before: torch.Tensor | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._groups: Sequence[int] = ()
        self._squares_2G: torch.Tensor | None = None
        self._after_step = -1

    def before(self, parameters: Sequence[torch.Tensor], *, groups: Sequence[int]) -> None:
        """Local. Just before the update; `parameters` are those that this rank counts, `groups` the index of each one's group."""
        self._parameters, self._groups = parameters, groups
        self._before = _flat_sample(parameters)

    def after(self, *, step: int) -> None:
        """Local. Just after the update of step `step`, which is the number of steps finished when it is counted."""
        before, self._before = self._before, None
        if before is None or not len(before):
            return
        samples = _samples(self._parameters)
        after = torch.cat([sample.to(torch.promote_types(sample.dtype, torch.float32)) for sample in samples])
        lengths = [len(sample) for sample in samples]
        parts = [*torch.split(after - before, lengths), *torch.split(after, lengths)]
        norms_2T = norms_of(parts, device=after.device)
        scale_T = torch.tensor(
            [local_part(parameter).numel() / length for parameter, length in zip(self._parameters, lengths, strict=True)]
        )
        squares_2T = norms_2T.square() * scale_T.to(norms_2T).repeat(2)
        groups_2T = [*self._groups, *(index + self._num_groups for index in self._groups)]
        self._squares_2G = group_sums(squares_2T, groups=groups_2T, num_groups=2 * self._num_groups)
        self._after_step = step

    def take(self, *, step: int, device: torch.device) -> torch.Tensor:
        """Local. float64 [2G] on `device`: squares of the update that made step `step` from the one before, and of the weights after it.

        Zeros where there was none: it was skipped, or the state is another one since.
        """
        if self._squares_2G is None or self._after_step != step:
            return torch.zeros(2 * self._num_groups, dtype=torch.float64, device=device)
        return self._squares_2G


class AppliedRate:
    """Whether updates are made with the rate that was told. A group may follow it at a factor of its own."""

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}
        self._told = math.nan
        self._rates: HostRates | None = None
        self._ratios: list[float | None] = []
        self._after_step = -1

    def after(self, groups: Sequence[Mapping[str, Any]], *, told: float | None, step: int) -> None:
        """Local. Just after the update, before a schedule moves on. `told` is None where the loop tells no rate. Waits for no device.

        The factor of a group is its `lr_ratio` where the optimizer has one, else what its first update shows.
        """
        self._after_step = step
        self._told = told if told is not None and told > 0 else math.nan
        self._rates = None if math.isnan(self._told) else HostRates([group["lr"] for group in groups])
        self._ratios = [float(group["lr_ratio"]) if "lr_ratio" in group else None for group in groups]

    def take(self, *, step: int) -> float:
        """Local. Applied over told, of the group furthest from 1; nan where the update that made step `step` is not known."""
        if self._rates is None or self._after_step != step:
            return math.nan
        ratios = []
        for index, (rate, ratio) in enumerate(zip(self._rates.values(), self._ratios, strict=True)):
            factor = ratio if ratio is not None else self._factors.setdefault(index, rate / self._told)
            if factor:
                ratios.append(rate / (self._told * factor))
        return max(ratios, key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf, default=math.nan)


class HostRates:
    """Rates as they are now. Of those on a device a copy is on its way to the host, so that who asks later does not wait for what was
    queued since."""

    def __init__(self, rates: Sequence[Any]) -> None:
        self._rates: list[float | None] = []
        away: list[torch.Tensor] = []
        for rate in rates:
            is_away = isinstance(rate, torch.Tensor) and rate.is_cuda
            self._rates.append(None if is_away else float(rate))
            away += [rate.detach().reshape(())] if is_away else []
        self._copy: torch.Tensor | None = None
        if away:
            stacked = torch.stack([rate.to(torch.float64) for rate in away])
            self._copy = torch.empty(len(away), dtype=torch.float64, pin_memory=True).copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            self._copied.record()

    def values(self) -> list[float]:
        if self._copy is None:
            return [rate for rate in self._rates if rate is not None]
        self._copied.synchronize()
        copied = iter(self._copy.tolist())
        return [next(copied) if rate is None else rate for rate in self._rates]


@dataclass(frozen=True, slots=True)
class Late:
    """What all ranks know together of the update that made step `step`, and what a vector carries only a step later: saved with the state,
    so that a resumed run hands it in as the uninterrupted one did. `squares` are of update and weights, by group."""

    step: int = -1
    squares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lr_applied_ratio: float = math.nan

    def to_json(self) -> dict[str, Any]:
        """What is not finite is null."""
        return {
            "step": self.step,
            "squares": {name: [_number(value) for value in pair] for name, pair in self.squares.items()},
            "lr_applied_ratio": _number(self.lr_applied_ratio),
        }

    def values(self, groups: Sequence[str]) -> list[float]:
        """As `UpdateSizes.take` has them: updates by group, then weights."""
        return [self.squares.get(name, (0.0, 0.0))[part] for part in (0, 1) for name in groups]


def late_from_json(value: Mapping[str, Any]) -> Late:
    """What `to_json` gave; of an older checkpoint, which has none, nothing is known."""
    if not value:
        return Late()
    squares = {name: (_known(update), _known(weight)) for name, (update, weight) in value["squares"].items()}
    return Late(int(value["step"]), squares, _known(value["lr_applied_ratio"]))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _flat_sample(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    samples = _samples(parameters)
    return torch.cat([sample.to(torch.promote_types(sample.dtype, torch.float32)) for sample in samples]) if samples else None


def _samples(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of at most `MAX_SAMPLE` elements each, the same ones every time. The stride shares no factor with the rows, so it meets all
    columns alike."""
    samples = []
    for tensor in tensors:
        flat = local_part(tensor).reshape(-1)
        stride = max(1, -(-flat.numel() // MAX_SAMPLE))
        while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
            stride += 1
        samples.append(flat[::stride])
    return samples
