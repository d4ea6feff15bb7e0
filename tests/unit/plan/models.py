"""Models that several tests plan for: Llama 3's shapes, and one with experts."""

from __future__ import annotations

from surefoot.core.model_sizes import ModelSizes


def llama(num_layers: int, d_model: int, num_heads: int, d_ff: int, *, num_kv_heads: int = 8, vocab_size: int = 128_256) -> ModelSizes:
    return ModelSizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=d_model // num_heads,
        d_ff=d_ff,
        window=0,
        tie_embeddings=False,
        qk_norm=False,
    )


LLAMA_8B = llama(32, 4096, 32, 14_336)
LLAMA_70B = llama(80, 8192, 64, 28_672)
LLAMA_405B = llama(126, 16_384, 128, 53_248)
