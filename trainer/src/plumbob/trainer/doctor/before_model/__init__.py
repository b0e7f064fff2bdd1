"""Checks that need no model. Each module has `checks(environment)`, which yields findings."""
