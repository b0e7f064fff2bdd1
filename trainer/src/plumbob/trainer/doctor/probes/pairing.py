"""Does what belongs together stay together: rewards and advantages with their rollouts, tool results with their calls?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import verifiers.v1 as vf
from plumbob.rollout.scripted import ScriptedChat
from plumbob.rollout.toolcalls import NOT_READ
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.diagnosis.left_out_rollouts import judged, left_out
from plumbob.trainer.doctor.before_model.made_up_results import made_up
from plumbob.trainer.doctor.environment import Environment, spread
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.training import step as training_step
from plumbob.trainer.training.expected_advantages import deviation, differing, expected_advantages, scaled

ORDER = 35

REPLAYS = 8
"""Number of rollouts whose tool calls are made again."""


def probe(subject: Subject) -> Iterator[Finding]:
    yield _missing(subject)
    yield _rewards(subject)
    yield _advantages(subject)
    if any(_results(trace) for trace in subject.drawn.traces):
        yield _tool_results(subject)


def _missing(subject: Subject) -> Finding:
    """Every rollout that finished must be in its group, or the group's mean is that of the rollouts that are kept."""
    check, batch = "finished rollouts are in their groups", subject.drawn.batch
    found = left_out([*batch.drawn, *batch.stale], batch.traces)
    if not found.count:
        return Finding(check, "pass", f"all of {len(batch.drawn)} rollouts that can be used are there")
    cause, how = judged(found, len(batch.drawn) + len(batch.stale) + found.count)
    evidence = f"{found.count} rollouts finished and are missing; {how}"
    return Finding(check, "fail" if cause else "unsure", evidence, cause)


def _rewards(subject: Subject) -> Finding:
    """Each sample must have the reward of the trace with its token ids."""
    check, drawn = "each rollout is trained with its own reward", subject.drawn
    earned: dict[tuple[int, ...], list[float]] = {}
    for trace in drawn.traces:
        earned.setdefault(tuple(trace.branches[0].token_ids), []).append(trace.reward)
    pairs = [(s, earned[key]) for s in drawn.samples if (key := tuple(s.token_ids)) in earned]
    wrong = [(s, own) for s, own in pairs if all(abs(s.reward - r) > thresholds.REWARD_TOLERANCE for r in own)]
    if not pairs:
        return Finding(check, "unsure", "no row has the token ids of its rollout, so that they cannot be paired")
    if not wrong:
        return Finding(check, "pass", f"{len(pairs)} samples have the reward of the rollout with their token ids")
    sample, own = wrong[0]
    same = sorted(s.reward for s in drawn.samples) == sorted(t.reward for t in drawn.traces)
    evidence = (
        f"{len(wrong)} of {len(pairs)} samples have another reward than the rollout with their token ids, the first "
        f"{sample.reward:.3g} in place of {own[0]:.3g} (group {sample.group})"
        f"{'; over the step, they are the same rewards in another order' if same else ''}"
    )
    return Finding(check, "fail", evidence, "rewards-of-other-rollouts")


def _advantages(subject: Subject) -> Finding:
    """The training step's advantages must be those that follow from the traces' rewards by the settings."""
    check, config, drawn = "advantages follow from the rollouts' rewards", subject.run.config, subject.drawn
    settings = config.advantages()
    # Looked up where the training step looks it up, so that it is the same function.
    found = training_step.step_advantages(drawn.samples, settings).values
    rewards = [trace.reward for trace in drawn.traces]
    wanted = expected_advantages(drawn.samples, rewards, settings)
    wrong = differing(found, wanted)
    evidence = f"{len(found)} advantages, computed again in float64 from the rewards of the rollouts"
    if not wrong:
        return Finding(check, "pass", f"{evidence}: largest difference {_apart(found, wanted):.2g}")
    i = wrong[0]
    evidence += (
        f": {len(wrong)} differ, the first {found[i]:+.3g} in place of {wanted[i]:+.3g} (reward {rewards[i]:.3g}, group "
        f"{drawn.samples[i].group})"
    )
    if not differing(found, [-a for a in wanted]):
        return Finding(check, "fail", f"{evidence}; all have the opposite sign", "advantages-wrong")
    if not differing(sorted(found), sorted(wanted)):
        return Finding(check, "fail", f"{evidence}; they are those of other rollouts", "rewards-of-other-rollouts")
    known = next((name for name, values in _mistakes(subject, rewards).items() if not differing(found, values)), "")
    return Finding(check, "fail", evidence + (f"; they are {known}" if known else ""), "advantages-wrong")


