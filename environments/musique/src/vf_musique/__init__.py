"""vf-musique: multi-hop questions (MuSiQue) with retrieval tools and a reward that requires evidence."""

from plumbob.rollout.harness import InProcessHarness, LocalEnv

from vf_musique.metrics import answer_f1, exact_match, support_f1
from vf_musique.taskset import MusiqueTaskset

# verifiers takes the only subclass of each kind from here: the taskset, and the Env and Harness with which verifiers'
# own runners play it in one process. It ignores functions.
__all__ = ["InProcessHarness", "LocalEnv", "MusiqueTaskset", "answer_f1", "exact_match", "support_f1"]
