"""The version, as the installed distribution states it."""

from importlib.metadata import version

__version__ = version("detlogp")
