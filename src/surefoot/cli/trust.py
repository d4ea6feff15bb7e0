"""How far the last checkpoint of a run is trusted, for the person at the terminal. Pure."""

from __future__ import annotations

from surefoot.core.records import CheckpointRef, Rung


def trust_word(rung: str, *, read_back: bool, damaged: bool) -> str:
    """The word for it, the same wherever it is told. A rung alone does not know that storage gave all bytes back."""
    if damaged:
        return "damaged"
    return "read back" if read_back and rung == Rung.COMMITTED else str(rung)


def how_far_trusted(ref: CheckpointRef, *, command: str, run: str) -> str:
    """One line: the most that is known of `ref`, and the command that finds out more. `command` and `run` as they are typed here."""
    prove, verify = f"`{command} checkpoint prove {run}`", f"`{command} checkpoint verify {run}`"
    word = trust_word(ref.rung, read_back=ref.read_back, damaged=ref.damaged)
    if ref.damaged:
        return f"{ref.id} is {word}, says the last look at it: {verify} looks again and names what is wrong"
    if ref.rung is Rung.PROVEN:
        return f"{ref.id} is {word}: loaded on another number of ranks than saved it; {verify} reads every byte again"
    if ref.rung is Rung.LOADABLE:
        return f"{ref.id} is {word}: a process that did not write it has loaded it; {prove} does so on another number of ranks too"
    if ref.read_back:
        return f"{ref.id} is {word}: storage gave every byte back, but nothing has loaded it yet: {prove} does"
    return f"{ref.id} is {word}: written and not read back yet: {verify} reads every byte, {prove} loads it"
