"""Checkpoints of several processes: any topology to any, one verdict for all ranks, nothing left of a failed save."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.audit import audit
from surefoot.checkpoint.commit import save
from surefoot.checkpoint.manifest import read_manifest, rng_key
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.sources import SlotSource
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, PeerLost, SurefootError
from surefoot.core.records import Manifest
from surefoot.tensors.digest import box_digest, combine, local_box, tensor_digest
from surefoot.tensors.world import World, join_world, single_world

EXTRAS = {"cursor": {"next_sample": 7}}
RunRanks = Callable[..., list[Any]]


def _world(world_size: int, *, limit_s: float = 30.0) -> World:
    return join_world(device=torch.device("cpu"), collective_limit_s=limit_s) if world_size > 1 else single_world()


def _draft(name: str = "s10-a1") -> Manifest:
    return Manifest(
        format_version=1, id=name, run="test", step=10, attempt=1, generation=1, parent=None, time_utc="", loss=1.0, tokens=1,
        state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1, ledger_hash="",
        cursor={}, files=(), tensors=(),
    )  # fmt: skip


class _Net(nn.Module):
    """Dims that 2, 3 and 4 ranks do not divide, one smaller than the number of ranks, a buffer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3, bias=False)
        self.third = nn.Linear(13, 3, bias=False)
        self.third.weight = self.second.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def _training(layout: str, *, world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same whole model from the same seed whatever the layout."""
    torch.manual_seed(seed)
    model: nn.Module = _Net()
    if layout == "ddp" and world_size > 1:
        model = DistributedDataParallel(model)
    elif layout == "fsdp" and world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model.first, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for parameter in model.parameters():
            _set_gradient(parameter, torch.cos(torch.arange(parameter.numel(), dtype=torch.float32) + step).view(parameter.shape))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _set_gradient(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    sharded = isinstance(parameter, DTensor)
    parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements) if sharded else whole  # type: ignore[attr-defined]


def _whole_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Collective. The bytes of every whole tensor, gathered."""
    tensors = collect(model, optimizer).tensors
    whole = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors.items()}
    return {key: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in whole.items()}


def save_as(*, rank: int, world_size: int, root: Path, layout: str) -> tuple[str, dict[str, bytes], list[float]]:
    world = _world(world_size)
    model, optimizer = _training(layout, world_size=world_size, seed=0)
    torch.manual_seed(1000 + rank)
    manifest = save(root, _draft(), state=collect(model, optimizer), extras=EXTRAS, world=world)
    drawn = torch.randn(2).tolist()
    return manifest.state_digest, _whole_bits(model, optimizer), drawn


def load_as(*, rank: int, world_size: int, root: Path, layout: str) -> tuple[dict[str, bytes], list[float], bool, tuple[str, ...]]:
    world = _world(world_size)
    model, optimizer = _training(layout, world_size=world_size, seed=9)
    torch.manual_seed(2000 + rank)
    expected = read_manifest(root / "s10-a1").state_digest
    loaded = load(root / "s10-a1", state=collect(model, optimizer, for_load=True), world=world, expected_state_digest=expected)
    drawn = torch.randn(2).tolist()
    assert loaded.extras == EXTRAS
    return _whole_bits(model, optimizer), drawn, loaded.rng_restored, loaded.notes


Layout = tuple[str, int]
LAYOUTS: list[Layout] = [("ddp", 1), ("ddp", 2), ("ddp", 3), ("ddp", 4), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]
# Each number of ranks to each number of ranks, and each layout to each layout, in as few pairs as that takes.
PAIRS: dict[Layout, list[Layout]] = {
    ("ddp", 1): [("ddp", 1), ("fsdp", 2), ("ddp", 3), ("hsdp", 4)],
    ("fsdp", 2): [("ddp", 1), ("ddp", 3)],
    ("ddp", 2): [("fsdp", 2), ("hsdp", 4)],
    ("fsdp", 3): [("ddp", 1), ("fsdp", 3), ("hsdp", 4)],
    ("ddp", 3): [("ddp", 2)],
    ("hsdp", 4): [("ddp", 1), ("ddp", 2), ("fsdp", 3), ("hsdp", 4)],
    ("fsdp", 4): [("ddp", 4)],
}


