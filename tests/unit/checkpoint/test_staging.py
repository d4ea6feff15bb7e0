"""Staging: the same digests whenever it happens, and a snapshot that was torn is never handed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.commit import prepare, save
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.staging import SMALL_BYTES, DeviceCopies, Snapshot
from surefoot.checkpoint.state import LiveState, collect
from surefoot.checkpoint.upload import Uploader
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, SurefootError, Torn
from surefoot.core.records import Manifest
from surefoot.tensors.world import World

Draft = Callable[..., Manifest]
WIDTH = 40_000  # its weights are larger than what is copied at once
assert WIDTH * 4 * 4 > SMALL_BYTES


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot.create(rank=0, number=0)
    yield slot
    slot.close()


class Copies:
    """Stands for a stream of a device: notes what is asked of it, and can be held up or broken."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None

    def pin(self, owner: str, memory: npt.NDArray[np.uint8]) -> None:
        self.calls.append(f"pin {owner}")

    def close(self) -> None:
        self.calls.append("close")

    def follow(self) -> None:
        self.calls.append("follow")

    @contextmanager
    def using(self) -> Iterator[None]:
        self.calls.append("using")
        yield

    def finish(self) -> None:
        self.calls.append("finish")
        self.go_on.wait(60)
        if self.error is not None:
            raise self.error


def snapshot_of(
    slot: Slot,
    state: LiveState,
    draft: Manifest,
    world: World,
    *,
    overlap: bool = True,
    updates: Callable[[], int] = lambda: 0,
    copies: DeviceCopies | None = None,
) -> Snapshot:
    work = prepare(draft, state=state, extras={}, world=world, plans=SavePlans(), overlap=overlap, updates=updates)
    snapshot = Snapshot(slot, work, copies=copies)
    snapshot.begin()
    return snapshot


def publish(root: Path, slot: Slot) -> None:
    uploader = Uploader(root, [slot], limit_s=60)
    assert uploader.drain(limit_s=60) == []


def many_kinds() -> LiveState:
    """Tensors of every kind, most of them too large to be copied at once."""
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(300, 301, generator=generator)
    return LiveState(
        {
            "model.float32": large,
            "model.float64": large.double(),
            "model.bfloat16": torch.randn(400, 401, generator=generator).bfloat16(),
            "model.int8": torch.randint(-128, 127, (500, 501), dtype=torch.int8, generator=generator),
            "model.bool": torch.rand(600, 601, generator=generator) < 0.5,
            "model.complex64": torch.complex(large, large.flip(0)),
            "model.long": torch.randint(0, 1 << 62, (300, 300), generator=generator),
            "model.transposed": torch.randn(301, 300, generator=generator).t(),
            "model.conjugated": torch.complex(large, large).conj(),
            "model.part_of_a_larger": torch.randn(1000, 300, generator=generator)[200:600],
            "model.empty": torch.empty(0, 7),
            "optim.a.step": torch.tensor(3.0),
            "optim.a.small": torch.randn(5, generator=generator),
        }
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_stock_dcp_reads_what_was_staged_and_every_bit_is_there(
    tmp_path: Path, slot: Slot, make_draft: Draft, world: World, overlap: bool
) -> None:
    state = many_kinds()
    snapshot = snapshot_of(slot, state, make_draft(), world, overlap=overlap)
    assert snapshot.reads_live is overlap
    snapshot.run()
    assert snapshot.error is None
    publish(tmp_path, slot)
    loaded = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in state.tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(loaded, checkpoint_id=tmp_path / "s10-a1")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.tensors.items())
    assert verify(tmp_path / "s10-a1") == []


def test_a_snapshot_beside_the_loop_has_the_digests_of_one_that_is_waited_for(
    tmp_path: Path, slot: Slot, make_draft: Draft, world: World
) -> None:
    state = many_kinds()
    waited_for = save(tmp_path, make_draft("s1-a1"), state=state, extras={}, world=world)
    snapshot = snapshot_of(slot, state, make_draft("s2-a1"), world)
    snapshot.start()
    snapshot.wait(limit_s=60)
    snapshot.join(limit_s=60)
    publish(tmp_path, slot)
    beside = read_manifest(tmp_path / "s2-a1")
    assert beside.state_digest == waited_for.state_digest
    assert {tensor.key: tensor.digest for tensor in beside.tensors if not tensor.key.startswith("rng/")} == {
        tensor.key: tensor.digest for tensor in waited_for.tensors if not tensor.key.startswith("rng/")
    }


