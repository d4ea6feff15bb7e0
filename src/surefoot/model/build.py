"""From a `[model]` section to a module that has its parameters: ours, or one of your own by `factory`.

What surefoot asks of a model: `model(tokens_BS, positions_BS, doc_ids_BS) -> logits_BSV`, and gradients for every parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from surefoot.core.cut_plan import CutPlan, TensorStyle
from surefoot.core.errors import ConfigError
from surefoot.core.functions import load_function
from surefoot.core.hashing import key64
from surefoot.core.sections import ModelSection
from surefoot.model.init import init_rules
from surefoot.model.transformer import Transformer
from surefoot.tensors.random import initialise

logger = logging.getLogger(__name__)


def build_model(section: ModelSection, vocab_size: int, *, seed: int) -> nn.Module:
    """Local. Ours comes on the meta device, without values, to be cut first; a factory's comes as the factory made it.

    A factory runs with torch's CPU generator keyed by `seed`, so that every rank and every restart begins from the same bits.
    """
    if not section.factory:
        with torch.device("meta"):
            return Transformer(section, vocab_size)
    factory = load_function(section.factory, where="[model] factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key64(seed, "factory"))
        model = factory(section, vocab_size)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{section.factory!r} returned a {type(model).__name__}, not a torch.nn.Module",
            where="[model] factory",
            hint="return the model itself",
            got=type(model).__name__,
        )
    return model


def materialise(model: nn.Module, *, seed: int, device: torch.device) -> None:
    """Local, before or after cutting. Give `model` memory on `device` and its initial values, the same on every topology.

    Raises ConfigError for a foreign model on the meta device: only its factory knows how it begins.
    """
    if isinstance(model, Transformer):
        model.to_empty(device=device)
        initialise(model, seed=seed, rule_for=init_rules(model.section))
        return
    unfilled = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if unfilled:
        raise ConfigError(
            f"the factory left {len(unfilled)} tensors on the meta device, {unfilled[0]!r} first",
            where="[model] factory",
            hint="return a model with its initial values, on the CPU",
            tensors=tuple(unfilled),
        )
    model.to(device)


def shard_units(model: nn.Module) -> dict[str, nn.Module]:
    """Local. fqn -> module: what full sharding gathers together, in the order of the forward. The rest belongs to the root.

    A foreign model may say so itself in a method of this name; else each entry of its outermost module lists is a unit.
    """
    own = getattr(model, "shard_units", None)
    if callable(own):
        units: dict[str, nn.Module] = dict(own())
        return units
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = {f"{name}.{index}": unit for name in outermost for index, unit in enumerate(_children(model, name))}
    if not found:
        logger.warning("the model has no module list to cut along: under dp_shard it is gathered as a whole in every forward")
    return found


def cut_plan(model: nn.Module) -> CutPlan:
    """Local. How `model` may be cut; of a foreign one only what is gathered together is known."""
    units = tuple(shard_units(model))
    if isinstance(model, Transformer):
        blocks = tuple(name for name in units if name.startswith("blocks."))
        return CutPlan(
            units=units,
            blocks=blocks,
            first=("embed",),
            last=("norm", "embed" if model.head is None else "head"),
            width=model.sizes.d_model,
            tensor_styles=_tensor_styles(model, blocks),
            attentions=tuple(f"{block}.attention.core" for block in blocks),
            mask="mask",
        )
    return CutPlan(units=units)


_BLOCK_STYLES: dict[str, TensorStyle] = {
    "attention_norm": "norm",
    "attention": "gathered",
    "attention.wq": "columns",
    "attention.wk": "columns",
    "attention.wv": "columns",
    "attention.q_norm": "head_norm",
    "attention.k_norm": "head_norm",
    "attention.wo": "rows",
    "feed_forward_norm": "norm",
    "feed_forward": "gathered",
    "feed_forward.w1": "columns",
    "feed_forward.w3": "columns",
    "feed_forward.w2": "rows",
}


def _tensor_styles(model: Transformer, blocks: Sequence[str]) -> tuple[tuple[str, TensorStyle], ...]:
    """A tied head needs no style of its own: all positions meet the rows of the embedding that are here, and logits come out cut."""
    left_out = set() if model.sizes.qk_norm else {"attention.q_norm", "attention.k_norm"}
    inside = [(f"{block}.{name}", style) for block in blocks for name, style in _BLOCK_STYLES.items() if name not in left_out]
    head: list[tuple[str, TensorStyle]] = [] if model.head is None else [("head", "vocabulary_columns")]
    return (("embed", "vocabulary_rows"), *inside, ("norm", "last_norm"), *head)


def _children(model: nn.Module, name: str) -> list[nn.Module]:
    return list(model.get_submodule(name).children())
