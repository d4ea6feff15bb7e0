"""How errors reach a person or a program: what, where and what to do on stderr, or one JSON object on stdout."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path

from surefoot.cli.console import say
from surefoot.core.errors import SurefootError
from surefoot.core.strict_json import dumps

SCHEMA_VERSION = 1
_NUM_FRAMES = 3


def report_error(error: SurefootError, *, as_json: bool) -> int:
    """Say what happened and return the exit code. Further problems of the same input (value `others`) follow as lines of their own."""
    others = [str(other) for other in _listed(error.values.get("others"))]
    if as_json:
        _print_json(error.code, what=error.what, where=error.where, hint=error.hint, more={"others": others} if others else {})
        return error.exit_code
    lines = [f"surefoot: {error.where}: {error.what}" if error.where else f"surefoot: {error.what}"]
    if error.hint:
        lines.append(f"  {error.hint}")
    lines += [f"also: {other}" for other in others]
    say("\n".join(lines), err=True)
    return error.exit_code


def report_usage(message: str, *, verb: str, as_json: bool, exit_code: int) -> int:
    """A command line that does not parse."""
    hint = f"`surefoot {verb} --help` has examples" if verb else "`surefoot --help` lists the verbs"
    if as_json:
        _print_json("usage", what=message, where="command line", hint=hint)
    elif message.startswith("Usage:"):  # a verb called without its own verb: its help page
        say(message, err=True)
    else:
        say(f"surefoot: {message}\n  {hint}", err=True)
    return exit_code


def report_unexpected(error: BaseException, *, as_json: bool) -> int:
    """A defect: the last frames on stderr, all of them in a file whose path is said. Returns 1."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    log = _write_traceback(error)
    hint = f"this is a defect of surefoot; the full traceback is in {log}" if log else "this is a defect of surefoot"
    if as_json:
        _print_json("failed", what=what, where=where, hint=hint)
        return 1
    lines = [f"surefoot: unexpected {what}"]
    lines += [f"  {_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[-_NUM_FRAMES:]]
    say("\n".join([*lines, f"  {hint}"]), err=True)
    return 1


def _print_json(code: str, *, what: str, where: str, hint: str, more: dict[str, object] | None = None) -> None:
    error = {"code": code, "what": what, "where": where, "hint": hint, **(more or {})}
    say(dumps({"error": error, "schema_version": SCHEMA_VERSION}))


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _short(filename: str) -> str:
    """Only the last folders of a source file: enough to find it."""
    return "/".join(Path(filename).parts[-3:])


def _write_traceback(error: BaseException) -> str | None:
    try:
        descriptor, path = tempfile.mkstemp(prefix="surefoot-", suffix=".log")
        with os.fdopen(descriptor, "w") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return None
    return path