def _mistakes(subject: Subject, rewards: Sequence[float]) -> Mapping[str, list[float]]:
    """What advantages often are by mistake -> their values."""
    samples, settings = subject.drawn.samples, subject.run.config.advantages()
    mean, spread_ = math.fsum(rewards) / len(rewards), deviation(rewards)
    whole = [r - mean for r in rewards]
    return {
        "rewards less the mean of the whole step, not of the group": whole,
        "rewards less the mean of the whole step, divided by its standard deviation": [
            v / (spread_ + settings.scale_epsilon) for v in whole
        ],
        "the rewards themselves": list(rewards),
        **{
            f"those of --scale-rewards {scale}": scaled(samples, rewards, scale, settings)
            for scale in ("none", "group", "batch")
        },
    }


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _tool_results(subject: Subject) -> Finding:
    """The same calls, made again by one rollout at a time, must get the results that the rollout got."""
    check, drawn = "tool results are those of the rollout's own calls", subject.drawn
    with_tools = [i for i, trace in enumerate(drawn.traces) if _results(trace)]
    chosen = [with_tools[k] for k in spread(len(with_tools), REPLAYS)]
    told = {i: _results(drawn.traces[i]) for i in chosen}
    again = {i: [_replayed(subject, i) for _ in range(2)] for i in chosen}
    unsteady = [i for i in chosen if again[i][0] != again[i][1]]
    other = [i for i in chosen if i not in unsteady and again[i][0] != told[i]]
    evidence = f"the tool calls of {len(chosen)} rollouts were made again, twice: in {len(other)} the results differ"
    if unsteady:
        evidence += f"; in {len(unsteady)} they differ from one time to the next"
        environment = Environment(subject.run.config, subject.run.tasks, subject.runner)
        cause, how = made_up(environment, [(drawn.tasks[i], drawn.traces[i]) for i in chosen])
        if cause:
            return Finding(check, "fail", f"{evidence}; {how}", cause)
        return Finding(check, "unsure", f"{evidence}, so the tools are random")
    if not other:
        return Finding(check, "pass", evidence)
    i = other[0]
    at = _first_difference(told[i], again[i][0])
    was, now = (results[at][:60] if at < len(results) else None for results in (told[i], again[i][0]))
    evidence += f", in the first from {was!r} to {now!r}"
    elsewhere = {text for j in range(len(drawn.traces)) if j != i for text in _results(drawn.traces[j])}
    elsewhere |= {text for j in chosen if j != i for text in again[j][0]}
    mixed = [i for i in other if any(a != b and a in elsewhere for a, b in zip(told[i], again[i][0], strict=False))]
    if mixed:
        return Finding(check, "fail", f"{evidence}; other rollouts have these results", "tool-results-mixed")
    return Finding(check, "unsure", f"{evidence}; they may depend on time, or on rollouts that run at the same time")


def _results(trace: vf.Trace) -> list[str]:
    """The texts of the tool results in a trace, in order, without what is said of calls that could not be read.

    A script has the model's calls as they were read, so that the words for an unreadable one may be others.
    """
    messages = (node.message for node in trace.nodes if not node.sampled)
    texts = [str(m.content) for m in messages if getattr(m, "role", "") == "tool"]
    return [text for text in texts if not text.startswith(NOT_READ)]


def _replayed(subject: Subject, i: int) -> list[str]:
    drawn = subject.drawn
    return _results(subject.play(drawn.tasks[i], ScriptedChat.of_record(drawn.traces[i].to_record())))


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
