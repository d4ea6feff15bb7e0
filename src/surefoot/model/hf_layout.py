"""Our dense decoder in the layout of Hugging Face models: names of weights and `config.json`. No torch."""

from __future__ import annotations

import re
from typing import Any

from surefoot.core.errors import Incompatible
from surefoot.core.model_sizes import ModelSizes
from surefoot.core.sections import ModelSection
from surefoot.model.mup import attention_scale, width_factor

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
_INSIDE = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}


def hf_name(name: str) -> str:
    """The name there of the weight `name` here. Raises Incompatible for what our decoder does not have."""
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _INSIDE:
        return f"model.layers.{block[1]}.{_INSIDE[block[2]]}"
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    raise Incompatible("has no place in the layout of Llama models", where=name, hint="export it with --format safetensors")


def hf_config(section: ModelSection, sizes: ModelSizes, *, dtype: str, seq_len: int, eos_id: int | None) -> dict[str, Any]:
    """`config.json`: Llama, with norms on queries and keys Qwen3, with a window Mistral. Raises Incompatible for what none computes."""
    _refuse(section, sizes)
    kind, architecture = ("qwen3", "Qwen3ForCausalLM") if sizes.qk_norm else ("llama", "LlamaForCausalLM")
    if sizes.window:
        kind, architecture = "mistral", "MistralForCausalLM"
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.d_model,
        "intermediate_size": sizes.d_ff,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": section.norm_eps,
        "rope_theta": section.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_base},
        "attention_bias": False,
        "tie_word_embeddings": sizes.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        **({"mlp_bias": False} if kind == "llama" else {}),
        **({"sliding_window": sizes.window} if sizes.window else {}),
    }


def _refuse(section: ModelSection, sizes: ModelSizes) -> None:
    unknown = {
        "model.factory": bool(section.factory),
        "model.attention_soft_cap": bool(section.attention_soft_cap),
        "model.logit_soft_cap": bool(section.logit_soft_cap),
        "model.window with model.qk_norm": bool(sizes.window and sizes.qk_norm),
        "model.parametrization away from its base width": width_factor(section) != 1.0,
        "model.mup_base_head_dim": attention_scale(section, head_dim=sizes.head_dim) is not None,
    }
    for setting, is_set in unknown.items():
        if is_set:
            hint = "export it with --format safetensors and bring your own code"
            raise Incompatible("no Hugging Face model of the Llama family computes this", where=setting, hint=hint)
