"""How far the last checkpoint of a run is trusted when the run ends, for the person at the terminal. Pure."""

from __future__ import annotations

from surefoot.core.records import CheckpointRef, Rung


def how_far_trusted(ref: CheckpointRef, *, command: str, run: str) -> str:
    """One line: the most that is known of `ref`, and the command that finds out more. `command` and `run` as they are typed here."""
    prove, verify = f"`{command} checkpoint prove {run}`", f"`{command} checkpoint verify {run}`"
    if ref.damaged:
        return f"{ref.id} is damaged, says the last look at it: {verify} looks again and names what is wrong"
    if ref.rung is Rung.PROVEN:
        return f"{ref.id} is proven: loaded on another number of ranks than saved it; {verify} reads every byte again"
    if ref.rung is Rung.LOADABLE:
        return f"{ref.id} is loadable: a process that did not write it has loaded it; {prove} does so on another number of ranks too"
    if ref.read_back:
        return f"{ref.id} is read back: storage gave every byte back, but nothing has loaded it yet: {prove} does"
    return f"{ref.id} is committed: written and not read back yet: {verify} reads every byte, {prove} loads it"
