"""`surefoot plan`: a stub that says what is coming, so that nobody builds a habit on something that is not there."""

from __future__ import annotations

from surefoot.core.errors import ConfigError


def plan() -> None:
    """Not in this release: planning a run from a budget. This page says what is coming.

    It will turn devices and days into FLOPs, a model size and a token count by a named scaling law with bands; search the layout (data,
    tensor, pipeline, context and expert parallel) with memory term by term; set batch, schedule, save interval and spares with the expected
    goodput; print one page with reasons and sources; and write the TOML that `surefoot train` runs.

    Until then, write that TOML by hand:

    \b
    Examples:
      surefoot init my-run
      surefoot config show my-run/run.toml
    """
    raise ConfigError(
        "`surefoot plan` is not in this release",
        where="command line",
        hint="`surefoot plan --help` says what is coming; `surefoot init` writes a config to start from",
    )
