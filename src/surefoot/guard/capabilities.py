"""What the guard cannot do for this loop, said once at the start: a port that is missing is a line, one that lacks a part is an error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.errors import ConfigError
from surefoot.core.ports import CanaryPort, DataPort, EvalPort, GaugePort, RecomputePort, SteerableData
from surefoot.core.sections import RunConfig
from surefoot.heal.alerts import is_named

NO_RATE = "no jump of the learning rate is seen, nor one that the optimizer did not use: judge is given no lr="
"""Known after the first step."""

_STATEFUL = {"state_dict": "what a save holds of it, as JSON", "load_state_dict": "to put that back"}
_PARTS: Mapping[str, Mapping[str, str]] = {
    "data": {
        "__next__": "the next batch",
        "next_sample": "the global index of the first sample that was not handed out yet, asked for at every step",
        "cursor": "one small JSON object that a save holds, the same on all ranks",
        "seek": "to go on from such a cursor",
    },
    "evaluation": {"held_out": "the loss on frozen held-out samples, or None"},
    "numerics": {"bound": "of this step's gradients", "take_redos": "what was computed again", **_STATEFUL},
    "scaler": {
        "scale": "what the loss is multiplied by in this step",
        "at_minimum": "whether an overflow can lower it no further",
        "update": "a step ended in an update, or in an overflow",
        **_STATEFUL,
    },
    "gauges": {
        "begin": "the next step begins",
        "squared_local_norm": "of this rank's own gradient, or None",
        "times_s": "of forward, backward and reductions",
    },
    "recompute": {"gradient_digest": "of one atom of the last batch, computed again"},
}
_VALUES = frozenset({"next_sample", "bound", "scale", "at_minimum"})
"""Read, and not called."""


def refuse_unfit(given: Mapping[str, object | None], extra: Mapping[str, object]) -> None:
    """Local. Raises ConfigError where what was handed over lacks a part, or has it as a value where it is called, or the other way about.

    `given` by the argument of Guard; None is what was not handed over.
    """
    parts = [(name, port, _PARTS[name]) for name, port in given.items() if port is not None or name == "data"]
    for name, port, needed in [*parts, *((f"extra[{name!r}]", part, _STATEFUL) for name, part in extra.items())]:
        unfit = [f"{_called(part)} ({purpose})" for part, purpose in needed.items() if not _fits(port, part)]
        if unfit:
            what = f"{type(port).__name__} has no {', no '.join(unfit)}"
            hint = "give it these; surefoot.core.ports says what each returns, docs/guard.md shows a whole one"
            raise ConfigError(what, where=f"Guard({name}=...)", hint=hint)


def _fits(port: object, part: str) -> bool:
    missing = object()
    found = getattr(port, part, missing)
    return found is not missing and callable(found) != (part in _VALUES)


def _called(part: str) -> str:
    return f"attribute or property {part}" if part in _VALUES else f"method {part}"


def missing_capabilities(
    config: RunConfig,
    *,
    model: nn.Module,
    data: DataPort,
    evaluation: EvalPort | None,
    extra: Mapping[str, object],
    world_size: int,
    under_agent: bool,
    can_redo: bool = False,
    recompute: RecomputePort | None = None,
    gauges: GaugePort | None = None,
    repeats_bits: bool = True,
) -> list[str]:
    """One line per thing that this loop goes without, and why. Pure."""
    lines = _of_figures(config, evaluation=evaluation)
    if config.heal.recheck and not can_redo:
        lines.append("an ill step is skipped at once: the loop does not compute a batch again when judge asks for it (can_redo)")
    lines.append("`surefoot replay` cannot do these steps again: it trains with surefoot's own loop")
    if not isinstance(data, SteerableData):
        absent = [name for name in ("block", "skip", "blocklist", "locate") if not hasattr(data, name)]
        lines.append(f"no document can be skipped, blocked or located: the data port has no {', '.join(absent)}")
    if gauges is None and world_size > 1:
        lines.append("no rank's own gradient is measured before others are added to it: hand over gauges")
    if recompute is None and world_size > 1:
        lines.append("a rank that computes wrongly is not found where nothing is replicated: hand over what computes an atom again")
    elif not repeats_bits and world_size > 1:
        lines.append(
            "a rank that computes wrongly is not found where nothing is replicated: kernels may give other bits each time "
            "(numerics.deterministic = false), so audits compare no gradient"
        )
    if not extra:
        lines.append(
            "learning-rate schedules and averages are not saved: hand over what has a state_dict as extra={...}, a scaler as scaler="
        )
    if not under_agent:
        lines.append("nobody outside this process watches it: no restart, no culprit, no memory tier")
        if is_named(config.alerts):
            lines.append("no alerts: [alerts] names somewhere, but the process that sends them belongs to surefoot's agent")
    if isinstance(model, DistributedDataParallel) and world_size > 2:
        lines.append(
            "a resume may differ in the last bits: DDP sorts its buckets anew after the first backward of a process; "
            "one backward on zeros before restore() settles them"
        )
    return lines


def _of_figures(config: RunConfig, *, evaluation: EvalPort | None) -> list[str]:
    if evaluation is None:
        return ["no held-out loss and no canary: no evaluation was handed over"]
    if config.canary.interval_steps and not isinstance(evaluation, CanaryPort):
        return ["no canary, so weights that are ill are told from data by no frozen set: the evaluation has no canary()"]
    return []
