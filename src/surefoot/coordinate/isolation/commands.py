"""Commands of the site, each with a deadline: a controller that does not answer must not hold a recovery up."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_DENIED: Final = ("permission denied", "access denied", "invalid user id", "access/permission", "not authorized", "forbidden")


@dataclass(frozen=True, slots=True)
class Answer:
    """`exit_code` is None when the command is not there or its time was over."""

    command: str
    exit_code: int | None
    output: str
    error: str

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0

    @property
    def is_denied(self) -> bool:
        """Whether the site said that this user has no right to it."""
        return not self.is_good and any(word in self.error.lower() for word in _DENIED)

    def why(self) -> str:
        """Why it is not good, in one line."""
        how = f"exit {self.exit_code}" if self.exit_code is not None else "no answer"
        return f"`{self.command}`: {how}: {' '.join((self.error or self.output).split())[:300]}"


def ask_site(argv: Sequence[str], *, limit_s: float) -> Answer:
    """Run a command of the site for at most `limit_s`, and end it with all its children then. Raises nothing."""
    command = shlex.join(argv)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(command, None, "", f"{argv[0]}: {error.strerror}")
    try:
        output, told = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Answer(command, None, "", f"no answer within {limit_s:g} s")
    return Answer(command, process.returncode, output, told)
