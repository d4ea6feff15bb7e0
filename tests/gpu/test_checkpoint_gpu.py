"""Checkpoints of device tensors: the digest of the host, and the same bits back on either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.checkpoint.commit import prepare, save
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.staging import CudaCopies, Snapshot
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.upload import Uploader
from surefoot.checkpoint.verify import verify
from surefoot.core.records import Manifest
from surefoot.tensors.world import single_world

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")


def draft(name: str) -> Manifest:
    return Manifest(
        format_version=1, id=name, run="gpu", step=10, attempt=1, generation=1, parent=None, time_utc="", loss=None, tokens=0,
        state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1, ledger_hash="",
        cursor={}, files=(), tensors=(),
    )  # fmt: skip


class Training:
    """A model whose tensors are larger than one block of the digest, under the fused AdamW of a run."""

    def __init__(self, place: torch.device, *, num_steps: int = 0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.world = single_world(place)
        self.model = nn.Sequential(nn.Embedding(500, 300), nn.LayerNorm(300), nn.Linear(300, 401)).to(place)
        self.model[1].to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        for _ in range(num_steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, dtype=torch.float32).to(device=place, dtype=parameter.dtype)
            self.optimizer.step()

    def bits(self) -> dict[str, torch.Tensor]:
        return {key: tensor.cpu().clone() for key, tensor in collect(self.model, self.optimizer).tensors.items()}

    def save(self, root: Path) -> Manifest:
        return save(root, draft("s10-a1"), state=collect(self.model, self.optimizer), extras={"cursor": {}}, world=self.world)

    def load(self, folder: Path) -> None:
        load(folder, state=collect(self.model, self.optimizer, for_load=True), world=self.world)


def test_a_checkpoint_from_the_device_verifies_and_loads_on_both(device: torch.device, tmp_path: Path) -> None:
    training = Training(device, num_steps=3)
    saved = training.save(tmp_path)
    assert verify(tmp_path / "s10-a1") == []
    for name, place in (("device", device), ("host", CPU)):
        other = Training(place, seed=1)
        other.load(tmp_path / "s10-a1")
        assert all(torch.equal(tensor, training.bits()[key]) for key, tensor in other.bits().items())
        assert other.save(tmp_path / name).state_digest == saved.state_digest


def test_a_checkpoint_from_the_host_loads_on_the_device(device: torch.device, tmp_path: Path) -> None:
    training = Training(CPU, num_steps=3)
    saved = training.save(tmp_path)
    other = Training(device, seed=1)
    other.load(tmp_path / "s10-a1")
    assert other.save(tmp_path / "again").state_digest == saved.state_digest


def test_the_random_stream_of_the_device_goes_on_where_it_was(device: torch.device, tmp_path: Path) -> None:
    training = Training(device, num_steps=1)
    training.save(tmp_path)
    expected = torch.rand(8, device=device)
    torch.cuda.manual_seed(99)
    training.load(tmp_path / "s10-a1")
    assert torch.equal(torch.rand(8, device=device), expected)


def test_a_snapshot_taken_beside_the_loop_has_the_bits_at_its_beginning(device: torch.device, tmp_path: Path) -> None:
    """Work is still enqueued when the save begins, and the loop goes on computing; the copies come in between."""
    training = Training(device, num_steps=3)
    copies = CudaCopies(device) if device.type == "cuda" else None
    waited_for = training.save(tmp_path)
    slot = Slot.create(rank=0, number=0)
    for name in ("s11-a1", "s12-a1"):  # the second time the pages are locked already
        state = collect(training.model, training.optimizer)
        work = prepare(draft(name), state=state, extras={"cursor": {}}, world=training.world, plans=SavePlans(), overlap=True)
        snapshot = Snapshot(slot, work, copies=copies)
        snapshot.begin()
        snapshot.start()
        busy = torch.randn(1000, 1000, device=device)
        for _ in range(20):
            busy = busy @ busy / busy.norm()
        snapshot.wait(limit_s=60)
        snapshot.join(limit_s=60)
        assert snapshot.error is None
        assert Uploader(tmp_path, [slot], limit_s=60).drain(limit_s=60) == []
        assert verify(tmp_path / name) == []
        assert read_manifest(tmp_path / name).state_digest == waited_for.state_digest
    if copies is not None:
        copies.close()
    slot.close()
