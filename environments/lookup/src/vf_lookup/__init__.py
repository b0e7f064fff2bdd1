"""vf-lookup: follow a chain of links through a hidden table, with one tool call per link."""

from plumbob.rollout.harness import InProcessHarness, LocalEnv

from vf_lookup.taskset import LookupTaskset

# verifiers takes the only subclass of each kind from here: the taskset, and the Env and Harness with which verifiers'
# own runners play it in one process.
__all__ = ["InProcessHarness", "LocalEnv", "LookupTaskset"]
