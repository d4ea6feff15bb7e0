"""Everything that is wrong with a config at once: a person fixes a file in one go, not one key a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """`where` is `file:line` or the override as it was given."""

    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        return f"{text} — {self.hint}" if self.hint else text


def as_error(problems: Sequence[Problem]) -> ConfigError:
    """The first problem as the error; the others ride along as text under the value `others`."""
    first, *others = problems
    return ConfigError(first.what, where=first.where, hint=first.hint, others=[str(other) for other in others])
