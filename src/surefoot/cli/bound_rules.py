"""The rules that `[heal]` binds, looked at before anything is written: the config itself does not know their names."""

from __future__ import annotations

from surefoot.core.sections import RunConfig


def refuse_unknown_rules(config: RunConfig) -> None:
    """Raises ConfigError for a rule or an action that does not exist."""
    if not config.heal.rules:
        return
    from surefoot.monitor.detectors import bindings

    bindings(config.heal)
