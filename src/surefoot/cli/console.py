"""Words to the person at the terminal: a terminal, pipe or disk that went away changes neither what a command does nor how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


def say(text: str = "", *, err: bool = False) -> None:
    """Print a line, on stderr with `err`, and flush. Never raises: what cannot be written is lost, and nothing else is."""
    stream: TextIO | None = sys.stderr if err else sys.stdout
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _discard(stream)
    except (OSError, ValueError):  # a full disk: Python tries again with the next line; a closed stream: nothing to do
        pass


def reader_is_gone() -> bool:
    """Whether stdout is a pipe or terminal that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False


def open_streams() -> None:
    """Call first in a process. A stream that came closed becomes /dev/null: else the next file takes its number, and what is said there.

    A name that the terminal cannot show is printed with escapes, as stderr always does.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: that of this stream
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def close_streams() -> None:
    """Call last in a process. A flush that fails later, in the interpreter's own exit, would replace the exit code by 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _discard(stream)
        except (OSError, ValueError) as error:
            _discard(stream)
            say(f"surefoot: part of the output is lost: {error}", err=True)


def _discard(stream: TextIO) -> None:
    """Whatever is still held for `stream` or said on it goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
