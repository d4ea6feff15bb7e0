"""A few words from the model, to look at."""

from __future__ import annotations

from surefoot.core.stages import stage_before
from surefoot.model.generate import generate
from surefoot.model.rope import set_rope_base
from surefoot.train.evaluate import evaluating
from surefoot.train.step import Parts


def text_sample(parts: Parts, *, num_tokens: int) -> str:
    """Collective where the forward is. `num_tokens` of a new document; a function of the weights and the run's seed. What a terminal would
    not print is shown as a dot."""
    tokenizer, stage = parts.tokenizer, stage_before(parts.config, parts.data.next_sample)
    set_rope_base(parts.cut.module, stage.rope_base)
    with evaluating(parts.cut.module):
        ids = generate(
            parts.cut.runner.logits,
            [tokenizer.eos_id],
            num_tokens=num_tokens,
            context_len=stage.seq_len,
            vocab_size=tokenizer.vocab_size,
            temperature=0.8,
            seed=parts.config.run.seed,
            stop_id=tokenizer.eos_id,
            device=parts.world.device,
        )
    return "".join(character if character.isprintable() or character == "\n" else "\N{MIDDLE DOT}" for character in tokenizer.decode(ids))
