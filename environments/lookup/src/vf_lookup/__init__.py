"""vf-lookup: follow a chain of links through a hidden table, one tool call per link."""

from vf_lookup.taskset import LookupTaskset

__all__ = ["LookupTaskset"]
