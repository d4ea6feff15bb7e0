"""Measure and exchange: from this rank's gradients to signals that are equal on all ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from surefoot.core.clock import Clock
from surefoot.core.records import Signals
from surefoot.guard.counting import agree_dealt
from surefoot.guard.instruments import Instruments
from surefoot.guard.state import TrainState
from surefoot.guard.under_way import SaveWords
from surefoot.monitor.gradients import counted_parameters, gradients_of, norms_of, squared_norm_levels
from surefoot.monitor.probe_figures import probe_figures
from surefoot.monitor.vector import Flag, HostWords, encode, fold
from surefoot.tensors.world import World, gather_words


@dataclass(frozen=True, slots=True)
class Measured:
    """What the loop hands over for one step. `loss_sum` is in nats, summed over this rank's live tokens. Durations in seconds.

    `lr` is the rate that the loop will update with, nan where it did not say so by itself.
    """

    loss_sum: torch.Tensor
    num_live_tokens: int
    data_wait_s: float
    forward_backward_s: float
    lr: float = math.nan


class Judge:
    """Holds nothing that outlives a step."""

    def __init__(
        self,
        state: TrainState,
        *,
        world: World,
        instruments: Instruments,
        generation: int,
        gradient_divisor: float,
        clock: Clock,
    ) -> None:
        self._state = state
        self._instruments = instruments
        self._world = world
        self._generation = generation
        self._gradient_divisor = gradient_divisor
        self._clock = clock
        self._dealt: frozenset[int] | None = None
        self._told_lr: float | None = None

    def get_ready(self) -> None:
        """Collective over the save group. Agree on who counts which gradient and on what the vector carries, before the first step."""
        self._dealt = agree_dealt(self._state.model, self._state.optimizer, world=self._world)
        self._instruments.get_ready()

    def exchange(
        self,
        measured: Measured,
        *,
        leave: bool,
        block: bool,
        order: bool,
        blocklist_word: int,
        saves: SaveWords,
        save_clock_s: float,
        save_stall_s: float,
    ) -> Signals:
        """Collective over the loop group: the one all-gather of the step. Reads the device once."""
        counted = self._counted()
        gradients, device = gradients_of(counted), self._world.device
        scale = self._gradient_divisor / self._state.loss_scale
        norms_T = norms_of(gradients, device=device)
        numerics = self._state.numerics
        bound = numerics.bound if numerics is not None else None
        levels_L1 = squared_norm_levels(gradients, norms_T=norms_T, device=device, bound=bound)
        if numerics is not None and not self._world.leads:
            levels_L1[-1] = 0.0  # the bound counts the non-finite tensors of all ranks
        levels_L1[:-1] *= scale**2
        readings = self._instruments.read(counted, norms_T=norms_T, gradient_scale=scale)
        self._told_lr = None if math.isnan(measured.lr) else measured.lr
        host = HostWords(
            generation=self._generation,
            attempt=self._state.attempt,
            step=self._state.step,
            flags=Flag(Flag.LEAVE * leave + Flag.SAVE * saves.wants_save + Flag.BLOCK * block + Flag.ORDER * order),
            blocklist_word=blocklist_word,
            num_live_tokens=measured.num_live_tokens,
            data_wait_s=measured.data_wait_s,
            forward_backward_s=measured.forward_backward_s,
            step_clock_s=self._clock.monotonic_s(),
            cpu_s=time.process_time(),
            save_clock_s=save_clock_s,
            save_stall_s=save_stall_s,
            save_slot_free=saves.slot_free,
            save_point=saves.point,
            save_state=saves.state,
            layout_word=self._instruments.layout.word,
            memory_bytes=readings.memory_bytes,
            lr=measured.lr,  # a foreign schedule may restart as it likes
            lr_applied_ratio=readings.lr_applied_ratio,
            waited_s=readings.waited_s,
        )
        loss_sum = measured.loss_sum.detach().to(device=device, dtype=torch.float64)
        values = torch.cat((loss_sum.reshape(1), levels_L1, readings.squared_local_norm.reshape(1), readings.values))
        words_RW = gather_words(self._world, encode(host, device_values=values))
        signals = fold(words_RW, layout=self._instruments.layout, figures=probe_figures)
        scaler = self._state.scaler
        if scaler is not None:
            signals = replace(signals, loss_scale=scaler.scale, loss_scale_at_minimum=scaler.at_minimum)
        return signals

    def before_update(self) -> None:
        """Local. Between the decision to update and the update."""
        self._instruments.before_update(self._counted())

    def applied(self) -> None:
        """Local. The update has been made; the step is not counted yet."""
        self._instruments.applied(told=self._told_lr)

    def _counted(self) -> list[torch.nn.Parameter]:
        parameters = [parameter for group in self._state.optimizer.param_groups for parameter in group["params"]]
        return counted_parameters(parameters, rank=self._world.rank, world_size=self._world.size, dealt=self._dealt)
