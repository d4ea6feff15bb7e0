"""The one place that knows the version."""

from importlib.metadata import version

__version__ = version("surefoot")