# --- torn ---


@pytest.fixture(params=["fused", "foreach"])
def wide(request: pytest.FixtureRequest, make_training: Callable[..., Any]) -> Any:
    training = make_training(width=WIDTH)
    fused = request.param == "fused"
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.1, fused=fused, foreach=not fused)
    training.step()
    return training


def test_a_step_while_it_is_copied_tears_the_snapshot_by_name(
    tmp_path: Path, slot: Slot, wide: Any, make_draft: Draft, world: World
) -> None:
    snapshot = snapshot_of(slot, collect(wide.model, wide.optimizer), make_draft(), world)
    wide.step(seed=1)
    snapshot.run()
    assert isinstance(snapshot.error, Torn)
    assert "changed while it was copied" in str(snapshot.error)
    assert slot.state() is SlotState.FAILED
    header = slot.header()
    assert header is not None
    assert "torn" in header.error
    publish(tmp_path, slot)
    assert list(tmp_path.iterdir()) == []


def test_without_the_step_it_commits(tmp_path: Path, slot: Slot, wide: Any, make_draft: Draft, world: World) -> None:
    snapshot = snapshot_of(slot, collect(wide.model, wide.optimizer), make_draft(), world)
    snapshot.run()
    wide.step(seed=1)
    assert snapshot.error is None
    publish(tmp_path, slot)
    assert verify(tmp_path / "s10-a1") == []


def test_a_value_that_changes_all_the_time_tears_it(slot: Slot, make_draft: Draft, world: World) -> None:
    """A change in the middle of a part, far from its ends, and between hashing and copying: where the other thread gets to run there."""
    tensor = torch.zeros(6_000_000)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            tensor[1_000_001:1_000_003] += 1

    thread = threading.Thread(target=change)
    thread.start()
    error = None
    for _ in range(100):
        snapshot = snapshot_of(slot, LiveState({"model.a": tensor}), make_draft(), world)
        snapshot.run()
        if (error := snapshot.error) is not None:
            break
        slot.reset()
    over.set()
    thread.join()
    assert isinstance(error, Torn)
    assert error.values["tensor"] == "model.a"


def test_an_update_that_changed_no_bit_is_an_update(slot: Slot, make_draft: Draft, world: World) -> None:
    counts = iter([5, 6])
    snapshot = snapshot_of(slot, LiveState({"model.a": torch.zeros(100_000)}), make_draft(), world, updates=lambda: next(counts))
    snapshot.run()
    assert isinstance(snapshot.error, Torn)
    assert "the count of updates" in str(snapshot.error)


def test_a_counter_of_the_optimizer_gives_a_step_away(slot: Slot, make_draft: Draft, world: World) -> None:
    step = torch.tensor(1.0)
    snapshot = snapshot_of(slot, LiveState({"model.a": torch.zeros(100_000), "optim.a.step": step}), make_draft(), world)
    step += 1
    snapshot.run()
    assert isinstance(snapshot.error, Torn)
    assert snapshot.error.values["tensor"] == "optim.a.step"


def test_buffers_may_change_and_are_saved_as_they_were(tmp_path: Path, slot: Slot, make_draft: Draft, world: World) -> None:
    seen = torch.zeros(100_000)
    state = LiveState({"model.a": torch.zeros(100_000), "model.seen": seen}, buffers={"model.seen"})
    snapshot = snapshot_of(slot, state, make_draft(), world)
    seen += 1
    snapshot.run()
    publish(tmp_path, slot)
    tensors = {tensor.key: tensor.digest for tensor in read_manifest(tmp_path / "s10-a1").tensors}
    assert tensors["model.seen"] == tensors["model.a"] == "0" * 16


def test_what_was_copied_at_once_is_nobodys_to_wait_for(slot: Slot, wide: Any, make_draft: Draft, world: World) -> None:
    snapshot = snapshot_of(slot, collect(wide.model, wide.optimizer), make_draft(), world, overlap=False)
    assert not snapshot.reads_live
    wide.step(seed=1)
    snapshot.run()
    assert snapshot.error is None


