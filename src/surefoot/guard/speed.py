"""How fast a run is beside what its devices could do: tokens per second of a device, and model FLOPs utilisation."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.core.model_sizes import ModelSizes
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_before
from surefoot.plan.hardware import peak_of_device


class Speed:
    """FLOPs are those that the model needs, as `surefoot plan` counts them: what is computed again, or for masked tokens, is no use."""

    def __init__(self, config: RunConfig, *, model: nn.Module, device: torch.device, num_devices: int) -> None:
        self._config = config
        self._sizes = getattr(model, "sizes", None)
        self._num_devices = num_devices
        self._peak_flops = config.monitor.peak_flops or _known_peak(device, precision=config.train.precision)
        self._per_token: tuple[int, float | None] = (0, None)

    def of_device(self, tokens_per_s: float) -> float:
        return tokens_per_s / self._num_devices

    def mfu(self, tokens_per_s: float, *, next_sample: int) -> float | None:
        """Share of the peak, 0 to 1. None where the peak, or what a token costs, is not known."""
        per_token = self._flops_per_token(stage_before(self._config, next_sample).seq_len)
        if not self._peak_flops or not per_token:
            return None
        return self.of_device(tokens_per_s) * per_token / self._peak_flops

    def _flops_per_token(self, seq_len: int) -> float | None:
        if self._config.monitor.flops_per_token:
            return self._config.monitor.flops_per_token
        if not isinstance(self._sizes, ModelSizes):
            return None
        if self._per_token[0] != seq_len:
            self._per_token = seq_len, self._sizes.flops_per_token(seq_len)
        return self._per_token[1]


def _known_peak(device: torch.device, *, precision: str) -> float:
    """FLOP/s; 0 where it is not known, as on a CPU, whose clock and units no data sheet fixes."""
    if device.type != "cuda":
        return 0.0
    if precision == "fp32":
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return peak_of_device(torch.cuda.get_device_name(device), dtype=precision)
