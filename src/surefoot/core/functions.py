"""Functions named in a config as `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.core.hashing import sha256_file


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


def source_sha256(name: str) -> str | None:
    """sha256 of the file that defines `package.module:function`, found without importing the module; None when there is no such file."""
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError):
        return None
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return sha256_file(path) if path is not None and path.is_file() else None