def test_the_pairs_cover_all_numbers_of_ranks_and_all_layouts() -> None:
    pairs = [(source, target) for source, targets in PAIRS.items() for target in targets]
    assert {(source[1], target[1]) for source, target in pairs} == {(saved, loaded) for saved in range(1, 5) for loaded in range(1, 5)}
    kinds = ("ddp", "fsdp", "hsdp")
    assert {(source[0], target[0]) for source, target in pairs} == {(saved, loaded) for saved in kinds for loaded in kinds}


@pytest.mark.parametrize("source", PAIRS, ids=str)
def test_a_checkpoint_of_any_layout_loads_bitwise_on_every_other(run_ranks: RunRanks, tmp_path: Path, source: Layout) -> None:
    """Weights, moments and counters, by digest and by the bits of the gathered tensors."""
    _reshard(run_ranks, tmp_path, source, PAIRS[source])


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_loads_bitwise_on_every_other(run_ranks: RunRanks, tmp_path: Path, source: Layout) -> None:
    _reshard(run_ranks, tmp_path, source, LAYOUTS)


def _reshard(run_ranks: RunRanks, root: Path, source: Layout, targets: list[Layout]) -> None:
    layout, num_ranks = source
    saved = run_ranks(save_as, num_ranks, root=root, layout=layout)
    digest, bits, _ = saved[0]
    assert all(other[:2] == (digest, bits) for other in saved)
    assert any(key.endswith(".exp_avg_sq") for key in bits)
    assert verify(root / "s10-a1") == []
    for other, num_other in targets:
        for loaded, *_ in run_ranks(load_as, num_other, root=root, layout=other):
            assert loaded == bits, (source, other, num_other)


def test_the_digest_does_not_know_the_layout(run_ranks: RunRanks, tmp_path: Path) -> None:
    digests = {
        run_ranks(save_as, num_ranks, root=tmp_path / f"{layout}{num_ranks}", layout=layout)[0][0]
        for layout, num_ranks in [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)]
    }
    assert len(digests) == 1


# --- memory of the ranks, and stock folders of several ranks ---


def load_from_slots(*, rank: int, world_size: int, root: Path, layout: str, flip: bool) -> tuple[dict[str, str], list[str], bool]:
    """Save, and load into another model with the own slot as first source; rank 1's is damaged in between if `flip`."""
    world = _world(world_size)
    model, optimizer = _training(layout, world_size=world_size, seed=0)
    slot = Slot.create(rank=rank, number=0)
    save(root, _draft(), state=collect(model, optimizer), extras=EXTRAS, world=world, slot=slot)
    if flip and rank == 1:
        slot.image()[4000] ^= 1
    fresh, fresh_optimizer = _training(layout, world_size=world_size, seed=9)
    state = collect(fresh, fresh_optimizer, for_load=True)
    loaded = load(root / "s10-a1", state=state, world=world, sources=[SlotSource([slot], checkpoint="s10-a1")])
    same = _whole_bits(fresh, fresh_optimizer) == _whole_bits(model, optimizer)
    slot.close()
    return dict(loaded.sources), [problem.file for problem in loaded.problems], same


def test_each_rank_loads_from_its_own_memory(run_ranks: RunRanks, tmp_path: Path) -> None:
    for sources, problems, same in run_ranks(load_from_slots, 2, root=tmp_path, layout="fsdp", flip=False):
        assert set(sources.values()) <= {"memory", "disk,memory"}  # whole tensors are stored once: the other rank reads them from the disk
        assert (problems, same) == ([], True)


def test_a_rank_with_damaged_memory_reads_the_disk_and_says_so(run_ranks: RunRanks, tmp_path: Path) -> None:
    told = run_ranks(load_from_slots, 2, root=tmp_path, layout="fsdp", flip=True)
    assert all(sources["__1_0.distcp"] == "disk" and same for sources, _, same in told)
    assert told[1][1] == ["__1_0.distcp"]


