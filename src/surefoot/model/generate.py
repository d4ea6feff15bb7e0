"""A sample of text from a model: to look at, not to serve. The whole context is computed anew for every token; there is no cache.

Dim letters: B = 1 sample, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.model.loss import Forward
from surefoot.tensors.random import generator_for


def generate(
    forward: Forward,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    context_len: int,
    vocab_size: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Collective where `forward` is: every rank of a cut model calls it with the same arguments and gets the same ids.

    Up to `num_tokens` ids that follow `prompt`, fewer when `stop_id` comes (it is left out). Temperature 0 takes the likeliest. At most
    `context_len` ids are looked back at; ids from `vocab_size` on (padding of the embedding) are never drawn. A function of its arguments.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one id: give the end-of-document id to start a document")
    stream = generator_for(seed, "generate")
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + num_tokens:
            tokens_BS = torch.tensor([ids[-context_len:]], dtype=torch.int64, device=device)
            positions_BS = torch.arange(tokens_BS.shape[1], device=device)[None]
            logits_V = forward(tokens_BS, positions_BS, torch.zeros_like(tokens_BS))[0, -1, :vocab_size].float().cpu()
            next_id = _choose(logits_V, temperature=temperature, stream=stream)
            if next_id == stop_id:
                break
            ids.append(next_id)
    return ids[len(prompt) :]


def _choose(logits_V: torch.Tensor, *, temperature: float, stream: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax().item())
    return int(torch.multinomial((logits_V / temperature).softmax(dim=-1), 1, generator=stream).item())
