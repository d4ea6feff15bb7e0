"""200 random schedules of faults against the machine, its leases, and nodes that fence themselves. The same schedules find seeded bugs."""

from __future__ import annotations

import random
from dataclasses import replace

from surefoot.coordinate.members import Begin, Decision, DrainAsked, Happening, MemberLimits, Membership, Place, ReadmitAsked, WantsToLeave
from surefoot.coordinate.membership import advance
from tests.unit.coordinate.membership_job import JUDGE, SimulatedJob, SimulatedNode, lose_rank, reconnect, start_again

NAMES = ("node-0", "node-1", "node-2", "node-3")
LIMITS = MemberLimits(min_nodes=2, max_nodes=3, ranks_per_node=2, gather_s=3.0, leave_s=4.0, stop_s=4.0)
NUM_SCHEDULES = 200
FAULTS_S, QUIET_S = 25.0, 20.0
LONGEST_GAP_S = 18.0  # leave, stop, fence, gather, last call, one after the other: the longest way to the next generation


def disturb(job: SimulatedJob, rng: random.Random) -> None:
    node = job.nodes[rng.choice(NAMES)]
    kind = rng.choice(["kill", "start", "cut", "cut", "heal", "rank", "rank", "pause", "leave", "drain", "readmit"])
    if kind == "kill":
        node.alive = False
    elif kind == "start" and not node.alive:
        start_again(node, now_s=job.now_s)
    elif kind == "cut":
        node.cut = True
    elif kind == "heal" and node.cut:
        reconnect(node, now_s=job.now_s)
    elif kind == "rank":
        lose_rank(node)
    elif kind == "pause":
        job.coordinator_pause_s = job.now_s + rng.uniform(0.5, 8.0)
    elif node.alive and not node.cut and node.joined:
        said: dict[str, Happening] = {
            "leave": WantsToLeave(node.name, "preempted"),
            "drain": DrainAsked(node.name, "fan", "ops"),
            "readmit": ReadmitAsked(node.name, "mended", "ops"),
        }
        node.outbox += [said[kind]] if kind in said else []


def heal(job: SimulatedJob, node: SimulatedNode) -> None:
    if not node.alive:
        start_again(node, now_s=job.now_s)
    elif node.cut or not node.generation:
        reconnect(node, now_s=job.now_s)
    node.outbox.append(ReadmitAsked(node.name, "mended", "ops"))


def play(seed: int, job: SimulatedJob) -> SimulatedJob:
    rng = random.Random(seed)
    while job.now_s < FAULTS_S:
        if rng.random() < 0.08:
            disturb(job, rng)
            job.served_s = job.now_s
        job.tick()
        check_wake_up(job)
    for node in job.nodes.values():
        heal(job, node)
    job.served_s = job.now_s = max(job.now_s, job.coordinator_pause_s)
    while job.now_s < FAULTS_S + QUIET_S:
        job.tick()
        check_wake_up(job)
    if job.steps.state.phase not in ("running", "held", "over"):
        job.violations.append(f"nothing runs at the end: {job.steps.state.phase}")
    return job


def check_wake_up(job: SimulatedJob) -> None:
    if job.now_s - job.served_s > LONGEST_GAP_S:
        job.violations.append(f"nothing began for {LONGEST_GAP_S} s while enough nodes lived")


def new_job(**changes: float) -> SimulatedJob:
    return SimulatedJob(NAMES, limits=LIMITS, **changes)


def test_no_lost_wake_up_no_double_grant_no_unfenced_writer() -> None:
    num_generations = 0
    for seed in range(NUM_SCHEDULES):
        job = play(seed, new_job())
        assert not job.violations, (seed, job.violations[:3])
        num_generations += job.steps.state.generation
        if seed % 10 == 0:
            check_replay(job)
    assert num_generations > 3 * NUM_SCHEDULES  # the schedules do disturb


def check_replay(job: SimulatedJob) -> None:
    """The log of a job gives its state and its decisions again."""
    state = Membership(LIMITS)
    decisions: list[Decision] = []
    for at_s, happenings in job.steps.log:
        state, made = advance(state, happenings, at_s=at_s, judge=JUDGE)
        decisions += made
    assert state == job.steps.state
    assert decisions == job.steps.decisions


def num_caught(*, node_fence_s: float = 4.5, impatient: bool = False, doubled: bool = False) -> int:
    """In how many of the schedules a seeded bug is seen."""

    def double(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        twice = [replace(item, places=moved(item)) for item in decisions if isinstance(item, Begin)]
        return (*decisions, *twice) if doubled else decisions

    def moved(begin: Begin) -> tuple[Place, ...]:
        names = [place.node for place in begin.places]
        return tuple(replace(place, node=name) for place, name in zip(begin.places, [*names[1:], names[0]], strict=True))

    caught = 0
    for seed in range(40):
        job = new_job(node_fence_s=node_fence_s)
        job.impatient, job.tamper = impatient, double
        caught += bool(play(seed, job).violations)
    return caught


def test_the_schedules_find_a_node_that_does_not_fence_itself() -> None:
    assert num_caught(node_fence_s=1e9) > 0


def test_the_schedules_find_a_coordinator_that_does_not_wait_until_ranks_are_gone() -> None:
    assert num_caught(impatient=True) > 0


def test_the_schedules_find_a_doubled_grant() -> None:
    assert num_caught(doubled=True) == 40
