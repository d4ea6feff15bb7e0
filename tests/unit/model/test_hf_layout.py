"""Our decoder in the layout of Hugging Face models: every weight has a place, and the real library computes the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surefoot.core import strict_json
from surefoot.core.errors import Incompatible
from surefoot.core.sections import ModelSection
from surefoot.model.build import materialise
from surefoot.model.hf_layout import hf_config, hf_name
from surefoot.model.transformer import Transformer

VOCAB = 96
SEQ_LEN = 24


def _section(**given: object) -> ModelSection:
    sizes: dict[str, object] = {"vocab_size": VOCAB, "num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2}
    return ModelSection(**{**sizes, **given})  # type: ignore[arg-type]  # values are given by name


@pytest.mark.parametrize(
    ("given", "architecture"),
    [
        ({"rope_base": 500.0}, "LlamaForCausalLM"),
        ({"tie_embeddings": False, "norm_eps": 1e-3, "num_kv_heads": 4}, "LlamaForCausalLM"),
        ({"qk_norm": True, "tie_embeddings": False}, "Qwen3ForCausalLM"),
        ({"window": 5}, "MistralForCausalLM"),
    ],
)
def test_the_real_library_computes_the_same_logits(tmp_path: Path, given: dict[str, object], architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    section = _section(**given)
    with torch.device("meta"):
        ours = Transformer(section, VOCAB)
    materialise(ours, seed=3, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in ours.parameters():  # away from ones and tiny values, so that no weight could be exchanged unseen
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.3)
    save_file(
        {hf_name(name): tensor.contiguous() for name, tensor in ours.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = hf_config(section, ours.sizes, dtype="float32", seq_len=SEQ_LEN, eos_id=0)
    (tmp_path / "config.json").write_text(strict_json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype=torch.float32).eval()
    assert type(theirs).__name__ == architecture
    tokens_BS = torch.randint(VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    positions_BS = torch.arange(SEQ_LEN).expand(tokens_BS.shape)
    with torch.no_grad():
        here, there = ours(tokens_BS, positions_BS, torch.zeros_like(tokens_BS)), theirs(tokens_BS).logits
    assert float((here - there).abs().max()) <= 1e-4 * float(here.abs().max())


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"logit_soft_cap": 30.0}, "model.logit_soft_cap"),
        ({"attention_soft_cap": 30.0}, "model.attention_soft_cap"),
        ({"window": 4, "qk_norm": True}, "model.window with model.qk_norm"),
        ({"factory": "mine:make"}, "model.factory"),
    ],
)
def test_what_no_such_model_computes_is_refused_by_name(given: dict[str, object], setting: str) -> None:
    section = _section(**given)
    with torch.device("meta"):
        sizes = Transformer(_section(**{name: value for name, value in given.items() if name != "factory"}), VOCAB).sizes
    with pytest.raises(Incompatible, match="Llama family") as caught:
        hf_config(section, sizes, dtype="float32", seq_len=SEQ_LEN, eos_id=None)
    assert caught.value.where == setting


def test_a_weight_without_a_place_is_named() -> None:
    assert hf_name("blocks.11.feed_forward.w3.weight") == "model.layers.11.mlp.up_proj.weight"
    with pytest.raises(Incompatible) as caught:
        hf_name("blocks.0.adapter.weight")
    assert caught.value.where == "blocks.0.adapter.weight"
