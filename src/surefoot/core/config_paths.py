"""Paths in a config: absolute in memory, relative on disk, so that a run folder can be copied to another machine and resumed."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NO_PATH = re.compile(r"builtin:.*|bytes|bpe:\d+|.*://.*", re.DOTALL)


def is_plain_path(value: str) -> bool:
    """Whether `value` names a file or folder: not empty, `builtin:...`, `bytes`, `bpe:<size>` or a URL."""
    return bool(value) and _NO_PATH.fullmatch(value) is None


def absolute_path(value: str, *, folder: Path) -> str:
    """`value` as an absolute path, relative ones taken from `folder`. What is no path comes back untouched."""
    if not is_plain_path(value):
        return value
    path = os.path.normpath(os.path.join(os.path.abspath(folder), os.path.expanduser(value)))
    return path[1:] if path.startswith("//") else path  # normpath keeps a double slash, which Linux reads as one


def relative_path(value: str, *, folder: Path) -> str:
    """The inverse: an absolute path as seen from `folder`, so that `absolute_path(result, folder=folder)` gives `value`."""
    if not is_plain_path(value):
        return value
    relative = os.path.relpath(value, os.path.abspath(folder))
    return relative if is_plain_path(relative) and not relative.startswith("~") else f"./{relative}"
