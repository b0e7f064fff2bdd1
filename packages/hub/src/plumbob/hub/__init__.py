"""Find environments by name."""

from plumbob.hub.installed.registry import GROUP, Environment, find, installed

__all__ = ["GROUP", "Environment", "find", "installed"]
