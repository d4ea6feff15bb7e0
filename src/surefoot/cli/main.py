"""The command line. A verb's module is imported only when that verb is called, so help and small verbs never wait for torch."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated

import typer

from surefoot import __version__
from surefoot.cli.console import close_streams, open_streams, reader_is_gone
from surefoot.cli.errors import report_error, report_unexpected, report_usage
from surefoot.cli.verbs import NOT_IN_THIS_RELEASE, VERBS, available_verbs
from surefoot.core.errors import EXIT_FAILED, EXIT_RETRY, ConfigError, SurefootError

_INTERRUPTED = 130  # what typer makes of Ctrl-C; the specification has no such code
_EPILOG = """\b
Examples:
  surefoot init my-run
  surefoot config show my-run/run.toml train.num_steps=60
  surefoot train my-run/run.toml
"""


def main() -> None:
    """Entry point of `surefoot`: runs the verb and ends the process with the exit code of what happened, whoever still reads of it."""
    open_streams()
    try:
        code = run(sys.argv[1:])
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    finally:
        close_streams()
    if "TORCHELASTIC_RUN_ID" in os.environ and "torch" in sys.modules:
        os._exit(code)  # torch 2.13 under torchrun aborts in one of six orderly ends, after everything is said and saved
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, or that of the error, which has been reported."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    as_json = "--json" in arguments
    try:
        if verb:
            _refuse_unknown(verb)
        result = _build(verb)(args=list(arguments) or ["--help"], prog_name="surefoot", standalone_mode=False)
        exit_code = result if isinstance(result, int) else 0
        return _interrupted(verb) if exit_code == _INTERRUPTED else exit_code
    except SurefootError as error:
        return report_error(error, as_json=as_json)
    except typer.TyperException as error:
        return report_usage(error.format_message(), verb=verb, as_json=as_json, exit_code=error.exit_code)
    except typer.Abort:
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _interrupted(verb)
    except SystemExit as end:
        broken = end.__context__
        if end.code != EXIT_FAILED or not isinstance(broken, BrokenPipeError):
            raise
        # typer ends so on any broken pipe. Verbs that act use `console.say`; one that only shows something was not read to its end.
        return EXIT_FAILED if reader_is_gone() else report_unexpected(broken, as_json=as_json)
    except Exception as error:  # the process boundary: recorded, said, and turned into an exit code
        return report_unexpected(error, as_json=as_json)


def _build(called: str) -> typer.Typer:
    """The whole app: the called verb in full, the others by name and one line of help."""
    app = typer.Typer(
        name="surefoot",
        help="Plans, trains, protects and recovers language-model pre-training runs on PyTorch.",
        epilog=_EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name, verb in available_verbs().items():
        if name != called:
            app.command(name, help=verb.help)(_placeholder)
            continue
        module_name, _, attribute = verb.target.partition(":")
        target: typer.Typer | Callable[..., object] = getattr(importlib.import_module(module_name), attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=verb.help)
        else:
            app.command(name)(target)
    return app


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_say_version)]


def _root(version: _Version = False) -> None:
    """What stands before the verb."""


def _placeholder() -> None:
    """Stands for a verb that was not called."""


def _refuse_unknown(verb: str) -> None:
    known = available_verbs()
    if verb in known:
        return
    if verb in NOT_IN_THIS_RELEASE or verb in VERBS:
        raise ConfigError(f"`surefoot {verb}` is not in this release", where="command line", hint=f"there are {', '.join(known)}")
    close = get_close_matches(verb, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the verbs are {', '.join(known)}"
    raise ConfigError(f"there is no verb {verb}", where="command line", hint=hint)


def _interrupted(verb: str) -> int:
    """A stopped `train` is worth starting again; for every other verb Ctrl-C is a failure."""
    return EXIT_RETRY if verb == "train" else EXIT_FAILED


if __name__ == "__main__":
    main()
