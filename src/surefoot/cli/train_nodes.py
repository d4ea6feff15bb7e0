"""`surefoot train` on one of several nodes: the first opens the run and starts its coordinator, the others join."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.cli.console import say
from surefoot.config import LoadedConfig
from surefoot.coordinate.budget import fold_history
from surefoot.coordinate.lock import RunLock
from surefoot.coordinate.members import MemberLimits
from surefoot.coordinate.silence import SilenceLimits
from surefoot.coordinate.world_sizes import WorldSize, legal_nodes, lines, num_nodes_of, ranks_per_node_of, world_sizes
from surefoot.core.clock import Clock
from surefoot.core.errors import ConfigError
from surefoot.core.holder import LOCK_NAME, parse_lock
from surefoot.core.sections import RunConfig
from surefoot.launch.agent import Agent
from surefoot.launch.aide import AideSpec
from surefoot.launch.coordinator_settings import CoordinatorSettings
from surefoot.launch.coordinator_wire import read_contact
from surefoot.launch.director import Berth
from surefoot.launch.lead import Lead
from surefoot.launch.logs import logging_aside
from surefoot.launch.node import NodeIdentity, identity_here
from surefoot.launch.node_coordinator import CoordinatorKeeper
from surefoot.launch.node_link import NodeLink
from surefoot.launch.remote_director import RemoteDirector
from surefoot.observe.drains import DrainTail
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_counters

_LOOK_S = 0.2
_CONNECT_LIMIT_S = 1.0
_ANSWER_LIMIT_S = 180.0  # a coordinator waits 90 s for nodes that do not stop, and 5 s for those that are gone

Opened = Callable[[RunLock], bool]
"""Opens the run under its lock, as on one machine; False when the run is over and there is nothing to do."""


@dataclass(frozen=True)
class NodePlan:
    """What is known of all nodes before any of them starts."""

    ranks_per_node: int
    sizes: tuple[WorldSize, ...]
    limits: MemberLimits


def plan_nodes(config: RunConfig) -> NodePlan:
    """Raises ConfigError when no number of nodes can train this model."""
    launch, train = config.launch, config.train
    least, most = num_nodes_of(launch.nodes)
    per_node = ranks_per_node_of(config.parallel, most_nodes=most, asked=launch.ranks_per_node)
    num_atoms = -(-train.global_batch_size // train.micro_batch_size)
    sizes = world_sizes(config.parallel, nodes=(least, most), ranks_per_node=per_node, num_atoms=num_atoms)
    return NodePlan(per_node, sizes, MemberLimits(least, most, per_node, legal_nodes=legal_nodes(sizes)))


def train_on_nodes(
    loaded: LoadedConfig, *, open_run: Opened, entry: str, warm: Sequence[str], clock: Clock, agent_aides: Callable[[], list[AideSpec]]
) -> int:
    """This node's part of the run, until it is over or this node leaves. The exit code."""
    config, run_dir = loaded.config, Path(loaded.config.run.dir).absolute()
    plan = plan_nodes(config)
    for line in lines(plan.sizes):
        say(line)
    lock = _first_or_join(run_dir, lease_s=config.launch.lease_s, clock=clock)
    try:
        if lock is not None and not open_run(lock):
            return 0
        contact = read_contact(run_dir) if lock is None else None
        me = identity_here(os.environ, towards=(contact.host, contact.port) if contact else None)
        job = lock.record.job if lock is not None else _job_of(run_dir)
        keeper = CoordinatorKeeper(run_dir, _settings(config, run_dir, plan=plan, me=me, job=job), clock=clock)
        if lock is not None:
            keeper.start()
        say(f"node {me.name} ({me.node}) at {me.address} " + ("opens the run and starts its coordinator" if lock else "joins the run"))
        return _supervise(config, run_dir, plan=plan, me=me, job=job, lock=lock, keeper=keeper, entry=entry, warm=warm, clock=clock,
                          aides=agent_aides())  # fmt: skip
    finally:
        if lock is not None and lock.is_ours():
            lock.release()


def _supervise(
    config: RunConfig, run_dir: Path, *, plan: NodePlan, me: NodeIdentity, job: str, lock: RunLock | None, keeper: CoordinatorKeeper,
    entry: str, warm: Sequence[str], clock: Clock, aides: list[AideSpec],
) -> int:  # fmt: skip
    launch = config.launch
    ledger = Ledger(run_dir / LEDGER_NAME, clock=clock, by="agent")
    link = NodeLink(run_dir, me, limits=launch, capacity=plan.ranks_per_node, clock=clock)
    sizes = {size.num_nodes: size for size in plan.sizes}
    director = RemoteDirector(
        link, keeper, ranks_per_node=plan.ranks_per_node, sizes=sizes, clock=clock, answer_limit_s=_ANSWER_LIMIT_S, say=say,
        drains=DrainTail(run_dir, clock=clock),
    )  # fmt: skip

    def take(berth: Berth) -> RunLock:
        reason = f"the coordinator gave rank 0 of generation {berth.generation} to node {me.name}: no rank of an older one is left"
        return RunLock.take_over(run_dir, job=job, generation=berth.generation, reason=reason, clock=clock, lease_s=launch.lease_s)

    agent = Agent(
        config,
        run_dir=run_dir,
        director=director,
        entry=entry,
        warm=warm,
        ledger=ledger,
        lock=lock,
        clock=clock,
        console=say,
        aides=aides,
        lead=Lead(lock, job=job, ledger=ledger, take=take),
    )
    with logging_aside():
        return agent.run()


def _first_or_join(run_dir: Path, *, lease_s: float, clock: Clock) -> RunLock | None:
    """The lock, for the first node of a job; None once there is a coordinator to join. While another node still opens the run (it may
    prepare data for long) this one waits."""
    told = False
    while not _answers(run_dir):
        try:
            return RunLock.acquire(run_dir, job=uuid.uuid4().hex[:12], clock=clock, lease_s=lease_s)
        except ConfigError as live:
            if not told:
                say(f"waiting for the node that opens the run: {live}")
                told = True
            time.sleep(_LOOK_S)
    return None


def _answers(run_dir: Path) -> bool:
    contact = read_contact(run_dir)
    if contact is None:
        return False
    try:
        socket.create_connection((contact.host, contact.port), timeout=_CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def _job_of(run_dir: Path) -> str:
    """The job that the lock names: all nodes of a run are of one."""
    try:
        record = parse_lock((run_dir / LOCK_NAME).read_bytes())
    except OSError:
        record = None
    return record.job if record is not None else uuid.uuid4().hex[:12]


def _settings(config: RunConfig, run_dir: Path, *, plan: NodePlan, me: NodeIdentity, job: str) -> CoordinatorSettings:
    launch = config.launch
    entries = read_ledger(run_dir / LEDGER_NAME)
    return CoordinatorSettings(
        run=config.run.name,
        job=job,
        members=plan.limits,
        generation=fold_counters(entries).generation,
        history=fold_history(entries, limits=launch),
        bind=me.address,
        advertise=me.address,
        beat_s=launch.beat_s,
        leases=SilenceLimits(launch.suspect_s, launch.dead_s),
        launch=launch,
    )