def test_replicas_take_from_the_disk_what_the_other_one_stored(run_ranks: RunRanks, tmp_path: Path) -> None:
    for sources, problems, same in run_ranks(load_from_slots, 2, root=tmp_path, layout="ddp", flip=False):
        assert set(sources.values()) <= {"memory", "disk,memory"}
        assert "disk,memory" in sources.values()
        assert (problems, same) == ([], True)


def save_stock(*, rank: int, world_size: int, root: Path) -> bytes:
    """The bytes of this rank's part of one weight."""
    model, _ = _training("fsdp", world_size=world_size, seed=0)
    own: Any = model.state_dict()["first.weight"]
    dcp_save(model.state_dict(), storage_writer=FileSystemWriter(root / "stock", thread_count=2))
    return bytes(own.to_local().numpy().tobytes())


def test_stock_folders_of_several_ranks_and_threads_are_audited(run_ranks: RunRanks, tmp_path: Path) -> None:
    own = run_ranks(save_stock, 3, root=tmp_path)
    whole = audit(tmp_path / "stock")
    assert whole.clean, whole
    assert whole.num_files > 4
    (file,) = [file for file in (tmp_path / "stock").glob("__1_*.distcp") if own[1] in file.read_bytes()]
    raw = bytearray(file.read_bytes())
    raw[raw.index(own[1]) + 9] ^= 16
    file.write_bytes(raw)
    found = [(problem.kind, problem.file, problem.tensor) for problem in audit(tmp_path / "stock").problems]
    assert found == [("wrong-checksum", file.name, "first.weight")]


def test_every_rank_has_its_own_random_stream_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    drawn_at_save = [drawn for *_, drawn in run_ranks(save_as, 2, root=tmp_path, layout="fsdp")]
    assert {tensor.key for tensor in read_manifest(tmp_path / "s10-a1").tensors if tensor.key.startswith("rng/")} == {
        rng_key(0),
        rng_key(1),
    }
    same = run_ranks(load_as, 2, root=tmp_path, layout="fsdp")
    assert [drawn for _, drawn, *_ in same] == drawn_at_save
    assert all(notes == () for *_, notes in same)
    fewer = run_ranks(load_as, 1, root=tmp_path, layout="ddp")
    assert [drawn for _, drawn, *_ in fewer] == drawn_at_save[:1]
    assert "random states of ranks 1 to 1 are not used" in fewer[0][-1][0]
    more = run_ranks(load_as, 3, root=tmp_path, layout="ddp")
    assert [drawn for _, drawn, *_ in more][:2] == drawn_at_save
    assert [restored for *_, restored, _ in more] == [True, True, False]
    torch.manual_seed(2002)
    assert more[2][1] == torch.randn(2).tolist()
    assert "ranks 2 to 2 had no stored random state and keep their keyed one" in more[0][-1][0]


def digest_parts(*, rank: int, world_size: int) -> list[tuple[int, int]]:
    """(whole, combined over one copy of each box) for tensors on a 1-d and a 2-d mesh."""
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    results = []
    layouts: list[tuple[Any, list[Placement]]] = [
        (flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]), (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Replicate()]), (square, [Replicate(), Shard(0)]), (square, [Shard(0), Shard(0)]),
    ]  # fmt: skip
    for mesh, placements in layouts:
        part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        gathered: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(gathered, (*local_box(part), tensor_digest(part)))
        one_copy = {(sizes, offsets): digest for sizes, offsets, digest in gathered}
        results.append((tensor_digest(whole), combine(one_copy.values())))
    return results


def test_digests_of_dtensors_add_up_to_the_whole(run_ranks: RunRanks) -> None:
    for results in run_ranks(digest_parts, 4):
        assert all(whole == combined for whole, combined in results)
    assert box_digest(torch.ones(2), global_shape=(4,), offsets=(2,)) != 0


# --- one verdict for all ranks ---


def _raised(function: Callable[[], object]) -> SurefootError:
    try:
        function()
    except SurefootError as error:
        return error
    raise AssertionError("nothing was raised")


