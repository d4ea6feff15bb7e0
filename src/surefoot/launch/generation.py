"""One generation of ranks: forked, followed until it is over, and put down when it did not end by itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.coordinate.beats import BeatBoard, LeaveReason
from surefoot.coordinate.witness import Alarm
from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.core.sections import LaunchSection, ObserveSection
from surefoot.launch.crew import Crew
from surefoot.launch.director import Berth
from surefoot.launch.ending import Ending, Limits, Seen, end_of
from surefoot.launch.evidence import complaints, find_out, write_incident
from surefoot.launch.logs import Echo, open_generation, rank_paths
from surefoot.launch.lookout import Lookout
from surefoot.launch.rendezvous import Meeting, rank_specs
from surefoot.launch.slots import SlotMemory
from surefoot.launch.testimony import gather_witnesses
from surefoot.launch.trim import LogTrimmer
from surefoot.launch.warm import WarmNursery
from surefoot.launch.watch import Event, Forked, NurseryGone, Watch
from surefoot.launch.wire import RankExit, Start

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """What the agent works with over all generations."""

    run_dir: Path
    launch: LaunchSection
    observe: ObserveSection
    clock: Clock
    watch: Watch
    nursery: WarmNursery
    echo: Echo
    trimmer: LogTrimmer
    slots: SlotMemory | None = None


def fork_ranks(post: Post, berth: Berth, *, job: str) -> Crew:
    """Ask the warm nursery for the ranks of a berth, on a beats board of their own. Closes the listener of the berth."""
    generation = berth.generation
    open_generation(post.run_dir, generation, keep=post.observe.keep_generations)
    life_fd, ranks_life_fd = os.pipe2(os.O_CLOEXEC)
    board = BeatBoard.create(berth.num_local_ranks, first_rank=berth.first_rank, generation=generation, clock=post.clock)
    crew = Crew(board, life_fd=life_fd, clock=post.clock, world_size=berth.world_size)
    with berth.listener or contextlib.nullcontext(), os.fdopen(ranks_life_fd, "wb") as ranks_life:
        meeting = Meeting(
            job,
            post.run_dir,
            generation,
            berth.num_restarts,
            berth.world_size,
            berth.master_port,
            first_rank=berth.first_rank,
            num_local_ranks=berth.num_local_ranks,
            master_addr=berth.master_addr,
            node_rank=berth.node_rank,
            env=berth.env,
        )
        fds = [crew.board.fd, ranks_life.fileno(), *([berth.listener.fileno()] if berth.listener else [])]
        request = Start(generation, rank_specs(meeting))
        if post.slots is not None:
            request = replace(request, env=post.slots.rank_env(), fds=post.slots.rank_fds(first=len(fds)))
            fds += post.slots.fds
        with contextlib.suppress(OSError):  # a nursery that is gone is the next thing that the watch hears
            if post.nursery.link is not None:
                post.nursery.link.start_ranks(request, fds=fds)
    post.trimmer.follow(generation)
    if berth.leads:
        post.echo.follow(rank_paths(post.run_dir, generation, 0)[0])
    return crew


def follow(
    post: Post, crew: Crew, *, called_off: Callable[[], str | None], asked_to_leave: Callable[[], str | None] = lambda: None
) -> Ending:
    """Watch until the generation is over, by itself or by a decision, this machine's or (`called_off`) another's; nothing is killed yet.
    Ranks that are `asked_to_leave` by another machine save and leave in good order; how long they may take is for that one to say."""
    launch = post.launch
    limits = Limits(init_s=launch.init_limit_s, grace_s=launch.grace_s, end_s=launch.end_limit_s, settle_s=launch.settle_s)
    lookout = Lookout(crew, run_dir=post.run_dir, launch=launch, clock=post.clock)
    post.echo.say(lookout.worst_case())
    while True:
        for event in post.watch.events(post.nursery.link):
            _take(post, crew, event)
        if post.watch.asked and not crew.board.leave_requested:
            _ask_to_leave(post, crew)
        if not crew.board.leave_requested and (reason := asked_to_leave()) is not None:
            crew.board.request_leave(LeaveReason.OPERATOR)
            post.echo.say(f"generation {crew.generation} leaves at its next step: {reason}")
        ending = end_of(_seen(post, crew, lookout.look()), limits)
        if ending is None and (reason := called_off()) is not None:
            ending = Ending("failed", reason, what="node")
        if ending is not None:
            lookout.keep()
            return replace(ending, detected_mono_s=post.clock.monotonic_s())


def put_down(post: Post, crew: Crew, ending: Ending) -> Ending:
    """Evidence first, then SIGKILL; returns when the kernel says that no rank is left. The ending, with its evidence.

    Raises SurefootError when one does not die: starting others beside it could have two of them write.
    """
    post.echo.catch_up()
    limit_s = 0.0 if post.watch.kill_asked else post.launch.testimony_limit_s
    witnesses = gather_witnesses(crew, post.run_dir, limit_s=limit_s, clock=post.clock)
    ending = replace(ending, verdict=find_out(post.run_dir, crew, ending, witnesses, asked_to_leave=bool(post.watch.asked)))
    try:
        ending = replace(ending, evidence=write_incident(post.run_dir, crew, ending, witnesses=witnesses, clock=post.clock))
    except OSError as error:
        logger.warning("the evidence about generation %d could not be written: %s", crew.generation, error)
    if not crew.pids:
        post.nursery.drop(post.watch)  # it never said whom it forked; the kernel ends them with it
    crew.kill()
    deadline_s = post.clock.monotonic_s() + post.launch.kill_limit_s
    while crew.is_left() or (post.nursery.link is not None and len(crew.exits) < len(crew.ranks)):
        for event in post.watch.events(post.nursery.link):
            _take(post, crew, event)
        if not crew.alive() and crew.nursery_silent_s() >= post.launch.settle_s:
            post.nursery.drop(post.watch)
        if post.clock.monotonic_s() >= deadline_s:
            alive = crew.alive()
            who = f"ranks {alive} (pids {[crew.pid(rank) for rank in alive]})" if crew.pids else "the ranks of a nursery that named none"
            raise SurefootError(
                f"{who} did not die within {post.launch.kill_limit_s:g} s of SIGKILL",
                where=f"generation {crew.generation}",
                hint="they hang in the kernel (a disk or a device): see dmesg; start again when they are gone",
            )
    return ending


def _take(post: Post, crew: Crew, event: Event) -> None:
    if isinstance(event, Forked):
        crew.adopt(event.started, event.pidfds)
        ranks = ", ".join(str(pid) for pid in event.started.pids)
        nursery = post.nursery.link.pid if post.nursery.link is not None else "gone"
        post.echo.say(f"generation {crew.generation}: ranks are pid {ranks}; their nursery is {nursery}")
    elif isinstance(event, RankExit):
        crew.exits.append(event)
    elif isinstance(event, NurseryGone):
        post.nursery.drop(post.watch)


def _ask_to_leave(post: Post, crew: Crew) -> None:
    interrupted = signal.SIGINT in post.watch.asked
    crew.board.request_leave(LeaveReason.INTERRUPTED if interrupted else LeaveReason.PREEMPTED)
    logger.warning(
        "%s: the workers save and leave; after %g s, or at a second Ctrl-C, they are killed",
        post.watch.asked[0].name,
        post.launch.grace_s,
    )


def _seen(post: Post, crew: Crew, alarm: Alarm | None) -> Seen:
    return Seen(
        now_s=post.clock.monotonic_s(),
        ranks=tuple(crew.ranks),
        exits=tuple(crew.exits),
        complained=frozenset(complaints(post.run_dir, crew.generation)) if crew.exits else frozenset(),
        started_s=crew.started_s,
        all_stepping=crew.all_stepping(),
        nursery_gone=post.nursery.link is None,
        nursery_code=post.nursery.last_code,
        nursery_silent_s=crew.nursery_silent_s(),
        leave_asked_s=post.watch.asked_s,
        kill_asked=post.watch.kill_asked,
        alarm=alarm,
    )
