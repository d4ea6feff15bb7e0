"""All parts of a guard, built in the order in which they need each other. What each of them does is in its own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.coordinate.beats import BeatSlot
from surefoot.coordinate.lease import LeaseKeeper
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock
from surefoot.core.errors import ConfigError
from surefoot.core.ports import DataPort, EvalPort, GaugePort, LossScaler, NumericsPort, RecomputePort, Stateful
from surefoot.core.sections import RunConfig
from surefoot.guard.audit import Audit, bits_are_promised
from surefoot.guard.beating import be_watched
from surefoot.guard.capabilities import missing_capabilities, refuse_unfit
from surefoot.guard.healing import Healer
from surefoot.guard.instruments import Instruments
from surefoot.guard.investigating import Investigation
from surefoot.guard.judging import Judge
from surefoot.guard.monitoring import Monitoring
from surefoot.guard.orders import Orders
from surefoot.guard.pace import Pace
from surefoot.guard.place import Place, find_place, under_agent
from surefoot.guard.recording import Recorder
from surefoot.guard.recovery import Recovery
from surefoot.guard.requests import LeaveRequests
from surefoot.guard.saving import Saver
from surefoot.guard.script import Script
from surefoot.guard.speed import Speed
from surefoot.guard.state import TrainState
from surefoot.guard.steering import Steering
from surefoot.guard.straggling import Straggling
from surefoot.guard.testifying import testify_to_agent
from surefoot.guard.timing import StepTimes
from surefoot.guard.waiting import DataWaits
from surefoot.tensors.flight import evidence_path, keep_evidence_at
from surefoot.tensors.world import World, world_here


@dataclass(frozen=True)
class Handed:
    """What a loop hands over; `Guard` says what each is for."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: DataPort
    evaluation: EvalPort | None
    extra: Mapping[str, Stateful]
    numerics: NumericsPort | None
    scaler: LossScaler | None
    gauges: GaugePort | None
    gradient_divisor: float
    script: Script | None
    can_redo: bool
    recompute: RecomputePort | None


@dataclass(frozen=True)
class BoundRun:
    """A run and everything that watches it. `is_foreign`: the loop is somebody else's."""

    config: RunConfig
    handed: Handed
    clock: Clock
    is_foreign: bool
    world: World
    requests: LeaveRequests
    place: Place
    lease: LeaseKeeper | None
    state: TrainState
    beat: BeatSlot
    recorder: Recorder
    instruments: Instruments
    speed: Speed
    judge: Judge
    saver: Saver
    steering: Steering
    recovery: Recovery
    orders: Orders
    monitoring: Monitoring
    investigation: Investigation
    healer: Healer
    pace: Pace
    times: StepTimes
    waits: DataWaits
    straggling: Straggling

    @property
    def script(self) -> Script | None:
        return self.handed.script


