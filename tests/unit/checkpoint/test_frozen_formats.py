"""Every released format of a checkpoint stays readable: tiny runs of two ranks, frozen when their format was new."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_stock

from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.prove_rank import load_and_compare
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.verify import verify
from surefoot.cli.main import run
from surefoot.core.hashing import sha256_json
from surefoot.tensors.digest import as_hex, tensor_digest
from surefoot.tensors.world import single_world

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSIONS = [1, 2]
DIGESTS = {
    1: "sf1:eb64c88c5f13624d1e62b50c8e543e97f4340dc18db78d5fdce697bf85440046",
    2: "sf1:773cd80f0064c7cbeeacf95d15bef80fc28e7ce8e2466aa2c727473833843a33",
}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def frozen(version: int) -> Path:
    return FIXTURES / f"checkpoint_v{version}" / "s4-a1"


def test_it_is_what_was_frozen(frozen: Path, version: int) -> None:
    manifest = read_manifest(frozen)
    assert (manifest.format_version, manifest.state_digest, manifest.step, len(manifest.tensors)) == (version, DIGESTS[version], 4, 46)
    writers = {file.rank for file in manifest.files}
    assert writers == ({-1} if version == 1 else {-1, 0, 1})


def test_it_verifies(frozen: Path) -> None:
    assert verify(frozen) == []


def test_it_is_listed(frozen: Path, version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(frozen, tmp_path / "run" / "checkpoints" / "s4-a1")
    shutil.copy(frozen.parent / "ledger.jsonl", tmp_path / "run")
    assert run(["checkpoint", "list", str(tmp_path / "run"), "--shards", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (row["id"], row["lineage"], row["state_digest"]) == ("s4-a1", "current", DIGESTS[version])
    assert len(row["shards"]) == 4
    assert run(["ledger", str(tmp_path / "run"), "--verify"]) == 0


def test_it_loads_into_live_tensors(frozen: Path, version: int) -> None:
    manifest = read_manifest(frozen)
    kept = [tensor for tensor in manifest.tensors if not tensor.key.startswith("rng/")]
    state = LiveState({tensor.key: torch.full(tensor.shape, 7, dtype=getattr(torch, tensor.dtype)) for tensor in kept})
    random_state = torch.get_rng_state()
    loaded = load(frozen, state=state, world=single_world(), expected_state_digest=DIGESTS[version])
    torch.set_rng_state(random_state)
    assert {tensor.key: as_hex(tensor_digest(state.tensors[tensor.key])) for tensor in kept} == {
        tensor.key: tensor.digest for tensor in kept
    }
    assert loaded.extras["loop"]["step"] == 4


def test_it_can_be_proven(frozen: Path) -> None:
    assert load_and_compare(frozen, world=single_world(), dim=0, budget_bytes=1 << 30) == []


def test_the_stock_library_loads_it(frozen: Path) -> None:
    manifest = read_manifest(frozen)
    tensors = {tensor.key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in manifest.tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no process group: said by DCP, and meant
        load_stock(tensors, checkpoint_id=frozen, no_dist=True)
    assert all(as_hex(tensor_digest(tensors[tensor.key])) == tensor.digest for tensor in manifest.tensors)


def test_its_manifest_hash_is_over_itself(frozen: Path) -> None:
    raw = json.loads((frozen / "manifest.json").read_bytes())
    assert raw["hash"] == sha256_json({key: value for key, value in raw.items() if key != "hash"})
