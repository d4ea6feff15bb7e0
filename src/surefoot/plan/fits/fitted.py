"""Laws that `surefoot fit --json` saved, read back for planning. Needs none of what fits one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.fits.best_loss import LossLaw
from surefoot.plan.fits.isoflop import PowerLaw, mirrored
from surefoot.plan.fits.tuning import TuningFit
from surefoot.plan.surface_record import Surface


@dataclass(frozen=True, slots=True)
class FittedSurface:
    """`draws` are of the surface; the FLOPs are those of the runs, `count` is the column that N is from, `source` the table."""

    surface: Surface
    draws: tuple[Surface, ...]
    smallest_flops: float
    largest_flops: float
    count: str
    source: str


@dataclass(frozen=True, slots=True)
class FittedIsoFlop:
    """N*, D*, D*/N* and, where there were budgets enough, the loss, as laws of compute."""

    n_law: PowerLaw
    token_law: PowerLaw
    ratio_law: PowerLaw
    loss_law: LossLaw | None
    smallest_flops: float
    largest_flops: float
    count: str
    source: str


@dataclass(frozen=True, slots=True)
class FittedTuning:
    """`law` is "lr" or "batch", `column` what the table called it: a batch is in tokens only if that column was."""

    law: str
    fit: TuningFit
    column: str
    smallest_flops: float
    largest_flops: float
    count: str
    source: str


Fitted = FittedSurface | FittedIsoFlop | FittedTuning


def read_fit(path: Path) -> Fitted:
    """Raises ConfigError where there is no such file, DataError where it is not what `surefoot fit --json` prints."""
    hint = "save one with `surefoot fit TABLE --law parametric --json > fit.json`"
    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path), hint=hint)
    try:
        answer = strict_json.loads(path.read_bytes())
        return _READERS[answer["law"]](answer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"is no fit: {type(error).__name__} {error}", where=str(path), hint=hint) from error


def _surface(answer: Mapping[str, Any]) -> FittedSurface:
    surface = Surface(*(float(answer[name]) for name in ("E", "A", "B", "alpha", "beta")))
    draws = tuple(Surface(*(float(value) for value in drawn)) for drawn in answer["draws"])
    return FittedSurface(surface, draws, *_origin(answer))


def _isoflop(answer: Mapping[str, Any]) -> FittedIsoFlop:
    draws = tuple((float(log_coef), float(exponent)) for log_coef, exponent in answer["draws"])
    n_law = PowerLaw(float(answer["coef"]), float(answer["a"]), draws)
    laws = answer["laws"]
    token_law, ratio_law = (
        mirrored(n_law, float(laws[name]["coef"]), float(laws[name]["exponent"]), times=times)
        for name, times in (("tokens", 1.0), ("tokens_per_parameter", 2.0))
    )
    return FittedIsoFlop(n_law, token_law, ratio_law, _loss_law(laws["loss"]), *_origin(answer))


def _loss_law(told: Mapping[str, Any] | None) -> LossLaw | None:
    if told is None:
        return None
    draws = tuple((float(floor), float(k), float(exponent)) for floor, k, exponent in told["draws"])
    return LossLaw(float(told["E"]), float(told["k"]), float(told["exponent"]), draws)


def _tuning(answer: Mapping[str, Any]) -> FittedTuning:
    exponents = {str(name): float(value) for name, value in answer["exponents"].items()}
    draws = tuple(tuple(float(value) for value in drawn) for drawn in answer["draws"])
    fit = TuningFit(float(answer["coef"]), exponents, draws, (), (), ())
    return FittedTuning(str(answer["law"]), fit, str(answer["column"]), *_origin(answer))


def _origin(answer: Mapping[str, Any]) -> tuple[float, float, str, str]:
    return float(answer["smallest_flops"]), float(answer["largest_flops"]), str(answer["count"]), str(answer["table"])


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Fitted]] = {
    "parametric": _surface,
    "isoflop": _isoflop,
    "lr": _tuning,
    "batch": _tuning,
}
