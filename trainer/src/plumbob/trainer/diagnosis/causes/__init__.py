"""The catalogue of causes: every reason why a run does not learn that a probe or a rule can name.

A source is an arXiv number, or owner/repository#issue on GitHub.
"""

from plumbob.trainer.diagnosis.causes import engine, reward, rollouts, tokens, update
from plumbob.trainer.diagnosis.findings import Cause

CAUSES: dict[str, Cause] = {
    cause.id: cause for topic in (rollouts, reward, tokens, engine, update) for cause in topic.CAUSES
}
"""Id of a cause -> the cause."""
