"""Other people's DCP checkpoints as a start: the same bits under our names, or an error that names what does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.dcp_import import import_dcp, our_names
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt, Incompatible, Incomplete
from surefoot.core.records import Manifest
from surefoot.tensors.world import World


def _bits(training: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in collect(training.model, training.optimizer).tensors.items()}


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def _stock_save(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def _tutorial(training: Any) -> dict[str, Any]:
    """As the tutorial of DCP does it: one object that holds both."""
    model, optim = get_state_dict(training.model, training.optimizer)
    return {"app": {"model": model, "optim": optim}}


def _separate(training: Any) -> dict[str, Any]:
    model, optim = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optim, "lr_scheduler": {"last_epoch": 3}}


def _titan(training: Any) -> dict[str, Any]:
    """As torchtitan stores it: bare names of weights, a flat optimizer, its counters and positions as tensors or pickles."""
    model, optim = get_state_dict(training.model, training.optimizer)
    state: Any = optim["state"]
    flat = {f"optimizer.state.{fqn}.{slot}": value for fqn, slots in state.items() for slot, value in slots.items()}
    groups = {f"optimizer.param_groups.{fqn}.lr": 0.1 for fqn, _ in training.model.named_parameters()}
    return {**model, **flat, **groups, "train_state.step": torch.tensor(1), "dataloader": {"at": 3}}


@pytest.mark.parametrize("layout", [_tutorial, _separate, _titan])
def test_weights_and_moments_come_over_bit_for_bit(
    tmp_path: Path, training: Any, make_training: Callable[..., Any], make_draft: Callable[..., Manifest], world: World, layout: Any
) -> None:
    expected = _bits(training)
    source = _stock_save(tmp_path / "theirs", layout(training))
    fresh = make_training(seed=5)
    live = collect(fresh.model, fresh.optimizer, for_load=True)
    imported = import_dcp(source, state=live, world=world)
    _assert_same(_bits(fresh), expected)
    assert imported.step == 1
    assert all("param_groups" in key or "lr_scheduler" in key or key in ("train_state.step", "dataloader.at") for key in imported.left_out)
    save(tmp_path / "checkpoints", make_draft(), state=collect(fresh.model, fresh.optimizer), extras={"cursor": {}}, world=world)
    assert verify(tmp_path / "checkpoints" / "s10-a1") == []
    again = make_training(seed=6)
    load(tmp_path / "checkpoints" / "s10-a1", state=collect(again.model, again.optimizer, for_load=True), world=world)
    _assert_same(_bits(again), expected)


def test_a_damaged_one_is_refused_before_a_tensor_is_touched(
    tmp_path: Path, training: Any, make_training: Callable[..., Any], world: World
) -> None:
    source = _stock_save(tmp_path / "theirs", _separate(training))
    raw = bytearray((source / "__0_0.distcp").read_bytes())
    values = training.model[0].weight.detach().numpy().tobytes()
    raw[raw.index(values) + 5] ^= 4
    (source / "__0_0.distcp").write_bytes(raw)
    fresh = make_training(seed=5)
    live = collect(fresh.model, fresh.optimizer, for_load=True)
    before = _bits(fresh)
    with pytest.raises(Corrupt, match=r"wrong-checksum __0_0\.distcp model\.0\.weight"):
        import_dcp(source, state=live, world=world)
    _assert_same(_bits(fresh), before)


def _change(training: Any, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state = _titan(training)
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        (lambda state: state.pop("optimizer.state.0.weight.exp_avg"), Incomplete, "optim.0.weight.exp_avg"),
        (lambda state: state.pop("2.weight"), Incompatible, "optimizer.state.2.weight.exp_avg"),
        (lambda state: state.update(strange=torch.ones(3)), Incompatible, "strange"),
        (lambda state: state.update({"0.bias": torch.zeros(9)}), Incompatible, "model.0.bias"),
        (lambda state: state.update({"0.bias": torch.zeros(5, dtype=torch.float64)}), Incompatible, "model.0.bias"),
    ],
    ids=["a moment", "a weight", "an extra tensor", "a shape", "a dtype"],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, training: Any, world: World, change: Any, kind: type[CheckpointError], named: str
) -> None:
    source = _stock_save(tmp_path / "theirs", _change(training, change))
    with pytest.raises(kind) as caught:
        import_dcp(source, state=collect(training.model, training.optimizer, for_load=True), world=world)
    assert named in str(caught.value)


def test_weights_without_moments_are_said_to_be_that(tmp_path: Path, training: Any, world: World) -> None:
    source = _stock_save(tmp_path / "theirs", {"model": training.model.state_dict()})
    with pytest.raises(ConfigError, match="weights only"):
        import_dcp(source, state=collect(training.model, training.optimizer, for_load=True), world=world)


def test_moments_numbered_by_position_are_refused(tmp_path: Path, training: Any, world: World) -> None:
    source = _stock_save(tmp_path / "theirs", {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()})
    with pytest.raises(Incompatible, match="numbered by position"):
        import_dcp(source, state=collect(training.model, training.optimizer, for_load=True), world=world)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_second_copy_of_a_tied_weight_is_known_by_its_bits(tmp_path: Path, world: World) -> None:
    model = _Tied()
    optimizer = torch.optim.SGD(model.parameters())
    source = _stock_save(tmp_path / "theirs", {"model": {name: t.clone() for name, t in model.state_dict().items()}})
    assert import_dcp(source, state=collect(model, optimizer, for_load=True), world=world).tied == {
        "model.head.weight": "model.embed.weight"
    }
    other = _stock_save(tmp_path / "other", {"model": {"embed.weight": torch.ones(6, 4), "head.weight": torch.zeros(6, 4)}})
    with pytest.raises(Incompatible, match=r"head\.weight"):
        import_dcp(other, state=collect(model, optimizer, for_load=True), world=world)


def test_our_own_and_safetensors_are_not_imported(committed: Path, training: Any, tmp_path: Path, world: World) -> None:
    live = collect(training.model, training.optimizer, for_load=True)
    with pytest.raises(ConfigError, match="branch from it"):
        import_dcp(committed, state=live, world=world)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="no moments"):
        import_dcp(tmp_path / "hf", state=live, world=world)


def test_names_are_read_the_way_that_fits_the_model() -> None:
    bare = {"model.layers.0.weight", "lm_head.weight"}
    assert our_names(bare, wanted={"model.model.layers.0.weight"})["model.layers.0.weight"] == "model.model.layers.0.weight"
    assert our_names(bare, wanted={"model.layers.0.weight"})["model.layers.0.weight"] == "model.layers.0.weight"
    wrapped = {"model.module._orig_mod.a": 0, "optim.state.module._orig_mod.a.exp_avg": 0}
    assert set(our_names(wrapped, wanted=()).values()) == {"model.a", "optim.a.exp_avg"}
