"""The audit: bits that several ranks should have alike are compared, and whoever has others is named.

Two questions at each audit. Is what is replicated (weights, moments, optimizer steps) the same on all ranks that hold it? Do all ranks get
the same gradient of one atom? The first sees what went wrong at rest or in the update, where there are replicas; the second sees a rank
that computes wrongly, under full sharding too, where every rank would have the same wrong sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.checkpoint.state import collect
from surefoot.core.events import Event
from surefoot.core.hashing import key64
from surefoot.core.ports import RecomputePort
from surefoot.core.records import Asks, Finding, LedgerEntry
from surefoot.core.sections import ParallelSection, RunConfig
from surefoot.guard.recording import Recorder
from surefoot.guard.state import TrainState
from surefoot.guard.trajectory import Facts, repeats_bits
from surefoot.monitor.audit import Opinion, Ruling, Shared, rule, shared_parts
from surefoot.tensors.digest import local_box, tensor_digest
from surefoot.tensors.world import World, broadcast_json, gather_json, gather_words, lead

REPLICA_RULE = "replica_differs"
RECOMPUTE_RULE = "recompute_differs"
AUDIT_RULES = frozenset({REPLICA_RULE, RECOMPUTE_RULE})
UNSTEADY_RULE = "bits_do_not_repeat"
"""What differs everywhere: no way back helps, and no device is accused."""

CLOSER = 10
"""After a finding audits are so many times more frequent, for so many intervals: a rank that was wrong once is likely to be again."""

_MASK = (1 << 64) - 1
_SIGN = 1 << 63


class Audit:
    """One per guard, the same on all ranks. Reads the state and changes none of it but the step of the last audit that found nothing."""

    def __init__(
        self, state: TrainState, *, config: RunConfig, world: World, recorder: Recorder | None, recompute: RecomputePort | None
    ) -> None:
        self._state = state
        self._world = world
        self._recorder = recorder
        self._recompute = recompute
        self._interval_steps = config.monitor.audit_interval_steps
        self._places = data_places(config.parallel, world_size=world.size)
        self._shared: tuple[Shared, ...] | None = None
        self._of_rank: list[list[int]] = []
        self._closely_until = 0
        self._is_asked = False

    def get_ready(self) -> None:
        """Collective over the save group. After a restore: whether the run is still close behind a finding."""
        recorder = self._recorder
        if recorder is None or self._world.size == 1 or not self._interval_steps:
            return
        told = lead(self._world, lambda: watched_until(recorder.entries(), interval_steps=self._interval_steps))
        self._closely_until = int(broadcast_json(self._world, told))

    def ask(self) -> None:
        """Local; on all ranks, between the same two steps. The next step is audited whatever its number: something else looks wrong."""
        self._is_asked = True

    def due(self, step: int) -> bool:
        """Local, the same on all ranks. Whether this finished step is audited."""
        if self._world.size == 1 or not self._interval_steps:
            return False
        is_close = step <= self._closely_until
        every = max(1, self._interval_steps // CLOSER) if is_close else self._interval_steps
        return self._is_asked or step % every == 0

    def run(self, step: int) -> tuple[Finding, ...]:
        """Collective over the loop group, and over the save group where something differs. After the update, gradients cleared.

        Other weights give other gradients: where replicas differ, no gradient is computed again.
        """
        self._is_asked = False
        name, ruling = REPLICA_RULE, self.compare_replicas()
        if ruling.verdict == "agreed":
            name, ruling = RECOMPUTE_RULE, self.compare_gradients()
        if ruling.verdict == "agreed":
            self._state.last_clean_audit = step
            return ()
        if not ruling.has_witness:
            return (self._unsteady(ruling, step=step),)
        self._closely_until = max(self._closely_until, step + CLOSER * self._interval_steps)
        return (self._finding(name, ruling, step=step),)

    def compare_replicas(self) -> Ruling:
        """Collective over the loop group, and over the save group where something differs, or at the first time.

        A word for each set of ranks that hold the same tensors; only where one differs are the tensors looked at one by one.
        """
        live = collect(self._state.model, self._state.optimizer)
        held = {key: tensor for key, tensor in live.tensors.items() if key not in live.rank_0_only}
        shared = self._agree_shared(held)
        if not shared:
            return Ruling("agreed")
        mine = [shared[index] for index in self._of_rank[self._world.rank]]
        digests = {key: tensor_digest(held[key]) if key in held else 0 for part in mine for key in part.keys}
        words = self._exchange([_word_of(part.keys, digests) for part in mine], num_words=max(map(len, self._of_rank)))
        said: list[set[int]] = [set() for _ in shared]
        for indices, row in zip(self._of_rank, words, strict=True):
            for index, word in zip(indices, row, strict=False):
                said[index].add(word)
        differing = [part for part, different in zip(shared, said, strict=True) if len(different) > 1]
        if not differing:
            return Ruling("agreed")
        told = gather_json(self._world, {key: digests[key] for part in differing if self._world.rank in part.ranks for key in part.keys})
        return rule(
            [
                Opinion(_named(key, part, world_size=self._world.size), rank, told[rank][key])
                for part in differing
                for key in part.keys
                for rank in part.ranks
            ]
        )

    def _agree_shared(self, held: Mapping[str, torch.Tensor]) -> tuple[Shared, ...]:
        """Collective over the save group at the first time. What is replicated stays so while the run has this layout."""
        if self._shared is None:
            told = gather_json(self._world, {key: local_box(tensor) for key, tensor in held.items()})
            self._shared = shared_parts([{key: (tuple(box[0]), tuple(box[1])) for key, box in rank.items()} for rank in told])
            ranks = range(self._world.size)
            self._of_rank = [[index for index, part in enumerate(self._shared) if rank in part.ranks] for rank in ranks]
        return self._shared

    def compare_gradients(self) -> Ruling:
        """Collective over the loop group. All data ranks compute one atom of the last step, whose it is changes: one micro-step for each.

        Not where kernels may give other bits each time. Where no majority says who is wrong, as between two, they do it once more: one that
        contradicts itself is known by that.
        """
        num_data_ranks = len({place.data_rank for place in self._places})
        if self._recompute is None or num_data_ranks < 2 or not bits_are_promised(self._world):
            return Ruling("agreed")
        owner = key64("audited atom", self._state.step) % num_data_ranks
        opinions = self._opinions(self._recompute, owner=owner, num_data_ranks=num_data_ranks)
        ruling = rule(opinions)
        if ruling.verdict == "inconclusive":
            ruling = rule([*opinions, *self._opinions(self._recompute, owner=owner, num_data_ranks=num_data_ranks)])
        ranks = tuple(place.rank for place in self._places if place.data_rank in ruling.ranks)
        return replace(ruling, ranks=ranks, reason=self._in_ranks(ruling))

    def _opinions(self, recompute: RecomputePort, *, owner: int, num_data_ranks: int) -> list[Opinion]:
        """Of data ranks. What ranks that share an atom made of it counts as one."""
        shift = (owner - self._places[self._world.rank].data_rank) % num_data_ranks
        words = self._exchange([recompute.gradient_digest(shift=shift)], num_words=1)
        made: dict[int, list[int]] = {}
        for place, (word,) in zip(self._places, words, strict=True):
            made.setdefault(place.data_rank, []).append(word)
        return [Opinion(f"the first atom of data rank {owner}", data_rank, key64(parts)) for data_rank, parts in made.items()]

    def _in_ranks(self, ruling: Ruling) -> str:
        shares = len(self._places) > len({place.data_rank for place in self._places})
        return f"{ruling.reason} (data ranks: {len(self._places)} ranks share the work of each atom)" if shares else ruling.reason

    def _exchange(self, words: Sequence[int], *, num_words: int) -> list[list[int]]:
        """Collective over the loop group. The words of every rank, filled up to as many as the rank with the most has."""
        signed = [word - (1 << 64) if word & _SIGN else word for word in words]
        words_W = torch.tensor([*signed, *[0] * (num_words - len(signed))], dtype=torch.int64, device=self._world.device)
        return [[int(word) & _MASK for word in row] for row in gather_words(self._world, words_W).tolist()]

    def _unsteady(self, ruling: Ruling, *, step: int) -> Finding:
        evidence = {
            "ranks": [],
            "verdict": ruling.verdict,
            "tensors": sorted(ruling.about),
            "last_clean_step": self._state.last_clean_audit,
        }
        return Finding(UNSTEADY_RULE, Asks.ALERT, ruling.reason, step, evidence)

    def _finding(self, name: str, ruling: Ruling, *, step: int) -> Finding:
        clean = self._state.last_clean_audit
        evidence = {
            "ranks": list(ruling.ranks),
            "verdict": ruling.verdict,
            "tensors": sorted({about.partition(" (of ranks ")[0] for about in ruling.about}),
            "last_clean_step": clean,
        }
        return Finding(
            name, Asks.ROLL_BACK, f"{ruling.reason}; the audit of step {clean} was the last clean one", min(clean + 1, step), evidence
        )


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Which data rank this rank computes for. Those that differ in tp, cp or pp alone share its atoms."""

    rank: int
    data_rank: int