def bind(config: RunConfig, handed: Handed, *, world: World | None, lock: RunLock | None, clock: Clock) -> BoundRun:
    """Collective over the world, or the one that is found here. Raises ConfigError when the config asks for what this loop cannot do."""
    if config.numerics.sums == "exact" and handed.numerics is None:
        what = "exact sums are made by our own training step, not by the guard around another loop"
        raise ConfigError(what, where="[numerics] sums", hint="leave it out")
    _refuse_unfit(handed)  # before anything is written
    is_foreign = world is None  # our own loop hands over the world that it joined
    world = world or world_here(_device_of(handed.optimizer), collective_limit_s=config.launch.collective_limit_s)
    # Before anybody outside can see that this run is there, and sends it a signal.
    requests = LeaveRequests(asked_by_agent=lambda: bool(place.board.leave_requested), takes_interrupts=not under_agent())
    try:
        place = find_place(config, world, clock=clock, lock=lock)
    except BaseException:
        requests.close()
        raise
    run_dir, generation = place.run_dir, place.generation
    keep_evidence_at(evidence_path(run_dir, generation=generation, rank=world.rank))
    state = TrainState(
        model=handed.model,
        optimizer=handed.optimizer,
        data=handed.data,
        extra=handed.extra,
        numerics=handed.numerics,
        scaler=handed.scaler,
    )
    beat = place.board.slot(world.rank)
    if place.under_agent:
        be_watched(beat)
        testify_to_agent()
    recorder = Recorder(state, config=config, world=world, run_dir=run_dir, generation=generation, clock=clock)
    instruments = Instruments(state, config=config, world=world, gauges=handed.gauges)
    saver = Saver(
        state,
        config=config,
        world=world,
        run_dir=run_dir,
        generation=generation,
        recorder=recorder,
        clock=clock,
        note_late=instruments.note_late,
    )
    steering = Steering(handed.data, world=world, recorder=recorder, run_dir=run_dir, clock=clock, section=config.observe)
    recovery = Recovery(
        state,
        config=config,
        world=world,
        generation=generation,
        recorder=recorder,
        saver=saver,
        steering=steering,
        evaluation=handed.evaluation,
        root=run_dir / "checkpoints",
    )
    audit = Audit(state, config=config, world=world, recorder=recorder, recompute=handed.recompute)
    monitoring = Monitoring(state, config=config, evaluation=handed.evaluation, audit=audit)
    investigation = Investigation(state, config=config, world=world, recorder=recorder, recovery=recovery)
    healer = Healer(
        state,
        config=config,
        world=world,
        recorder=recorder,
        investigation=investigation,
        monitoring=monitoring,
        can_redo=handed.can_redo,
    )
    return BoundRun(
        config=config,
        handed=handed,
        clock=clock,
        is_foreign=is_foreign,
        world=world,
        requests=requests,
        place=place,
        lease=LeaseKeeper(place.lock, lease_s=config.launch.lease_s) if place.lock is not None else None,
        state=state,
        beat=beat,
        recorder=recorder,
        instruments=instruments,
        speed=Speed(config, model=handed.model, device=world.device, num_devices=world.size),
        judge=Judge(
            state,
            world=world,
            instruments=instruments,
            generation=generation,
            gradient_divisor=handed.gradient_divisor,
            clock=clock,
        ),
        saver=saver,
        steering=steering,
        recovery=recovery,
        orders=Orders(
            state,
            config=config,
            world=world,
            recorder=recorder,
            saver=saver,
            run_dir=run_dir,
            clock=clock,
            beat=beat,
            asked_to_leave=lambda: requests.reason,
            roll_back=investigation.go_back_as_asked,
            looked_into=investigation.refold,
        ),
        monitoring=monitoring,
        investigation=investigation,
        healer=healer,
        pace=Pace(config.checkpoint, world=world, recorder=recorder),
        times=StepTimes(clock),
        waits=DataWaits(config.monitor),
        straggling=Straggling(config, recorder=recorder, leads=world.leads),
    )


def _refuse_unfit(handed: Handed) -> None:
    """Local. Raises ConfigError, as `refuse_unfit`."""
    ports = {name: getattr(handed, name) for name in ("data", "evaluation", "numerics", "scaler", "gauges", "recompute")}
    refuse_unfit(ports, handed.extra)
    if not any(group["params"] for group in handed.optimizer.param_groups):
        raise ConfigError("the optimizer has no parameters", where="Guard(optimizer=...)", hint="hand over the one that updates the model")


def what_is_missing(run: BoundRun) -> list[str]:
    """Local. One line per thing that this loop goes without, and why."""
    return missing_capabilities(
        run.config,
        model=run.state.model,
        data=run.state.data,
        evaluation=run.handed.evaluation,
        extra=run.state.extra,
        world_size=run.world.size,
        under_agent=run.place.under_agent,
        can_redo=run.handed.can_redo,
        recompute=run.handed.recompute,
        gauges=run.handed.gauges,
        repeats_bits=bits_are_promised(run.world),
    )


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Of its first parameter: a group may be empty on a stage of a pipeline."""
    parameters: list[torch.Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters[0].device
