"""Named model sizes. A preset fills in only what the TOML leaves open; the resolved config holds the plain numbers.

Sizes never change once released: a resolved config wins over its preset, but a fresh run of the same TOML must give the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Sizes = Mapping[str, Any]

PRESETS: Mapping[str, Sizes] = {
    # for tests: a step takes milliseconds
    "tiny": {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 192},
    # 1.9M parameters with 8,192 tokens of vocabulary: the lowest held-out loss of those tried that minutes on two cores can buy
    "quickstart": {"num_layers": 4, "d_model": 128, "num_heads": 4, "num_kv_heads": 4, "d_ff": 384},
    # the shapes of the GPT-2 release, with SwiGLU at the parameter count of its 4x MLP
    "124m": {"num_layers": 12, "d_model": 768, "num_heads": 12, "num_kv_heads": 12, "d_ff": 2048},
    "350m": {"num_layers": 24, "d_model": 1024, "num_heads": 16, "num_kv_heads": 16, "d_ff": 2752},
    "774m": {"num_layers": 36, "d_model": 1280, "num_heads": 20, "num_kv_heads": 20, "d_ff": 3456},
    # Llama 3.2 1B and Llama 3 8B
    "1b": {"num_layers": 16, "d_model": 2048, "num_heads": 32, "num_kv_heads": 8, "d_ff": 8192},
    "8b": {"num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336, "tie_embeddings": False},
}