def data_places(parallel: ParallelSection, *, world_size: int) -> tuple[DataPlace, ...]:
    """Local, pure. By the order of the axes (pp, dp_replicate, dp_shard, cp, tp); without a layout each rank has samples of its own."""
    if parallel.num_ranks != world_size:
        return tuple(DataPlace(rank, rank) for rank in range(world_size))
    inner, num_data_ranks = parallel.cp * parallel.tp, parallel.dp_replicate * parallel.dp_shard
    return tuple(DataPlace(rank, rank // inner % num_data_ranks) for rank in range(world_size))


def bits_are_promised(world: World) -> bool:
    """Local, the same on all ranks, whose settings are compared at the start. Whether one calculation gives the same bits each time."""
    surroundings = {"device": world.device.type, "deterministic": torch.are_deterministic_algorithms_enabled()}
    return repeats_bits(Facts(surroundings, {}))


def watched_until(entries: Sequence[LedgerEntry], *, interval_steps: int) -> int:
    """Local, pure. The last step of close audits: `CLOSER` intervals after the newest finding of one, wherever the run went back to."""
    found = [entry.step for entry in entries if entry.event == Event.ANOMALY_FOUND and entry.fields.get("rule", entry.rule) in AUDIT_RULES]
    return max(found) + CLOSER * interval_steps if found else 0


def _word_of(keys: Sequence[str], digests: Mapping[str, int]) -> int:
    """Odd weights: a change of one tensor changes the sum, and tensors that changed places do too."""
    return sum(digests[key] * (key64("audit", key) | 1) for key in keys) & _MASK


def _named(key: str, part: Shared, *, world_size: int) -> str:
    """Under sharding other ranks hold other parts of the same tensor."""
    return key if len(part.ranks) == world_size else f"{key} (of ranks {', '.join(map(str, part.ranks))})"
