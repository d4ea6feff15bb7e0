"""What this rank measures of a step beside its gradients: updates and their rates, probes, what the loop gauges, memory."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.checkpoint.state import names_of, submodules_of
from surefoot.core.errors import Incompatible
from surefoot.core.hashing import sha256_json
from surefoot.core.ports import GaugePort
from surefoot.core.sections import RunConfig
from surefoot.guard.state import TrainState
from surefoot.monitor.gradients import group_sums
from surefoot.monitor.groups import group_names
from surefoot.monitor.probes import Probes, gradient_values, moment_values
from surefoot.monitor.ratios import AppliedRate, UpdateSizes
from surefoot.monitor.vector import Layout, fold_late
from surefoot.tensors.world import World, gather_json, gather_words


@dataclass(frozen=True, slots=True)
class Readings:
    """Of one step up to the exchange. `values` are float64 on the device: what stands in the vector behind the norms of gradients."""

    squared_local_norm: torch.Tensor
    values: torch.Tensor
    memory_bytes: int
    lr_applied_ratio: float
    waited_s: float


class Instruments:
    """One per guard. Nothing of it outlives the next step but the factors of the optimizer's groups, and what is known of the newest
    update: that rides in the next vector, and `note_late` puts it into a save.

    `gauges` come from a loop that looks into its own forward and backward.
    """

    def __init__(self, state: TrainState, *, config: RunConfig, world: World, gauges: GaugePort | None) -> None:
        self.layout = Layout()
        self._state = state
        self._world = world
        self._gauges = gauges
        self._interval = config.monitor.probe_interval_steps
        self._narrow = torch.float16 if config.train.precision == "fp16" else None
        self._head_part = (world.rank % config.parallel.tp, config.parallel.tp)
        self._group_of: dict[int, int] = {}
        self._num_seen = 0
        self._applied_at = (-1, -1)
        self._probes: Probes | None = None
        self._sizes = UpdateSizes(num_groups=0)
        self._rate = AppliedRate()

    def get_ready(self) -> None:
        """Collective over the save group. Agree on the names of groups and probes, once, before the first step.

        Raises Incompatible where the optimizer has parameters that are not the model's.
        """
        names = names_of(self._state.model)
        parameters = {id(parameter) for parameter in self._state.model.parameters()}  # also those that are trained only later
        own = [name for identity, name in names.items() if identity in parameters]
        grouped = group_names(_gathered(self._world, own))
        groups = tuple(dict.fromkeys(grouped.values()))
        self._group_of = {identity: groups.index(grouped[name]) for identity, name in names.items() if name in grouped}
        self._refuse_strangers()
        self._sizes = UpdateSizes(num_groups=len(groups))
        self.layout = Layout(groups=groups)
        if self._interval:
            probes = Probes(submodules_of(self._state.model), grouped=grouped, narrow=self._narrow, head_part=self._head_part)
            told = _gathered(self._world, [*probes.sums, "|", *probes.maxima])
            sums = dict.fromkeys(name for names in told for name in names[: names.index("|")])
            maxima = dict.fromkeys(name for names in told for name in names[names.index("|") + 1 :])
            self.layout = Layout(groups=groups, sums=(*sums, *probes.values_of_groups(groups)), maxima=tuple(maxima))
            self._probes = probes

    def begin(self) -> None:
        """Local. Before the forward of the next step."""
        if self._gauges is not None:
            self._gauges.begin()
        if self._probes is not None and self._is_probed:
            self._probes.open()

    def read(self, counted: Sequence[nn.Parameter], *, norms_T: torch.Tensor, gradient_scale: float) -> Readings:
        """Local. Of the computation that just ended. `norms_T` are of the gradients of `counted`, which `gradient_scale` makes sums over
        live tokens."""
        device = self._world.device
        self._refuse_strangers()
        groups = [self._group_of[id(parameter)] for parameter in counted]
        squares_G = group_sums(norms_T.square(), groups=groups, num_groups=len(self.layout.groups)) * gradient_scale**2
        values = [squares_G, self._late_squares()]
        if self._probes is not None and self._is_probed:
            values += self._probe(counted, groups, self._probes)
        return Readings(
            squared_local_norm=self._squared_local_norm(norms_T) * gradient_scale**2,
            values=torch.cat(values),
            memory_bytes=memory_bytes(device),
            lr_applied_ratio=self._late_ratio(),
            waited_s=self._gauges.waited_s() if self._gauges is not None else 0.0,
        )

    def before_update(self, counted: Sequence[nn.Parameter]) -> None:
        """Local. Between the decision to update and the update."""
        self._sizes.before(counted, groups=[self._group_of[id(parameter)] for parameter in counted])

    def applied(self, *, told: float | None) -> None:
        """Local. The update has been made, with the rate that was `told`; the step is not counted yet."""
        self._applied_at = (self._state.attempt, self._state.step + 1)
        self._sizes.after(step=self._state.step + 1)
        self._rate.after(self._state.optimizer.param_groups, told=told, step=self._state.step + 1)

    def note_late(self) -> None:
        """Collective over the loop group. For a save of the present state: what all ranks know of the update that made it."""
        if self.layout.groups:
            values = torch.cat((self._late_squares(), torch.tensor([self._late_ratio()], dtype=torch.float64, device=self._world.device)))
            gathered = gather_words(self._world, values.view(torch.int64))
            self._state.monitor.late = fold_late(gathered, layout=self.layout, step=self._state.step)

    def end(self) -> Mapping[str, float]:
        """Local. No forward until the next `begin` belongs to the step. What the loop gauged of the step's time: forward_s and so on."""
        if self._probes is not None:
            self._probes.close()
        return self._gauges.times_s() if self._gauges is not None else {}

    @property
    def _is_probed(self) -> bool:
        """Counted in steps of the run: the same on all ranks, and after a resume."""
        return bool(self._interval) and (self._state.step + 1) % self._interval == 0

    @property
    def _saw_update(self) -> bool:
        """Whether the newest update was made here, on this line; else it is known from the checkpoint, and rank 0 tells it for all."""
        return self._applied_at == (self._state.attempt, self._state.step)

    def _late_squares(self) -> torch.Tensor:
        late, device, num_values = self._state.monitor.late, self._world.device, 2 * len(self.layout.groups)
        if self._saw_update:
            return self._sizes.take(step=self._state.step, device=device)
        if self._world.leads and late.step == self._state.step:
            return torch.tensor(late.values(self.layout.groups), dtype=torch.float64, device=device)
        return torch.zeros(num_values, dtype=torch.float64, device=device)

    def _late_ratio(self) -> float:
        late = self._state.monitor.late
        if self._saw_update:
            return self._rate.take(step=self._state.step)
        return late.lr_applied_ratio if self._world.leads and late.step == self._state.step else math.nan

    def _refuse_strangers(self) -> None:
        """Local. On all ranks that have such a parameter, whoever counts it; looked for again when the optimizer got more of them."""
        parameters = [parameter for group in self._state.optimizer.param_groups for parameter in group["params"]]
        if len(parameters) == self._num_seen:
            return
        strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in self._group_of]
        if strangers:
            raise Incompatible(
                f"the optimizer has {len(strangers)} parameters that the model had not when guard.restore() was called, of shapes "
                f"{', '.join(map(str, strangers[:4]))}",
                where="optimizer.param_groups",
                hint="build the model whole before the guard; what is trained only later is frozen until then (requires_grad_)",
            )
        self._num_seen = len(parameters)

    def _probe(self, counted: Sequence[nn.Parameter], groups: Sequence[int], probes: Probes) -> list[torch.Tensor]:
        num_groups, device = len(self.layout.groups), self._world.device
        known = probes.take(self.layout, device=device)
        of_gradients = gradient_values(counted, groups=groups, num_groups=num_groups, narrow=self._narrow, device=device)
        of_moments = moment_values(counted, self._state.optimizer.state, groups=groups, num_groups=num_groups, device=device)
        num_own = len(self.layout.sums) - len(of_gradients) - len(of_moments)
        return [known[:num_own], of_gradients, of_moments, known[num_own:]]

    def _squared_local_norm(self, norms_T: torch.Tensor) -> torch.Tensor:
        """Of a loop that gauges nothing it is known only where nothing is added to it by others."""
        gauged = self._gauges.squared_local_norm() if self._gauges is not None else None
        if gauged is not None:
            return torch.as_tensor(gauged, dtype=torch.float64, device=self._world.device)
        return norms_T.square().sum() if self._world.size == 1 else norms_T.new_tensor(math.nan)


def memory_bytes(device: torch.device) -> int:
    """Local. The most that was ever in use: of the device, or, on a CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gathered(world: World, names: list[str]) -> list[list[str]]:
    """Collective over the save group. The names of all ranks; sent only where they differ, as on the stages of a pipeline."""
    if len(set(gather_json(world, sha256_json(names)))) == 1:
        return [names]
    return [[str(name) for name in told] for told in gather_json(world, names)]
