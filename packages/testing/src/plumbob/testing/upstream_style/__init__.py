"""Environments written as upstream's are: importable modules without an entry point. Tests put `FOLDER` on sys.path."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Each module in it is a taskset that verifiers finds by the module's name."""
