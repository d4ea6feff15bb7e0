"""What must be alike on all ranks before the first step, compared: a rank that differs is refused by name, with what differs.

A rank of another seed, another library or another number of threads trains on happily, and its share of every sum is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.core.hashing import sha256_json
from surefoot.core.identity import code_hashes, hashed_values, values_of
from surefoot.core.sections import RunConfig
from surefoot.guard.environment import describe_environment
from surefoot.guard.state import TrainState
from surefoot.tensors.world import World, gather_json

_OF_A_HOST = ("_SOCKET_IFNAME", "_IB_HCA", "_HOSTID", "_TOPO_FILE", "_GRAPH_FILE", "_DEBUG", "_DUMP_FILE", "_CONF_FILE")
"""Ends of names of NCCL settings that describe one host, or only write: they may differ from node to node."""

_OF_A_STAGE = ("optimizer_kernel", "parameter_dtypes")
"""Facts of the tensors that a rank has: the stages of a pipeline have others."""

_NOT_COMPARED = ("run", "data", "stage", "checkpoint", "observe", "alerts", "plan", "objectives", "drill")
"""Sections that are told in part by the hashed values, or decide no bit and no collective."""


def agree_ranks(state: TrainState, *, config: RunConfig, world: World) -> None:
    """Collective over the save group. Raises the same ConfigError on all ranks where one differs: one hash each, and all only then."""
    facts = rank_facts(state, config=config, world=world)
    if len(set(gather_json(world, sha256_json(facts)))) == 1:
        return
    if (refused := refusal(gather_json(world, facts))) is not None:
        raise refused


def rank_facts(state: TrainState, *, config: RunConfig, world: World) -> dict[str, Any]:
    """Local. By the name that a person knows it by: settings, versions, threads, device, and NCCL's settings of the environment."""
    facts: dict[str, Any] = {
        f"{section}.{key}": value for section, values in hashed_values(config).items() for key, value in values.items()
    }
    for section in (name for name in config.__dataclass_fields__ if name not in _NOT_COMPARED):
        facts |= {f"{section}.{key}": value for key, value in values_of(getattr(config, section)).items()}
    facts |= {f"the {name} of its factories": value for name, value in code_hashes(config).items()}
    environment = describe_environment(state.model, state.optimizer, world, exact_sums=state.numerics is not None)
    facts |= {name: value for name, value in environment.items() if config.parallel.pp == 1 or name not in _OF_A_STAGE}
    facts |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and not name.endswith(_OF_A_HOST)}
    return facts


def refusal(by_rank: Sequence[Mapping[str, Any]]) -> ConfigError | None:
    """Local, pure. Against what most ranks have, the lowest of them where there are as many: it is one of the few that is refused."""
    names = sorted({name for facts in by_rank for name in facts})
    differing = {name: values for name in names if len(set(values := [_shown(facts.get(name)) for facts in by_rank])) > 1}
    if not differing:
        return None
    told = []
    others: set[int] = set()
    for name, values in differing.items():
        usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
        odd = [rank for rank, value in enumerate(values) if value != usual]
        others.update(odd)
        told.append(f"rank {odd[0]} has {name} {values[odd[0]]}, rank {values.index(usual)} has {usual}")
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return ConfigError(
        "; ".join(told[:3]) + more,
        where=f"rank{'s' * (len(others) > 1)} {', '.join(map(str, sorted(others)))} of {len(by_rank)}",
        hint="give every rank the same config, environment and versions, and set launch.threads_per_rank where nodes differ",
        ranks=tuple(sorted(others)),
        fields=tuple(differing),
    )


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