def load_damaged(*, rank: int, world_size: int, root: Path) -> tuple[str, str, bool]:
    world = _world(world_size)
    model, optimizer = _training("fsdp", world_size=world_size, seed=9)
    live = collect(model, optimizer, for_load=True)
    before = {key: tensor_digest(tensor) for key, tensor in live.tensors.items()}
    error = _raised(lambda: load(root / "s10-a1", state=live, world=world))
    return type(error).__name__, str(error), before == {key: tensor_digest(tensor) for key, tensor in live.tensors.items()}


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json", "extras.json"])
def test_a_flipped_bit_is_refused_by_all_ranks_alike(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    run_ranks(save_as, 2, root=tmp_path, layout="fsdp")
    file = tmp_path / "s10-a1" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    for kind, text, untouched in run_ranks(load_damaged, 2, root=tmp_path):
        assert kind == "Corrupt"
        assert name in text
        assert untouched


def test_swapped_shards_are_refused_and_both_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(save_as, 2, root=tmp_path, layout="fsdp")
    folder = tmp_path / "s10-a1"
    (folder / "__0_0.distcp").rename(folder / "kept")
    (folder / "__1_0.distcp").rename(folder / "__0_0.distcp")
    (folder / "kept").rename(folder / "__1_0.distcp")
    assert {problem.file for problem in verify(folder)} >= {"__0_0.distcp", "__1_0.distcp"}
    assert {kind for kind, *_ in run_ranks(load_damaged, 2, root=tmp_path)} == {"Corrupt"}


def save_with_a_failing_rank(*, rank: int, world_size: int, root: Path) -> tuple[str, str]:
    world = _world(world_size)
    model, optimizer = _training("fsdp", world_size=world_size, seed=0)
    slot = Slot.create(rank=rank, number=0)
    slot.reserve(1 << 20)  # the limit counts for memory files too
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    error = _raised(lambda: save(root, _draft(), state=collect(model, optimizer), extras=EXTRAS, world=world, slot=slot))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(root, _draft("s10-a1-r1"), state=collect(model, optimizer), extras=EXTRAS, world=world, slot=slot)
    return type(error).__name__, str(error)


def test_a_rank_that_cannot_write_fails_the_save_for_all_and_the_next_try_works(run_ranks: RunRanks, tmp_path: Path) -> None:
    for kind, text in run_ranks(save_with_a_failing_rank, 2, root=tmp_path):
        assert kind == CheckpointError.__name__
        assert "File too large" in text
        assert "rank 1" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["s10-a1-r1"]
    assert verify(tmp_path / "s10-a1-r1") == []


def save_with_another_model(*, rank: int, world_size: int, root: Path) -> str:
    """Rank 1 holds a tensor of another shape under the same name."""
    world = _world(world_size)
    model = nn.Linear(3, 2 + rank)
    error = _raised(lambda: save(root, _draft(), state=collect(model, torch.optim.SGD(model.parameters())), extras={}, world=world))
    return str(error)


def test_ranks_that_do_not_hold_the_same_model_cannot_save(run_ranks: RunRanks, tmp_path: Path) -> None:
    for text in run_ranks(save_with_another_model, 2, root=tmp_path):
        assert "model.weight: float32 (2, 3) on rank 0, float32 (3, 3) on rank 1" in text
    assert list(tmp_path.iterdir()) == []


def save_after_a_peer_died(*, rank: int, world_size: int, root: Path) -> str:
    world = _world(world_size, limit_s=5.0)
    model, optimizer = _training("ddp", world_size=world_size, seed=0)
    save(root, _draft("s1-a1"), state=collect(model, optimizer), extras=EXTRAS, world=world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = _raised(lambda: save(root, _draft("s2-a1"), state=collect(model, optimizer), extras=EXTRAS, world=world))
    (root / "outcome").write_text(type(error).__name__)
    return ""


def test_a_dead_peer_ends_the_save_soon_and_leaves_the_one_before(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died: signal 9"):
        run_ranks(save_after_a_peer_died, 2, timeout_s=40, root=tmp_path)
    assert (tmp_path / "outcome").read_text() == PeerLost.__name__
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["outcome", "s1-a1"]
    assert verify(tmp_path / "s1-a1") == []
