"""Measure, exchange, judge: from this rank's gradients to a verdict that is equal on all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from surefoot.core.clock import Clock
from surefoot.core.records import Signals, Verdict
from surefoot.guard.counting import agree_dealt
from surefoot.guard.state import TrainState
from surefoot.guard.under_way import SaveWords
from surefoot.monitor.gradients import counted_gradients, squared_norm_levels
from surefoot.monitor.vector import Flag, HostWords, encode, fold
from surefoot.monitor.verdict import judge
from surefoot.tensors.world import World, gather_words


@dataclass(frozen=True, slots=True)
class Measured:
    """What the loop hands over for one step. `loss_sum` is in nats, summed over this rank's live tokens. Durations in seconds."""

    loss_sum: torch.Tensor
    num_live_tokens: int
    data_wait_s: float
    forward_backward_s: float


class Judge:
    """Holds nothing that outlives a step."""

    def __init__(self, state: TrainState, *, world: World, generation: int, gradient_divisor: float, clock: Clock) -> None:
        self._state = state
        self._world = world
        self._generation = generation
        self._gradient_divisor = gradient_divisor
        self._clock = clock
        self._dealt: frozenset[int] | None = None

    def get_ready(self) -> None:
        """Collective over the save group. Agree on who counts which gradient, once, before the first step."""
        self._dealt = agree_dealt(self._state.model, self._state.optimizer, world=self._world)

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
    ) -> tuple[Signals, Verdict]:
        """Collective over the loop group: the one all-gather of the step. Reads the device once."""
        parameters = [parameter for group in self._state.optimizer.param_groups for parameter in group["params"]]
        gradients = counted_gradients(parameters, rank=self._world.rank, world_size=self._world.size, dealt=self._dealt)
        numerics = self._state.numerics
        levels_L1 = squared_norm_levels(gradients, device=self._world.device, bound=numerics.bound if numerics is not None else None)
        if numerics is not None and not self._world.leads:
            levels_L1[-1] = 0.0  # the bound counts the non-finite tensors of all ranks
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
        )
        loss_sum = measured.loss_sum.detach().to(device=self._world.device, dtype=torch.float64)
        levels_L1[:-1] *= (self._gradient_divisor / self._state.loss_scale) ** 2
        device_values = torch.cat((loss_sum.reshape(1), levels_L1))
        signals = fold(gather_words(self._world, encode(host, device_values=device_values)))
        scaler = self._state.scaler
        if scaler is not None:
            signals = replace(signals, loss_scale=scaler.scale, loss_scale_at_minimum=scaler.at_minimum)
        return signals, judge(signals)
