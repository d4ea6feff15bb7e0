"""Plans, trains, protects and recovers language-model pre-training runs on PyTorch.

The public names below are all there is; everything else may change. Each is imported when it is first used, so `import surefoot` is cheap
and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.core.version import __version__

if TYPE_CHECKING:
    from surefoot.config import LoadedConfig, load_config
    from surefoot.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        Deterministic,
        Held,
        PeerLost,
        PlanInfeasible,
        Preempted,
        SurefootError,
        TrainingHalted,
    )
    from surefoot.core.records import Go, Leave, Resumed, StepReport
    from surefoot.core.sections import RunConfig
    from surefoot.guard import Guard
    from surefoot.train.loop import training_steps

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Deterministic",
    "Go",
    "Guard",
    "Held",
    "Leave",
    "LoadedConfig",
    "PeerLost",
    "PlanInfeasible",
    "Preempted",
    "Resumed",
    "RunConfig",
    "StepReport",
    "SurefootError",
    "TrainingHalted",
    "__version__",
    "load_config",
    "training_steps",
]

_ERRORS = ("CheckpointError", "ConfigError", "DataError", "Deterministic", "Held", "PeerLost", "PlanInfeasible", "Preempted")
_HOMES = {
    **dict.fromkeys((*_ERRORS, "SurefootError", "TrainingHalted"), "surefoot.core.errors"),
    **dict.fromkeys(("Go", "Leave", "Resumed", "StepReport"), "surefoot.core.records"),
    **dict.fromkeys(("LoadedConfig", "load_config"), "surefoot.config"),
    "RunConfig": "surefoot.core.sections",
    "Guard": "surefoot.guard",
    "training_steps": "surefoot.train.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
