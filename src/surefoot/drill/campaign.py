"""Which drills run, how often, on what: from the command line or from a campaign file; and all their results."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.drill.catalogue import CATALOGUE, Drill, find_drill
from surefoot.drill.rehearse import Rehearsal, prepare, rehearse, run_twin
from surefoot.drill.scratch import NUM_STEPS, QUIET, Scratch
from surefoot.drill.verdict import Result

MAX_REPEATS = 1000
_KEYS = ("name", "repeat", "ranks", "seed")


@dataclass(frozen=True, slots=True)
class Order:
    """`num_repeats` of one drill on `num_ranks`; each draws its rank and step from `seed` and its number."""

    drill: Drill
    num_repeats: int = 1
    num_ranks: int = 2
    seed: int = 0


def run_orders(orders: Sequence[Order], *, folder: Path, config: Path | None, on_result: Callable[[Result], None]) -> list[Result]:
    """Every repetition of every order, one after another. Runs of one size share their data and their undisturbed twin."""
    shared: dict[int, Rehearsal] = {}
    results = []
    for number, order in enumerate(orders):
        if order.num_ranks not in shared:
            shared[order.num_ranks] = _twinned(folder / f"{order.num_ranks}-ranks", order, config)
        for repeat in range(order.num_repeats):
            name = f"{number}-{order.drill.name}-{repeat}"
            result = rehearse(order.drill, shared[order.num_ranks], name=name, seed=order.seed + repeat)
            on_result(result)
            results.append(result)
    return results


def read_campaign(path: Path) -> list[Order]:
    """`[[drill]]` tables with name, repeat, ranks, seed. Raises ConfigError naming what is wrong in which of them."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), hint="`surefoot drill list` names what can run") from error
    except ValueError as error:
        raise ConfigError(f"no TOML: {error}", where=str(path), hint="a campaign is a file of [[drill]] tables") from error
    listed = tables.get("drill")
    if not isinstance(listed, list) or not listed:
        raise ConfigError("there is no [[drill]] in it", where=str(path), hint='[[drill]] name = "kill-a-rank" repeat = 10')
    return [_order(table, where=f"{path}: [[drill]] {number}") for number, table in enumerate(listed, start=1)]


def whole_catalogue(*, num_repeats: int, num_ranks: int, seed: int) -> list[Order]:
    """Everything that can run here."""
    return [Order(drill, num_repeats, num_ranks, seed) for drill in CATALOGUE.values() if drill.can_run]


def refuse_order(order: Order, *, where: str) -> None:
    """Raises ConfigError when a number of it is out of its bounds."""
    for name, value, low, high in (
        ("repeat", order.num_repeats, 1, MAX_REPEATS),
        ("ranks", order.num_ranks, 2, 64),
        ("seed", order.seed, 0, 2**63),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}", where=where, hint=f"from {low} to {high}", got=value)


@contextmanager
def scratch_folder(*, keep: bool) -> Iterator[Path]:
    """A folder that goes away afterwards, unless somebody wants to look into it."""
    folder = Path(tempfile.mkdtemp(prefix="surefoot-drill-"))
    try:
        yield folder
    finally:
        if not keep:
            rmtree(folder, ignore_errors=True)


def _twinned(folder: Path, order: Order, config: Path | None) -> Rehearsal:
    folder.mkdir(parents=True)
    if config is None:
        scratch = Scratch.make(folder, num_ranks=order.num_ranks, seed=order.seed)
    else:
        scratch = Scratch(folder, config.resolve(), (*QUIET, "checkpoint.interval_steps=20", f"train.num_steps={NUM_STEPS}"))
    rehearsal = prepare(scratch)
    return replace(rehearsal, digest=run_twin(rehearsal))


def _order(table: Mapping[str, Any], *, where: str) -> Order:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError("it has no name", where=where, hint="`surefoot drill list` names what can run")
    unknown = sorted(set(table) - set(_KEYS))
    numbers = {name: table[name] for name in _KEYS[1:] if name in table}
    wrong = unknown or sorted(name for name, value in numbers.items() if type(value) is not int)
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: {'no such key' if unknown else 'no whole number'}", where=where, hint=f"keys: {', '.join(_KEYS)}"
        )
    order = Order(find_drill(table["name"]), numbers.get("repeat", 1), numbers.get("ranks", 2), numbers.get("seed", 0))
    refuse_order(order, where=where)
    return order
