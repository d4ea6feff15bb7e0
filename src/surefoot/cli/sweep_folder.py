"""The folder of a sweep: `sweep.json` says which runs there are, `configs/` how the first of each size is trained, `runs/` holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.new_folder import new_folder, refuse_taken
from surefoot.core.config_text import config_text
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.core.sections import RunConfig
from surefoot.core.strict_json import dumps, loads

if TYPE_CHECKING:
    from surefoot.plan.sizing.laws import Law
    from surefoot.plan.sweeps.sweep import Sweep

SWEEP_NAME = "sweep.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep as its folder has it. `parent` is a run of this sweep, or the folder of any other run."""

    name: str
    budget_flops: float
    flops: float
    trained_flops: float
    tokens: float
    n: int
    num_steps: int
    parent: str = ""
    branch_step: int = 0
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """`about` is how the sweep came about: law, budgets, what is varied, the limit that was given."""

    path: Path
    kind: str
    points: tuple[Point, ...]
    about: Mapping[str, Any]

    def run_dir(self, name: str) -> Path:
        return self.path / "runs" / name

    def config_file(self, name: str) -> Path:
        return self.path / "configs" / f"{name}.toml"

    def log_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def parent_dir(self, point: Point) -> Path:
        own = self.run_dir(point.parent)
        return own if any(other.name == point.parent for other in self.points) else Path(point.parent)


def points_of(sweep: Sweep) -> tuple[Point, ...]:
    return tuple(
        Point(
            name=run.name,
            budget_flops=run.budget_flops,
            flops=run.flops,
            trained_flops=run.trained_flops,
            tokens=run.tokens,
            n=run.sizes.num_parameters,
            num_steps=run.config.train.num_steps,
            parent=run.parent,
            branch_step=run.branch_step,
            overrides=run.overrides if run.parent else (),
        )
        for run in sweep.runs
    )


def write_sweep(folder: SweepFolder, configs: Mapping[str, RunConfig]) -> None:
    """Whole or not at all: built beside its place, and what a layout cannot train is told here, not by the first run that tries."""
    refuse_taken(folder.path, option="--out")
    with new_folder(folder.path, option="--out") as building:
        there = replace(folder, path=building)
        (building / "configs").mkdir()
        for name, config in configs.items():
            # Paths are kept relative to the config, and both folders stand in the same place.
            own = replace(config, run=replace(config.run, dir=str(there.run_dir(name))))
            write_atomic(there.config_file(name), config_text(own, folder=there.config_file(name).parent))
        _try_configs(there, configs)
        record = {
            "format_version": FORMAT_VERSION,
            "kind": folder.kind,
            "about": folder.about,
            "runs": [asdict(one) for one in folder.points],
        }
        write_atomic(building / SWEEP_NAME, dumps(record, indent=1) + "\n")


def _try_configs(folder: SweepFolder, configs: Mapping[str, RunConfig]) -> None:
    """Of branches too, where they begin at a run of this sweep."""
    from surefoot.config import load_config

    for point in folder.points:
        first = point.parent or point.name
        if first not in configs:
            continue
        try:
            load_config(folder.config_file(first), point.overrides)
        except ConfigError as error:
            raise ConfigError(f"cannot be trained: {error.what}", where=f"run {point.name}", hint=error.hint) from error


def read_sweep(path: Path) -> SweepFolder:
    """Raises ConfigError for a folder that holds no sweep, or one of a later version."""
    file = path / SWEEP_NAME
    try:
        record: Any = loads(file.read_bytes())
        if record["format_version"] > FORMAT_VERSION:
            raise ConfigError(f"written by a later surefoot: format {record['format_version']}", where=str(file), hint="upgrade surefoot")
        points = tuple(Point(**{**one, "overrides": tuple(one["overrides"])}) for one in record["runs"])
        return SweepFolder(path, str(record["kind"]), points, record["about"])
    except FileNotFoundError as error:
        raise ConfigError(
            f"no {SWEEP_NAME} here", where=str(path), hint="`surefoot sweep plan BASE.toml ... --out DIR` makes one"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not the plan of a sweep: {error}", where=str(file), hint="plan the sweep again, into a new folder") from error


def law_of(name: str) -> Law:
    """A published law, `ratio:R`, or the JSON file of a fit, such as the one of an earlier sweep."""
    from surefoot.plan.sizing.from_fit import fitted_law
    from surefoot.plan.sizing.published import law

    return fitted_law(Path(name)) if name.endswith(".json") else law(name)
