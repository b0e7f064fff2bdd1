"""vf-musique: multi-hop questions over their own paragraphs, with retrieval tools and a reward that asks for evidence."""

from plumbob.rollout.harness import InProcessHarness, LocalEnv

from vf_musique.metrics import answer_f1, exact_match, support_f1
from vf_musique.taskset import MusiqueTaskset

# verifiers takes the one subclass of each kind: what the environment is, and how upstream's own runners play it cheaply.
# It passes over functions.
__all__ = ["InProcessHarness", "LocalEnv", "MusiqueTaskset", "answer_f1", "exact_match", "support_f1"]
