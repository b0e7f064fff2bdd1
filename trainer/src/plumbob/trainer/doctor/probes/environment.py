"""Can the environment teach anything, whatever the model? Its tasks, rewards and tools, played by scripts.

Needs no rollout of a model. `doctor` runs these checks before it loads one.
"""

from __future__ import annotations

from collections.abc import Iterator

from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.examine import examine_environment
from plumbob.trainer.doctor.environment import Environment
from plumbob.trainer.doctor.subject import Subject

ORDER = 5


def probe(subject: Subject) -> Iterator[Finding]:
    environment = Environment(subject.run.config, subject.run.tasks, subject.runner)
    yield from (finding for _, finding in examine_environment(environment))
