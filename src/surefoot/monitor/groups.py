"""Groups of parameters, named by where they are in a model: what stands before its blocks, each block, what stands behind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_GROUPS = 64
"""More blocks are joined with their neighbours: a sick block still shows in a group of few, and a vector stays within a few kilobytes."""


def block_of(name: str) -> str | None:
    """The path of a parameter, or a module, up to its first number: `blocks.3` of `blocks.3.attention.wq.weight`. None without one."""
    path = name.split(".")
    index = next((index for index, part in enumerate(path) if part.isdigit()), None)
    return None if index is None else ".".join(path[: index + 1])


def group_names(held_by_ranks: Sequence[Sequence[str]], *, limit: int = MAX_GROUPS) -> dict[str, str]:
    """The group of each parameter that any rank has, groups in the order of the model; the same for every way to cut it.

    `held_by_ranks` are names in the order of the model, ranks in the order of their stages. What is in no block is one group if it stands
    before the first one, and another behind: `embed`, `norm+head`. Blocks beyond `limit` groups are joined in order: `blocks.0-1`.
    """
    blocks: dict[str, list[str]] = {}
    before: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for held in held_by_ranks for name in held):
        if (block := block_of(name)) is not None:
            blocks.setdefault(block, []).append(name)
        else:
            (behind if blocks else before).setdefault(name.rpartition(".")[0] or name, []).append(name)
    families = {family: place for place, family in enumerate(dict.fromkeys(map(_family_of, blocks)))}
    ordered = sorted(blocks, key=lambda block: (families[_family_of(block)], int(block.rpartition(".")[2])))
    named = _joined(ordered, limit=max(limit - 2, 1))
    grouped = [(_side(before), names) for names in before.values()]
    grouped += [(named[block], blocks[block]) for block in ordered]
    grouped += [(_side(behind), names) for names in behind.values()]
    return {name: group for group, names in grouped for name in names}


def blocks_of(groups: Mapping[str, str]) -> dict[str, str]:
    """From the groups of parameters to those of blocks, by path."""
    return {block: group for name, group in groups.items() if (block := block_of(name)) is not None}


def _joined(blocks: Sequence[str], *, limit: int) -> dict[str, str]:
    size = -(-len(blocks) // limit) if blocks else 1
    named: dict[str, str] = {}
    for first in range(0, len(blocks), size):
        part = blocks[first : first + size]
        name = part[0] if len(part) == 1 else f"{part[0]}-{part[-1].rpartition('.')[2]}"
        named |= dict.fromkeys(part, name)
    return named


def _side(modules: Mapping[str, Sequence[str]]) -> str:
    """Three names tell where one is; a model may have any number."""
    return "+".join(list(modules)[:3]) + ("+" if len(modules) > 3 else "")


def _family_of(block: str) -> str:
    return block.rpartition(".")[0]
