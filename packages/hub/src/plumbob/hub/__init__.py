"""Find environments by name."""

from plumbob.hub.errors import UserError
from plumbob.hub.registry import GROUP, Environment, find, installed

__all__ = ["GROUP", "Environment", "UserError", "find", "installed"]
