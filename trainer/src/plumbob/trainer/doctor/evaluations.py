"""Do the run's own evaluations ask the engine for what they should: greedy tokens, then tokens sampled as in training?"""

from __future__ import annotations

from collections.abc import Sequence

import verifiers.v1 as vf
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.subject import Call, Refused, Subject, recorded
from plumbob.trainer.training import train as training_loop
from plumbob.trainer.training.row_checks import before_first_turn

CHECK = "evaluations ask for what training asks for"
SETTINGS = ("temperature", "top_p", "top_k", "min_p")
"""Fields of `Sampling` that all requests of an evaluation have in common."""


def as_asked(subject: Subject, traces: Sequence[Sequence[vf.Trace]]) -> Finding:
    """Run an evaluation, greedy and sampled, with the training loop's own function, and look at its requests.

    `traces`: some rollouts of each held-out task, sampled as in training, with whose first prompts those of the evaluation are
    compared where they are the same each time.
    """
    run, config = subject.run, subject.run.config
    prompts: set[tuple[int, ...]] = set()
    for how, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        with recorded(run.engine) as (answered, refused):
            # Looked up where the training loop looks it up, so that it is the same function.
            evaluating = training_loop.evaluate(run.sampler, run.world, how, temperature=temperature)
            subject.runner.run(evaluating)
        run.engine.forget()
        requests = [*(call for _, call in answered), *refused]
        wanted = {name: getattr(run.sampler.sampling, name) for name in SETTINGS} | {"temperature": temperature}
        for name, value in wanted.items():
            told = [getattr(r.sampling, name) for r in requests]
            if other := [one for one in told if one != value]:
                evidence = (
                    f"{len(other)} of {len(told)} requests of the {how} evaluation have {name} {other[0]}, not {value}"
                )
                return Finding(CHECK, "fail", evidence, "evaluation-prompted-differently")
        most, limit = max((r.sampling.max_tokens for r in requests), default=0), run.sampler.sampling.max_tokens
        if requests and most < limit and all(_room(subject, r) for r in requests):
            evidence = f"no request of the {how} evaluation may have more than {most} new tokens, where --max-tokens is {limit}"
            return Finding(CHECK, "fail", evidence, "evaluation-prompted-differently")
        prompts |= {tuple(r.prompt_ids) for r in requests}
    firsts = [{tuple(before_first_turn(trace)) for trace in own if trace.ok and trace.num_turns} for own in traces]
    steady = [next(iter(own)) for own in firsts if len(own) == 1 and next(iter(own))]
    missing = [first for first in steady if first not in prompts]
    evidence = (
        f"greedy and sampled requests have the settings of the run; {len(steady) - len(missing)} of {len(steady)} held-out tasks "
        "have the first prompt that they would have in training"
    )
    if len(missing) > len(steady) / 2:
        return Finding(CHECK, "fail", evidence, "evaluation-prompted-differently")
    return Finding(CHECK, "pass", evidence)


def _room(subject: Subject, asked: Call | Refused) -> bool:
    """Whether the context has room for all tokens that a turn may have after this prompt."""
    return len(asked.prompt_ids) + subject.run.sampler.sampling.max_tokens <= subject.run.config.max_context