def test_the_next_save_works_after_a_torn_one(tmp_path: Path, slot: Slot, wide: Any, make_draft: Draft, world: World) -> None:
    torn = snapshot_of(slot, collect(wide.model, wide.optimizer), make_draft("s1-a1"), world)
    wide.step(seed=1)
    torn.run()
    snapshot_of(slot, collect(wide.model, wide.optimizer), make_draft("s2-a1"), world).run()
    publish(tmp_path, slot)
    assert verify(tmp_path / "s2-a1") == []


# --- off a device ---


def on_a_device() -> LiveState:
    """Its bytes cannot be had without a copy, as those of a tensor on a GPU."""
    lazy = torch._neg_view(torch.randn(300, 300, generator=torch.Generator().manual_seed(3)))
    assert lazy.is_neg()
    return LiveState({"model.a": lazy, "model.b": torch.zeros(100_000)})


def test_copies_follow_the_loop_and_are_waited_for(tmp_path: Path, slot: Slot, make_draft: Draft, world: World) -> None:
    state, copies = on_a_device(), Copies()
    snapshot = snapshot_of(slot, state, make_draft(), world, copies=copies)
    assert copies.calls == ["pin slot 0 of rank 0", "follow"]
    assert snapshot.reads_live
    snapshot.run()
    assert copies.calls[2:] == ["using", "finish"]
    publish(tmp_path, slot)
    assert verify(tmp_path / "s10-a1") == []
    loaded = {key: torch.empty(tensor.shape) for key, tensor in state.tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(loaded, checkpoint_id=tmp_path / "s10-a1")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.tensors.items())


def test_a_value_on_a_device_that_changes_while_it_is_copied_tears_it(slot: Slot, make_draft: Draft, world: World) -> None:
    base, over = torch.zeros(3_000_000), threading.Event()

    def change() -> None:
        while not over.is_set():
            base[1_000_001:1_000_003] += 1

    snapshot = snapshot_of(slot, LiveState({"model.a": torch._neg_view(base)}), make_draft(), world, copies=Copies())
    thread = threading.Thread(target=change)
    thread.start()
    snapshot.run()
    over.set()
    thread.join()
    assert isinstance(snapshot.error, Torn)
    assert snapshot.error.values["tensor"] == "model.a"


def test_a_counter_on_a_device_gives_a_step_away(slot: Slot, make_draft: Draft, world: World) -> None:
    """As those of a fused optimizer, which nothing else betrays when it steps before the first digest is taken."""
    base = torch.ones(1)
    state = LiveState({**on_a_device().tensors, "optim.a.step": torch._neg_view(base)})
    snapshot = snapshot_of(slot, state, make_draft(), world, copies=Copies())
    base += 1
    snapshot.run()
    assert isinstance(snapshot.error, Torn)
    assert snapshot.error.values["tensor"] == "optim.a.step"


def test_an_error_of_the_device_is_told_and_nothing_is_handed_on(slot: Slot, make_draft: Draft, world: World) -> None:
    copies = Copies()
    copies.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    snapshot = snapshot_of(slot, on_a_device(), make_draft(), world, copies=copies)
    snapshot.start()
    snapshot.join(limit_s=60)
    assert isinstance(snapshot.error, CheckpointError)
    assert "illegal memory access" in str(snapshot.error)
    assert slot.state() is SlotState.FAILED


def test_a_copy_that_does_not_return_is_an_error_within_the_limit(slot: Slot, make_draft: Draft, world: World) -> None:
    copies = Copies()
    copies.go_on.clear()
    snapshot = snapshot_of(slot, on_a_device(), make_draft(), world, copies=copies)
    snapshot.start()
    try:
        with pytest.raises(SurefootError, match="hangs"):
            snapshot.wait(limit_s=0.05)
    finally:
        copies.go_on.set()
    snapshot.join(limit_s=60)
    assert "longer than it may" in str(snapshot.error)
    assert slot.state() is SlotState.FAILED


def test_a_model_on_the_meta_device_cannot_be_staged_and_the_slot_is_free_again(slot: Slot, make_draft: Draft, world: World) -> None:
    meta = nn.Linear(4, 4, device="meta").weight.detach()
    with pytest.raises(NotImplementedError):
        snapshot_of(slot, LiveState({"model.a": meta}), make_draft(), world)
    assert slot.state() is SlotState.FAILED
