"""English enough for every rule."""

from __future__ import annotations

import random

NOUNS = "river stone letter garden engine window captain winter harbour lantern machine forest bridge kettle ribbon market".split()
VERBS = "carries follows remembers crosses repairs answers weighs lifts draws keeps opens turns measures hides burns paints".split()


def prose(num_sentences: int, *, seed: int = 0) -> str:
    """English enough for every rule: stop words, sentences, lines of several of them, and nothing said twice."""
    draw = random.Random(seed)
    sentences = [
        f"The {draw.choice(NOUNS)} of {draw.choice(NOUNS)} {draw.randrange(10**6)} {draw.choice(VERBS)} "
        f"the old {draw.choice(NOUNS)} and {draw.choice(VERBS)} that {draw.choice(NOUNS)} with {draw.randrange(10**6)} others."
        for _ in range(num_sentences)
    ]
    return "\n".join(" ".join(sentences[at : at + 3]) for at in range(0, num_sentences, 3)) + "\n"
