"""vf-lookup: follow a chain of links through a hidden table, one tool call per link."""

from plumbob.rollout.harness import InProcessHarness, LocalEnv

from vf_lookup.taskset import LookupTaskset

# verifiers takes the one subclass of each kind: what the environment is, and how upstream's own runners play it cheaply.
__all__ = ["InProcessHarness", "LocalEnv", "LookupTaskset"]
