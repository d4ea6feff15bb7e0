"""Functions named in a config as `package.module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from surefoot.core.errors import ConfigError


def load_function(name: str, *, where: str) -> Callable[..., Any]:
    """Import what `name` names. Raises ConfigError, placed at `where`, when it is malformed, absent or not callable."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{name!r} names no function", where=where, hint="write package.module:function", got=name)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}", where=where, hint="is its package installed here?", got=name) from error
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__}, not a function", where=where, got=name)
    return function  # type: ignore[no-any-return]  # getattr on a module is Any; callable() was just checked
